"""``parity.json`` into records. A file of an older ladder has fewer fields, never other ones."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_train.report.facts import (
    Acceptance,
    Breakdown,
    DecodeSpeed,
    DraftVocabulary,
    Figure,
    Parity,
    Prediction,
    Rung,
    RungFigure,
    Served,
    Speed,
)
from mtp_train.report.json_values import mapping, number, numbers, pair, rows, text, whole
from mtp_train.run_dir import read_json
from runtime.files import sha256_file

QUESTIONS = {
    "P0": "Is the stored state the state the runtime feeds?",
    "P1": "Is a feature independent of who shared its batch?",
    "P2": "Does the trained head compute the same at inference?",
    "P3": "Does the runtime accept what training predicts?",
    "P4": "Is the output unchanged, and the draft's state right?",
    "P5": "Is the speed measured, and does the cost model hold?",
    "P6": "Does the serving engine agree?",
}
_NO_FIGURES = ("inputs",)  # what a rung keeps to know itself by
_CONTEXT = re.compile(r"/context(\d+)$")


def read_parity(file: Path, head: Path) -> Parity:
    """Raises ``ValueError`` naming a damaged file. ``head``: the run's head directory."""
    if not file.is_file():
        return Parity(rungs=_rungs({}))
    content = read_json(file)
    rungs = mapping(content.get("rungs"))
    acceptance = tuple(_acceptance(row) for row in rows(content.get("acceptance")))
    speed_figures, engine_figures = _figures_of(rungs, "P5"), _figures_of(rungs, "P6")
    return Parity(
        is_finished=bool(content.get("finished", True)),
        is_stale=_is_stale(content, head),
        target=text(content.get("target")),
        rungs=_rungs(rungs),
        acceptance=acceptance,
        prediction=_prediction(_figures_of(rungs, "P3"), acceptance),
        served=tuple(
            _served(row, text(engine_figures.get("engine")))
            for row in rows(engine_figures.get("sets"))
        ),
        speed=tuple(_speed(row, speed_figures) for row in rows(content.get("speed"))),
        breakdown=tuple(_breakdown(row) for row in rows(content.get("breakdown"))),
        target_kv_bytes=whole(speed_figures.get("target_kv_bytes_per_token")),
        draft_kv_bytes=whole(speed_figures.get("draft_kv_bytes_per_token")),
        draft_vocab=_draft_vocab(mapping(content.get("draft_vocab"))),
        trained_len=whole(mapping(content.get("lengths")).get("trained")),
        measured_len=whole(mapping(content.get("lengths")).get("measured")),
    )


def tau_of_rates(conditional: tuple[float, ...]) -> float:
    """Tokens per step that conditional acceptance rates amount to."""
    return 1 + sum(itertools.accumulate(conditional, lambda a, b: a * b))


def _draft_vocab(content: Mapping[str, Any]) -> DraftVocabulary | None:
    size = whole(content.get("size"))
    return None if size is None else DraftVocabulary(size, text(content.get("served_by")))


def _is_stale(content: Mapping[str, Any], head: Path) -> bool:
    """Whether the head that was measured has other files now; its place may have been moved."""
    measured = Path(text(content.get("head")))
    place = measured if measured.is_dir() else head
    files = [(place / name, value) for name, value in mapping(content.get("head_sha256")).items()]
    return any(file.is_file() and sha256_file(file) != value for file, value in files)


def _figures_of(rungs: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return mapping(mapping(rungs.get(name)).get("figures"))


def _rungs(content: Mapping[str, Any]) -> tuple[Rung, ...]:
    names = [*QUESTIONS, *(name for name in content if name not in QUESTIONS)]
    return tuple(_rung(name, mapping(content.get(name))) for name in names)


def _rung(name: str, content: Mapping[str, Any]) -> Rung:
    question = QUESTIONS.get(name, "")
    if not content:
        return Rung(name, question)
    return Rung(
        name,
        question,
        passed=content.get("passed") is True,
        note=text(content.get("note")),
        seconds=number(content.get("seconds")),
        figures=_rung_figures(mapping(content.get("figures")), mapping(content.get("bounds"))),
    )


def _rung_figures(figures: Mapping[str, Any], bounds: Mapping[str, Any]) -> tuple[RungFigure, ...]:
    """Figures with the bound of the same name; bounds that hold for several figures come last."""
    values = dict(_leaves(figures))
    limits = dict(_leaves(bounds))
    found = [RungFigure(name, value, limits.get(name)) for name, value in values.items()]
    found += [RungFigure(name, None, value) for name, value in limits.items() if name not in values]
    return tuple(found)


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Single figures and plain lists; rows of a table are shown elsewhere."""
    for name, value in content.items():
        if name in _NO_FIGURES:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name} · ")
        elif not rows(value):
            yield f"{prefix}{name}", value


def _acceptance(row: Mapping[str, Any]) -> Acceptance:
    values = numbers(row.get("rates"))
    level = number(row.get("tau_level")) or 0.95
    return Acceptance(
        prompt_set=text(row.get("prompt_set")),
        k=whole(row.get("k")) or len(values),
        temperature=number(row.get("temperature")) or 0.0,
        draft_mode=text(row.get("draft_mode")),
        num_drafts=whole(row.get("drafts")) or 0,
        num_prompts=whole(row.get("prompts")) or 0,
        max_tokens=whole(row.get("max_tokens")) or 0,
        tau=_figure(row.get("tau"), row.get("tau_interval"), level),
        rates=_figures(values, row.get("rate_intervals"), level),
        conditional_rates=numbers(row.get("conditional_rates")),
    )


def _prediction(
    figures: Mapping[str, Any], acceptance: tuple[Acceptance, ...]
) -> Prediction | None:
    dtypes = [name.removesuffix("_training") for name in figures if name.endswith("_training")]
    if not dtypes:
        return None
    dtype = next((name for name in dtypes if name != "float32"), dtypes[0])
    predicted = numbers(figures.get(f"{dtype}_training"))
    measured = numbers(figures.get(f"{dtype}_runtime"))
    if not predicted or len(measured) != len(predicted):
        return None
    k = len(predicted)
    # P3 looks at the first prompt set, decoded greedily with arg-max drafts
    same = next((row for row in acceptance if row.k == k and row.temperature == 0), None)
    gaps = numbers(figures.get(f"{dtype}_gap"))
    return Prediction(
        dtype=dtype,
        prompt_set=same.prompt_set if same else "",
        k=k,
        num_drafts=whole(figures.get(f"{dtype}_drafts", figures.get(f"{dtype}_steps"))) or 0,
        num_prompts=whole(figures.get(f"{dtype}_prompts")) or (same.num_prompts if same else 0),
        predicted_tau=_figure(
            figures.get(f"{dtype}_training_tau", tau_of_rates(predicted)),
            figures.get(f"{dtype}_training_tau_interval"),
        ),
        measured_tau=_figure(
            figures.get(f"{dtype}_runtime_tau", tau_of_rates(measured)),
            figures.get(f"{dtype}_runtime_tau_interval"),
        ),
        predicted=predicted,
        measured=measured,
        gaps=_figures(gaps, figures.get(f"{dtype}_gap_interval"), 0.99),
        undecided=tuple(round(j) + 1 for j in numbers(figures.get(f"{dtype}_undecided"))),
    )


def _served(row: Mapping[str, Any], engine: str) -> Served:
    drafts = whole(row.get("drafts_served")) or 0
    accepted = numbers(row.get("accepted_served"))
    rates = tuple(count / max(drafts, 1) for count in accepted)
    return Served(
        engine=engine,
        prompt_set=text(row.get("set")),
        dtype=text(row.get("dtype")),
        k=whole(row.get("k")) or len(rates),
        num_drafts=drafts,
        num_prompts=whole(row.get("prompts")) or 0,
        tau=_figure(row.get("tau_served", 1 + sum(rates)), row.get("tau_served_interval")),
        rates=rates,
        tau_here=number(row.get("tau")),
    )


def _speed(row: Mapping[str, Any], figures: Mapping[str, Any]) -> Speed:
    """``figures`` of P5 hold what rows of an older ladder lack."""
    prompt_set = text(row.get("prompt_set"))
    named = _CONTEXT.search(prompt_set)
    context_len = whole(row.get("context_len", named.group(1) if named else 0)) or 0
    batch_size, k = whole(row.get("batch_size")) or 1, whole(row.get("k")) or 1
    cell = f"batch{batch_size}" + (f"_context{context_len}" if context_len else "")
    entry = {**mapping(figures.get(f"{cell}_k{k}")), **row}
    cost = {**mapping(figures.get(f"{cell}_cost")), **row}
    return Speed(
        prompt_set=_CONTEXT.sub("", prompt_set),
        batch_size=batch_size,
        context_len=context_len,
        k=k,
        speedup=_figure(
            row.get("speedup"), [row.get("low"), row.get("high")], number(row.get("level")) or 0.95
        ),
        predicted=number(entry.get("predicted", entry.get("predicted_speedup"))),
        emitted_per_step=number(entry.get("emitted_per_step")),
        draft_cost=number(cost.get("c")),
        verify_cost=number(cost.get("v")),
        draft=_decode_speed(entry),
        plain=_decode_speed(mapping(row.get("plain", figures.get(f"{cell}_plain")))),
        num_groups=whole(row.get("groups")),
        num_repeats=whole(row.get("repeats")),
    )


def _decode_speed(row: Mapping[str, Any]) -> DecodeSpeed:
    return DecodeSpeed(
        tokens_per_s=number(row.get("tokens_per_s")),
        inter_token_p50_ms=number(row.get("inter_token_p50_ms")),
        inter_token_p99_ms=number(row.get("inter_token_p99_ms")),
        first_token_ms=number(row.get("first_token_ms")),
    )


def _breakdown(row: Mapping[str, Any]) -> Breakdown:
    return Breakdown(
        dimension=text(row.get("dimension")),
        label=text(row.get("label")),
        prompt_set=text(row.get("prompt_set")),
        k=whole(row.get("k")) or 0,
        temperature=number(row.get("temperature")) or 0.0,
        num_drafts=whole(row.get("drafts")) or 0,
        num_prompts=whole(row.get("prompts")) or 0,
        tau=_figure(row.get("tau"), row.get("tau_interval")),
        rates=numbers(row.get("rates")),
    )


def _figure(value: Any, interval: Any, level: float = 0.95) -> Figure:
    low, high = pair(interval) or (None, None)
    found = number(value)
    return Figure(float("nan") if found is None else found, low, high, level)


def _figures(values: Sequence[float], intervals: Any, level: float) -> tuple[Figure, ...]:
    """Values with their intervals, which an older ladder did not write."""
    known = list(intervals) if isinstance(intervals, list) else []
    padded = [*known, *([None] * len(values))][: len(values)]
    return tuple(
        _figure(value, interval, level) for value, interval in zip(values, padded, strict=True)
    )
