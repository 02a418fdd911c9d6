"""Which figures may stand beside each other, and how far apart they are.

Paired where both runs were measured on the same prompts under the same condition: prompts are
resampled once for both, so that what is easy or hard about a prompt cancels. Otherwise the interval
is made of the two single ones (MOVER, Zou and Donner 2008, Statistics in Medicine 27): for
``d = a − b`` the ends are ``d − sqrt((a − a_low)² + (b_high − b)²)`` and
``d + sqrt((a_high − a)² + (b − b_low)²)``, which takes the runs to be independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mtp_train.compare.facts import Condition, Difference, PromptTable, RunRecords
from mtp_train.report.facts import Acceptance, Figure
from mtp_train.validate.bootstrap import (
    Statistic,
    first_rate_of_sums,
    paired_interval,
    tau_of_sums,
)


@dataclass(frozen=True)
class Measured:
    """One run's figures at the comparison's condition."""

    records: RunRecords
    row: Acceptance

    @property
    def prompts(self) -> PromptTable | None:
        return self.records.prompts.get(Condition.of(self.row))


def choose_condition(
    runs: Sequence[RunRecords], *, prompt_set: str = "", k: int = 0
) -> Condition | None:
    """The condition that most runs were measured under; of several the first run's first set, then
    its largest K. ``prompt_set`` and ``k`` narrow the choice down.

    Raises ``ValueError`` when they leave nothing of what was measured.
    """
    measured = [Condition.of(row) for run in runs for row in run.acceptance]
    allowed = [
        condition
        for condition in measured
        if (not prompt_set or condition.prompt_set == prompt_set) and k in (0, condition.k)
    ]
    if measured and not allowed:
        there = sorted({f"{one.prompt_set} at K={one.k}" for one in measured})
        wanted = " ".join(
            [f"compare.set={prompt_set}"] * bool(prompt_set) + [f"compare.k={k}"] * bool(k)
        )
        raise ValueError(f"{wanted}: no run was measured so; there is {', '.join(there)}")
    counts = Counter(allowed)
    sets = list(dict.fromkeys(condition.prompt_set for condition in allowed))
    return max(
        counts,
        key=lambda one: (counts[one], -sets.index(one.prompt_set), one.k, -allowed.index(one)),
        default=None,
    )


def at_condition(run: RunRecords, condition: Condition) -> Acceptance | None:
    return next((row for row in run.acceptance if Condition.of(row) == condition), None)


def choose_baseline(measured: Sequence[Measured], wanted: str) -> Measured | None:
    """``first``, ``best`` or a run's name; ``None`` where nothing was measured.

    Raises ``ValueError`` when no measured run has that name.
    """
    if not measured:
        return None
    if wanted == "first":
        return measured[0]
    if wanted == "best":
        return max(measured, key=lambda one: one.row.tau.value)
    for one in measured:
        if wanted in (one.records.name, one.records.path):
            return one
    names = ", ".join(one.records.name for one in measured)
    raise ValueError(
        f"compare.baseline={wanted}: no such run with figures; allowed are first, best, {names}"
    )


def difference(run: Measured, baseline: Measured) -> Difference | None:
    """``None`` between heads of different targets: their texts have nothing in common."""
    if run.records.target != baseline.records.target:
        return None
    own, other = run.prompts, baseline.prompts
    if own is None or other is None:
        lacking = [one.records.name for one in (run, baseline) if one.prompts is None]
        return _unpaired(run, baseline, f"no counts by prompt of {' and '.join(lacking)}")
    if own.digests != other.digests:
        same = len(set(own.digests) & set(other.digests))
        return _unpaired(
            run, baseline, f"other prompts: {same} of {len(own.digests)} are the baseline's"
        )
    return Difference(
        tau=_paired(own, other, tau_of_sums),
        first=_paired(own, other, first_rate_of_sums),
        kind="paired",
    )


def unpaired(value: Figure, baseline: Figure) -> Figure:
    """``value`` minus ``baseline``, each with an interval of its own (MOVER)."""
    gap = value.value - baseline.value
    own, other = _ends(value), _ends(baseline)
    if own is None or other is None:
        return Figure(gap)
    below = math.hypot(value.value - own[0], other[1] - baseline.value)
    above = math.hypot(own[1] - value.value, baseline.value - other[0])
    return Figure(gap, gap - below, gap + above, value.level)


def _ends(figure: Figure) -> tuple[float, float] | None:
    if figure.low is None or figure.high is None:
        return None
    return figure.low, figure.high


def _unpaired(run: Measured, baseline: Measured, why: str) -> Difference:
    return Difference(
        tau=unpaired(run.row.tau, baseline.row.tau),
        first=unpaired(run.row.rates[0], baseline.row.rates[0]),
        kind="unpaired",
        why_unpaired=why,
    )


def _paired(own: PromptTable, other: PromptTable, statistic: Statistic) -> Figure:
    interval = paired_interval(own.counts_PS, other.counts_PS, statistic)
    pooled = [statistic(table.counts_PS.sum(0, keepdims=True)) for table in (own, other)]
    gap = float(pooled[0][0] - pooled[1][0])
    return Figure(gap, interval.low, interval.high, interval.level)
