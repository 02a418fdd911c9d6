"""The comparison as tables of text (the terminal's and the page's alike) and as JSON values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mtp_train.compare.facts import Comparison, Difference, RunRow, SettingDifference
from mtp_train.console import format_duration
from mtp_train.events import to_jsonable
from mtp_train.report import formats
from mtp_train.report.facts import Figure
from mtp_train.report.stores import last_part
from mtp_train.report.view import Table

BASELINE = "baseline"
MOST_COLUMNS = 6  # runs side by side; more stand below each other


def describe_condition(comparison: Comparison) -> str:
    """``MT-Bench · K = 3 · greedy, arg-max drafts``, or that nothing was measured."""
    one = comparison.condition
    if one is None:
        return "no acceptance was measured"
    way = formats.decoding(one.temperature, one.draft_mode)
    return f"{formats.set_name(one.prompt_set)} · K = {one.k} · {way} · {one.max_tokens} tokens"


def acceptance_table(comparison: Comparison) -> Table:
    columns = (
        *("run", "tokens per step", "first position", "difference", "first position differs"),
        *("by", "drafts", "prompts", "in training", "parity"),
    )
    rows = tuple(
        (
            one.label,
            _with_interval(one.row.tau if one.row else None),
            _with_interval(one.row.rates[0] if one.row else None),
            _gap(one.difference.tau if one.difference else None, one),
            _gap(one.difference.first if one.difference else None, one),
            _kind(one.difference),
            formats.count(one.row.num_drafts if one.row else None),
            formats.count(one.row.num_prompts if one.row else None),
            formats.decimal(one.records.training_tau),
            one.records.verdict,
        )
        for one in comparison.runs
    )
    return Table(columns, rows, frozenset({0, 5, 9}))


def answers_table(comparison: Comparison) -> Table:
    """Heads trained on the target's own answers against heads trained on recorded ones."""
    columns = (
        *("recorded answers", "regenerated answers", "tokens of each"),
        *("regenerated − recorded", "first position", "by"),
    )
    rows = tuple(
        (
            pair.recorded,
            pair.regenerated,
            f"{pair.num_tokens[0]:,} / {pair.num_tokens[1]:,}",
            _signed(pair.difference.tau),
            _signed(pair.difference.first),
            pair.difference.kind,
        )
        for pair in comparison.answers
    )
    return Table(columns, rows, frozenset({0, 1, 5}))


def cost_table(comparison: Comparison) -> Table:
    """Times are of the stages that this run started itself."""
    stages = _stages(comparison)
    columns = (
        *("run", "steps", "tokens trained on", "head", "weights", "training split"),
        *("features", "codec", *stages, "total time"),
    )
    rows = []
    for one in comparison.runs:
        cost = one.records.cost
        times = [cost.seconds.get(stage) for stage in stages]
        total = format_duration(cost.total_seconds) if cost.seconds else formats.ABSENT
        rows.append(
            (
                one.label,
                formats.count(cost.steps),
                formats.count(cost.trained_tokens),
                formats.data_size(cost.head_bytes),
                formats.count(cost.head_params),
                formats.count(cost.data_tokens),
                formats.data_size(cost.feature_bytes),
                cost.codec or formats.ABSENT,
                *(formats.ABSENT if t is None else format_duration(t) for t in times),
                total,
            )
        )
    return Table(columns, tuple(rows), frozenset({0, 7}))


def settings_table(comparison: Comparison) -> Table:
    """Only what differs. Settings down the side for a few runs, runs for many."""
    labels = [one.label for one in comparison.runs]
    cells = {item.key: _show_values(item, labels) for item in comparison.settings}
    if len(labels) <= MOST_COLUMNS:
        rows = tuple((key, *(values[label] for label in labels)) for key, values in cells.items())
        return Table(("setting", *labels), rows, frozenset(range(len(labels) + 1)))
    rows = tuple((label, *(values[label] for values in cells.values())) for label in labels)
    return Table(("run", *cells), rows if cells else (), frozenset(range(len(cells) + 1)))


def turned(content: Table) -> Table:
    """The same cells with rows for columns."""
    heads = (content.columns[0], *(row[0] for row in content.rows))
    rows = tuple(
        (name, *(row[index] for row in content.rows))
        for index, name in enumerate(content.columns)
        if index
    )
    return Table(heads, rows, frozenset({0}))


def missing_lines(comparison: Comparison) -> list[str]:
    """What is not there, run by run, and arguments that are no runs."""
    lines = [f"{one.label}: {what}" for one in comparison.runs for what in one.missing]
    lines += [
        f"{one.label}: unpaired, for {one.difference.why_unpaired}"
        for one in comparison.runs
        if one.difference and one.difference.why_unpaired
    ]
    return lines + [
        f"{one.path}: {'NOT COMPARED' if one.is_error else 'left out'}, {one.why}"
        for one in comparison.unreadable
    ]


def to_json(comparison: Comparison) -> dict[str, Any]:
    """``{"condition", "runs", "curve", "answers", "settings", "unreadable"}``; what is not known is
    null.
    """
    return {
        "condition": to_jsonable(comparison.condition),
        "runs": [_run_values(one) for one in comparison.runs],
        "curve": to_jsonable(comparison.curve),
        "answers": to_jsonable(comparison.answers),
        "settings": {item.key: to_jsonable(item.values) for item in comparison.settings},
        "unreadable": to_jsonable(comparison.unreadable),
    }


def _show_values(item: SettingDifference, labels: Sequence[str]) -> dict[str, str]:
    """Absolute paths lose their folders, for a page is passed on, unless these are what differs."""
    values = {label: item.values[label] for label in labels}
    short = {label: _without_folders(value) for label, value in values.items()}
    is_telling = len(set(map(str, short.values()))) == len(set(map(str, values.values())))
    return {label: _show_value(value) for label, value in (short if is_telling else values).items()}


def _without_folders(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return last_part(value) if isinstance(value, str) and value.startswith("/") else value


def _show_value(value: Any) -> str:
    if value is None:
        return formats.ABSENT
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _run_values(one: RunRow) -> dict[str, Any]:
    row, cost = one.row, one.records.cost
    return {
        "name": one.records.name,
        "path": one.records.path,
        "is_baseline": one.is_baseline,
        "tau": to_jsonable(row.tau) if row else None,
        "first": to_jsonable(row.rates[0]) if row else None,
        "drafts": row.num_drafts if row else None,
        "prompts": row.num_prompts if row else None,
        "difference": to_jsonable(one.difference),
        "training_tau": one.records.training_tau,
        "verdict": one.records.verdict,
        "cost": to_jsonable(cost) | {"total_seconds": cost.total_seconds},
        "missing": list(one.missing),
    }


def _with_interval(figure: Figure | None) -> str:
    if figure is None:
        return formats.ABSENT
    known = f" {formats.interval(figure)}" if figure.has_interval else ""
    return f"{formats.decimal(figure.value)}{known}"


def _gap(figure: Figure | None, one: RunRow) -> str:
    if figure is None:
        return BASELINE if one.is_baseline else formats.ABSENT
    return _signed(figure)


def _signed(figure: Figure) -> str:
    known = ""
    if figure.low is not None and figure.high is not None:
        known = f" [{formats.signed(figure.low, 3)}, {formats.signed(figure.high, 3)}]"
    return f"{formats.signed(figure.value, 3)}{known}"


def _kind(difference: Difference | None) -> str:
    return difference.kind if difference else ""


def _stages(comparison: Comparison) -> list[str]:
    return list(
        dict.fromkeys(stage for one in comparison.runs for stage in one.records.cost.seconds)
    )
