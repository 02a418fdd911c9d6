"""Records of several runs into one :class:`Comparison`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_train.compare.answers import answers_pairs
from mtp_train.compare.facts import (
    Comparison,
    Condition,
    RunRecords,
    RunRow,
    SettingDifference,
    Unreadable,
)
from mtp_train.compare.reader import read_runs
from mtp_train.compare.statistics import (
    Measured,
    at_condition,
    choose_baseline,
    choose_condition,
    difference,
)
from mtp_train.config import CompareConfig
from mtp_train.learning_curve.build import learning_curve
from mtp_train.overrides import leaves

_MOST_NAMED = 6  # settings that a message lists


def compare(settings: CompareConfig) -> Comparison:
    """Raises ``ValueError`` when no run can be read, or naming a setting that nothing fits."""
    found, unreadable = read_runs(settings.runs)
    if not found:
        reasons = "; ".join(f"{one.path}: {one.why}" for one in unreadable)
        raise ValueError(f"no run to compare: {reasons or 'none was named'}")
    return build(found, settings, unreadable)


def build(
    found: Sequence[RunRecords],
    settings: CompareConfig,
    unreadable: Sequence[Unreadable] = (),
) -> Comparison:
    """The comparison of runs that were read; none of them is left out."""
    condition = choose_condition(found, prompt_set=settings.set, k=settings.k)
    measured = {id(run): _measured(run, condition) for run in found}
    baseline = choose_baseline([one for one in measured.values() if one], settings.baseline)
    labels = _labels(found)
    flat = {label: dict(leaves(run.settings)) for label, run in zip(labels, found, strict=True)}
    rows = tuple(
        _row(run, label, measured[id(run)], baseline, condition, flat)
        for label, run in zip(labels, found, strict=True)
    )
    pairs = zip(labels, (measured[id(run)] for run in found), strict=True)
    known = [(label, one) for label, one in pairs if one is not None]
    return Comparison(
        condition,
        rows,
        _differing_settings(flat),
        tuple(unreadable),
        curve=learning_curve(known),
        answers=answers_pairs(known),
    )


def _measured(run: RunRecords, condition: Condition | None) -> Measured | None:
    row = at_condition(run, condition) if condition else None
    return Measured(run, row) if row else None


def _row(
    run: RunRecords,
    label: str,
    measured: Measured | None,
    baseline: Measured | None,
    condition: Condition | None,
    flat: Mapping[str, Mapping[str, Any]],
) -> RunRow:
    is_baseline = baseline is not None and baseline.records is run
    gap = None
    missing = list(run.missing)
    if measured and baseline and not is_baseline:
        gap = difference(measured, baseline)
        if gap is None:
            missing.append("no difference: its target is another one than the baseline's")
    if condition and run.acceptance and measured is None:
        there = ", ".join(dict.fromkeys(f"{one.prompt_set} at K={one.k}" for one in run.acceptance))
        missing.append(f"not measured so; it has {there}")
    absent = [key for key in _all_keys(flat) if key not in flat[label]]
    if absent and flat[label]:
        named = ", ".join(absent[:_MOST_NAMED])
        more = f" and {len(absent) - _MOST_NAMED} more" if len(absent) > _MOST_NAMED else ""
        missing.append(f"no record of settings that others have: {named}{more}")
    return RunRow(
        records=run,
        label=label,
        row=measured.row if measured else None,
        difference=gap,
        is_baseline=is_baseline,
        missing=tuple(missing),
    )


def _labels(found: Sequence[RunRecords]) -> list[str]:
    """Names; where two runs have the same name, as much of their paths as tells them apart."""
    paths = [Path(run.path).absolute().parts for run in found]

    def label(index: int) -> str:
        for count in range(1, len(paths[index])):
            tail = paths[index][-count:]
            if sum(path[-count:] == tail for path in paths) == 1:
                return str(Path(*tail))
        return found[index].path

    return [label(index) for index in range(len(found))]


def _differing_settings(
    flat: Mapping[str, Mapping[str, Any]],
) -> tuple[SettingDifference, ...]:
    """A run that has no record of a setting does not make it differ."""
    found = []
    for key in _all_keys(flat):
        values = [values[key] for values in flat.values() if key in values]
        if any(value != values[0] for value in values):
            by_label = {label: values.get(key) for label, values in flat.items()}
            found.append(SettingDifference(key, by_label))
    return tuple(found)


def _all_keys(flat: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for values in flat.values() for key in values))
