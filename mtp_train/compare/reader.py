"""Run directories into :class:`RunRecords`. Reads files and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtp_train.compare.facts import Condition, Cost, PromptTable, RunRecords, Unreadable
from mtp_train.recorded import deciding_settings
from mtp_train.report.facts import Parity, RunFacts
from mtp_train.report.json_values import mapping, number, numbers, rows, text, whole
from mtp_train.report.reader import read_run
from mtp_train.run_dir import PARITY_NAME, read_json

_WEIGHTS = "model.safetensors"
_TOLD_OTHERWISE = ("regenerate", "chat_template")  # a section; a hash, where settings name a file
_METADATA = "__metadata__"  # of safetensors' header


def read_runs(paths: Sequence[str]) -> tuple[list[RunRecords], list[Unreadable]]:
    """Every path ends in one of the two lists, in the order given; a path counts once."""
    found: list[RunRecords] = []
    unreadable: list[Unreadable] = []
    for path in dict.fromkeys(str(Path(path)) for path in paths):
        root = Path(path)
        if root.is_file():
            unreadable.append(Unreadable(path, "a file, not a run directory", is_error=False))
        elif not root.is_dir():
            unreadable.append(Unreadable(path, "there is no such directory"))
        elif not any(root.iterdir()):
            unreadable.append(Unreadable(path, "an empty directory"))
        else:
            try:
                found.append(read_records(root))
            except ValueError as error:
                unreadable.append(Unreadable(path, _why(str(error), root)))
    return found, unreadable


def read_records(root: Path) -> RunRecords:
    """Raises ``ValueError`` when there is no run, or naming a damaged file of it."""
    facts = read_run(root, max_samples=0)
    settings = _with_shared_set(deciding_settings(root))
    validate = mapping(settings.get("validate"))
    head = Path(text(validate.get("head"))) if text(validate.get("head")) else root / "head"
    prompts = _read_prompts(root) if facts.parity.acceptance else {}
    validations = facts.logbook.validations
    cost = _read_cost(facts, head)
    return RunRecords(
        name=facts.name,
        path=str(root),
        target=facts.parity.target,
        settings=settings,
        acceptance=facts.parity.acceptance,
        prompts=prompts,
        training_tau=max((point.tau for point in validations), default=None),
        verdict=_verdict(facts.parity),
        cost=cost,
        missing=tuple(_missing(facts, settings, cost, has_prompts=bool(prompts))),
    )


def _with_shared_set(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """A token set at ``data.path`` was made by another run's settings: they are in its fingerprint
    and take the place of those that this run would have made one with.
    """
    data = mapping(settings.get("data"))
    file = Path(text(data.get("path"))) / "fingerprint.json"
    if not text(data.get("path")) or not file.is_file():
        return settings
    made = mapping(read_json(file).get("inputs"))
    told = {key: value for key, value in made.items() if key in data and key not in _TOLD_OTHERWISE}
    if "sources" in told:
        told["sources"] = list(mapping(told["sources"]))
    regenerate = {**mapping(data.get("regenerate")), **mapping(made.get("regenerate"))}
    return {**settings, "data": {**data, **told, "regenerate": regenerate}}


def _read_cost(facts: RunFacts, head: Path) -> Cost:
    steps = facts.logbook.steps
    counted = [step.num_tokens for step in steps if step.num_tokens is not None]
    split = next((split for split in facts.stores.splits if split.name == "train"), None)
    store = next((store for store in facts.stores.features if store.split == "train"), None)
    weights = head / _WEIGHTS
    trained = sum(counted) if counted and len(counted) == len(steps) else None
    return Cost(
        data_tokens=split.num_tokens if split else None,
        trained_tokens=trained,
        distinct_tokens=_distinct(facts, trained, split.num_tokens if split else None),
        steps=steps[-1].step if steps else None,
        seconds={stage.name: stage.seconds for stage in facts.logbook.stages},
        head_params=_count_values(weights) if weights.is_file() else None,
        head_bytes=weights.stat().st_size if weights.is_file() else None,
        feature_tokens=store.num_tokens if store else None,
        feature_bytes=store.num_bytes if store else None,
        codec=store.codec if store else "",
    )


def _distinct(facts: RunFacts, trained: int | None, data_tokens: int | None) -> int | None:
    """As training planned them; of runs that did not say so yet, what one pass at most saw."""
    planned = facts.logbook.distinct_tokens or data_tokens
    return None if trained is None or planned is None else min(trained, planned)


def _count_values(file: Path) -> int:
    """Of all tensors, from the file's header (8 bytes of length, then JSON)."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        raw = opened.read(size) if size <= file.stat().st_size else b""
    try:
        header = mapping(json.loads(raw))
    except ValueError as error:
        raise ValueError(f"{file}: not a safetensors file ({error})") from error
    shapes = [mapping(entry).get("shape") for name, entry in header.items() if name != _METADATA]
    return sum(int(np.prod(shape)) for shape in shapes if isinstance(shape, list))


def _read_prompts(root: Path) -> dict[Condition, PromptTable]:
    """Counts by prompt of the head that ``parity.json`` is of; empty where there are none."""
    file = root / "prompt_counts.json"
    if not file.is_file():
        return {}
    content, parity = read_json(file), read_json(root / PARITY_NAME)
    if content.get("head_sha256") != parity.get("head_sha256"):
        return {}
    found = {}
    for row in rows(content.get("rows")):
        k = whole(row.get("k")) or 0
        digests = tuple(map(text, row.get("prompts") or ()))
        counts = [numbers(entry) for entry in row.get("counts") or ()]
        if len(counts) != len(digests) or any(len(entry) != 1 + k for entry in counts):
            raise ValueError(
                f"{file}: there have to be {1 + k} counts for each of {len(digests)} prompts, K={k}"
            )
        condition = Condition(
            text(row.get("prompt_set")),
            k,
            number(row.get("temperature")) or 0.0,
            text(row.get("draft_mode")),
            whole(row.get("max_tokens")) or 0,
        )
        found[condition] = PromptTable(digests, np.asarray(counts, dtype=np.int64))
    return found


def _verdict(parity: Parity) -> str:
    climbed = [rung for rung in parity.rungs if rung.passed is not None]
    failed = [rung.name for rung in climbed if not rung.passed]
    if failed:
        return f"FAILED {' '.join(failed)}"
    if not climbed:
        return "not run"
    names = [rung.name for rung in parity.rungs]
    first, last = names.index(climbed[0].name), names.index(climbed[-1].name)
    is_unbroken = len(climbed) == last - first + 1 > 1
    shown = f"{names[first]}–{names[last]}" if is_unbroken else " ".join(r.name for r in climbed)
    return f"passed {shown}"


def _missing(
    facts: RunFacts, settings: Mapping[str, Any], cost: Cost, *, has_prompts: bool
) -> list[str]:
    found = []
    if not settings:
        found.append("no config.yaml: the settings are not known")
    if cost.steps is None:
        found.append("no training steps in events.jsonl")
    elif cost.trained_tokens is None:
        found.append("no tokens of each step in events.jsonl")
    if cost.head_bytes is None:
        found.append("no head/")
    if cost.feature_bytes is None:
        found.append("no features (removed, or never dumped)")
    if cost.data_tokens is None:
        found.append("no data/statistics.json")
    if not facts.parity.acceptance:
        found.append("no acceptance: mtp validate has not measured this run")
    elif not has_prompts:
        found.append(
            "no counts by prompt (measured by an older version, or of another head): remove "
            "validate.json and run mtp validate again for a paired difference"
        )
    if facts.parity.is_stale:
        found.append(
            "no figures of the present head: parity.json is of another one, validate again"
        )
    unfinished = [stage.name for stage in facts.logbook.stages if not stage.is_finished]
    if unfinished:
        found.append(f"did not finish: {', '.join(unfinished)}")
    return found


def _why(message: str, root: Path) -> str:
    if message.startswith("run.name="):
        return "no run: it has neither config.yaml nor events.jsonl nor parity.json"
    return f"damaged: {message.replace(f'{root}/', '')}"
