"""The page: facts judged, drawn and put into the template."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_train.config import ReportConfig
from mtp_train.learning_curve.facts import LearningCurve
from mtp_train.learning_curve.group import group_curve
from mtp_train.learning_curve.panel import curve_panel
from mtp_train.report import formats
from mtp_train.report.acceptance_panels import acceptance_panels
from mtp_train.report.coverage_panels import coverage_panels
from mtp_train.report.facts import Acceptance, Prediction, RunFacts, Sample, Texts, TrainingRow
from mtp_train.report.reader import read_run
from mtp_train.report.run_panels import run_panels, training_panels
from mtp_train.report.speed_panels import concurrency_panel, speed_panels
from mtp_train.report.template import render_template
from mtp_train.report.verdict import best_speed, judge, main_acceptance, measured_cells
from mtp_train.report.view import NOT_MEASURED, Section, Tile
from mtp_train.run_dir import write_text_atomic

_NO_CURVE = LearningCurve(refusal=NOT_MEASURED)


def write_page(root: Path, file: Path, config: ReportConfig) -> None:
    """Render the run at ``root`` into ``file``.

    Raises ``ValueError`` when there is no run, or naming a damaged file of it.
    """
    facts = read_run(root, max_samples=config.max_samples if config.samples else 0)
    write_text_atomic(file, render(facts, shows_texts=config.samples, curve=group_curve(root)))


def render(
    facts: RunFacts,
    *,
    shows_texts: bool,
    curve: LearningCurve = _NO_CURVE,
    now: datetime.datetime | None = None,
) -> str:
    """The HTML. ``curve``: of the run and those it belongs to. ``now`` is what the footer says."""
    return render_template(
        "report.html.j2",
        now=now,
        facts=facts,
        verdict=judge(facts),
        tiles=_tiles(facts),
        concurrency=concurrency_panel(facts.parity),
        sections=_sections(facts, curve),
        samples=[_SampleView.of(sample) for sample in facts.texts.samples],
        training_row=facts.texts.training_row,
        training_spans=_spans(facts.texts.training_row),
        positions=_positions(facts.texts),
        shows_texts=shows_texts,
        formats=formats,
    )


@dataclass(frozen=True)
class _SampleView:
    """A sample with the shares of its tokens by origin."""

    sample: Sample
    shares: str

    @classmethod
    def of(cls, sample: Sample) -> _SampleView:
        counts = Counter(token.position for token in sample.tokens)
        total = max(len(sample.tokens), 1)
        parts = [
            f"position {position}: {formats.share(counts[position] / total, 0)}"
            for position in sorted(counts)
            if position
        ]
        parts.append(f"target: {formats.share(counts[0] / total, 0)}")
        return cls(sample, f"{len(sample.tokens):,} tokens · " + " · ".join(parts))


def _sections(facts: RunFacts, curve: LearningCurve) -> tuple[Section, ...]:
    return (
        Section(
            "acceptance",
            "Acceptance",
            acceptance_panels(facts.parity),
            "How many of the drafted tokens the target keeps.",
        ),
        Section(
            "speed",
            "Speed and memory",
            speed_panels(facts.parity),
            "What that is worth in time, by batch size and context, and what it costs.",
        ),
        Section(
            "training",
            "Training",
            training_panels(facts.logbook),
            "Loss from the trainer; acceptance from the inference runtime.",
        ),
        Section(
            "data",
            "Data",
            (
                curve_panel(curve),
                *coverage_panels(facts.stores.coverage, facts.parity.breakdown),
            ),
            "What the head was trained on, beside what it was measured on, and what more would "
            "bring.",
        ),
        Section("run", "The run", run_panels(facts.logbook, facts.stores)),
    )


def _tiles(facts: RunFacts) -> tuple[Tile, ...]:
    parity = facts.parity
    prediction = parity.prediction
    measured = main_acceptance(parity, k=prediction.k if prediction else None)
    return (
        _predicted_tile(prediction),
        _measured_tile(measured),
        _served_tile(facts),
        _speed_tile(facts),
    )


def _predicted_tile(prediction: Prediction | None) -> Tile:
    title = "Predicted by training"
    if prediction is None:
        return Tile(title, NOT_MEASURED, details=("rung P3",))
    tau = prediction.predicted_tau
    return Tile(
        title,
        formats.decimal(tau.value),
        "tokens per step",
        formats.interval(tau) if tau.has_interval else "interval not recorded",
        (
            f"{formats.set_name(prediction.prompt_set)} · K = {prediction.k} · "
            f"{formats.decoding(0, 'argmax')}",
            f"{prediction.num_drafts:,} drafts, {prediction.num_prompts:,} prompts · "
            f"{prediction.dtype}",
        ),
    )


def _measured_tile(row: Acceptance | None) -> Tile:
    title = "Measured in the runtime"
    if row is None:
        return Tile(title, NOT_MEASURED)
    return Tile(
        title,
        formats.decimal(row.tau.value),
        "tokens per step",
        formats.interval(row.tau),
        (
            f"{formats.set_name(row.prompt_set)} · K = {row.k} · "
            f"{formats.decoding(row.temperature, row.draft_mode)}",
            f"{row.num_drafts:,} drafts, {row.num_prompts:,} prompts",
        ),
    )


def _served_tile(facts: RunFacts) -> Tile:
    title = "Served by the engine"
    prediction = facts.parity.prediction
    served = max(
        facts.parity.served,
        key=lambda row: (prediction is not None and row.k == prediction.k, row.num_drafts),
        default=None,
    )
    if served is None:
        rung = next((rung for rung in facts.parity.rungs if rung.name == "P6"), None)
        if rung is None or rung.passed is None:
            return Tile(title, "not run", details=("rung P6: mtp validate engine=vllm",))
        return Tile(title, "passed" if rung.passed else "FAILED", details=(rung.note,))
    return Tile(
        title,
        formats.decimal(served.tau.value),
        "tokens per step",
        "" if served.tau_here is None else f"{formats.decimal(served.tau_here)} here, same prompts",
        (
            f"{served.engine} · {formats.set_name(served.prompt_set)} · K = {served.k}",
            f"{served.num_drafts:,} drafts, {served.num_prompts:,} prompts · {served.dtype}",
        ),
    )


def _speed_tile(facts: RunFacts) -> Tile:
    title = "Speed-up at its best"
    best = best_speed(facts.parity)
    if best is None:
        return Tile(title, NOT_MEASURED, details=("rung P5",))
    cells = measured_cells(facts.parity)
    runs = ""
    if best.num_groups is not None and best.num_repeats is not None:
        runs = f" · {best.num_groups * best.num_repeats} runs each"
    return Tile(
        title,
        formats.times(best.speedup.value),
        "of plain decoding",
        formats.speedup_interval(best.speedup),
        (
            f"{formats.set_name(best.prompt_set)} · K = {best.k} · batch {best.batch_size}",
            f"highest lower end of {len(cells)} cells{runs}",
        ),
    )


def _spans(row: TrainingRow | None) -> list[tuple[str, bool]]:
    """Neighbouring tokens of equal mask as one text."""
    groups = itertools.groupby(row.tokens if row else (), key=lambda token: token[1])
    return [("".join(text for text, _ in group), mask) for mask, group in groups]


def _positions(texts: Texts) -> Sequence[int]:
    drafted = {token.position for sample in texts.samples for token in sample.tokens}
    return range(1, max([texts.k, *drafted]) + 1)
