"""Panels about coverage: what the head was trained on beside what it was measured on."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_train.report import formats
from mtp_train.report.facts import Breakdown, CoveragePart
from mtp_train.report.view import Panel, Table

_KINDS = (
    (
        "domains",
        "task",
        "By domain",
        "domain",
        "Sources and what their records name as their domain; prompt sets and their tasks.",
    ),
    (
        "prompt_scripts",
        "script",
        "By script of the prompt",
        "script",
        "The Unicode script that most letters of the question are of.",
    ),
)
_UNCOUNTED = "Training is not counted: the token set is of an older version."
_ABSENT = "not recorded: the token set and the measurement are of an older version"


def coverage_panels(
    coverage: Sequence[CoveragePart], breakdown: Sequence[Breakdown]
) -> tuple[Panel, ...]:
    """Training split first, then every prompt set with its acceptance."""
    panels = []
    for kind, dimension, title, column, lead in _KINDS:
        table = _table(coverage, breakdown, kind, dimension, column)
        if table.rows and not any(part.kind == kind for part in coverage):
            lead = f"{lead} {_UNCOUNTED}"
        panels.append(Panel(title, lead, table=table, is_open=True, absent=_ABSENT, is_broad=True))
    return tuple(panels)


def _table(
    coverage: Sequence[CoveragePart],
    breakdown: Sequence[Breakdown],
    kind: str,
    dimension: str,
    column: str,
) -> Table:
    rows = [
        (
            "training",
            part.label,
            formats.share(part.row_share),
            formats.share(part.token_share),
            formats.ABSENT,
            formats.ABSENT,
        )
        for part in coverage
        if part.kind == kind
    ]
    found = [row for row in breakdown if row.dimension == dimension]
    k = max((row.k for row in found), default=0)
    measured = [row for row in found if row.k == k]
    for row in measured:
        total = sum(one.num_prompts for one in measured if one.prompt_set == row.prompt_set)
        rows.append(
            (
                formats.set_name(row.prompt_set),
                "all prompts" if row.label == row.prompt_set else row.label,
                formats.share(row.num_prompts / total if total else None),
                formats.ABSENT,
                formats.decimal(row.tau.value),
                formats.interval(row.tau),
            )
        )
    columns = ("of", column, "rows or prompts", "answer tokens", f"τ (K = {k})", "95 % interval")
    return Table(columns, tuple(rows), frozenset({0, 1}))
