"""Which runs make a learning curve, and the curve: runs that differ in their tokens and nothing
else that matters, measured on the same prompts under the same condition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtp_train.compare.facts import RunRecords
from mtp_train.compare.recipe import compared_settings
from mtp_train.compare.statistics import Measured
from mtp_train.learning_curve.facts import LearningCurve, SizedRun
from mtp_train.learning_curve.fit import LEAST_SIZES, count_sizes, fit_curve
from mtp_train.validate.bootstrap import (
    Statistic,
    first_rate_of_sums,
    resample_sums,
    tau_of_sums,
)

NUM_RESAMPLES = 2000
# What says how much data there is, or which draw of it: free to differ on a curve.
_FREE = (
    "seed",
    "data.max_tokens_total",
    "data.max_conversations",
    "trainer.max_tokens",
    "trainer.max_steps",
)


def learning_curve(measured: Sequence[tuple[str, Measured]]) -> LearningCurve:
    """The curve with the most sizes among labelled runs of one condition."""
    groups: dict[object, list[tuple[str, Measured]]] = {}
    for label, one in measured:
        if one.records.cost.distinct_tokens:
            groups.setdefault(_recipe(one.records), []).append((label, one))
    # Of equally many sizes the first run's: dictionaries keep their order, max the first.
    chosen = max(groups.values(), key=lambda group: count_sizes(_sizes(group)), default=[])
    num_sizes = count_sizes(_sizes(chosen))
    if num_sizes < LEAST_SIZES:
        return LearningCurve(refusal=_refusal(num_sizes), left_out=len(measured))
    chosen.sort(key=lambda item: int(item[1].records.cost.distinct_tokens or 0))
    runs = tuple(
        SizedRun(label, int(one.records.cost.distinct_tokens or 0), one.row.tau, one.row.rates[0])
        for label, one in chosen
    )
    own = [one for _, one in chosen]
    tau_RN, first_RN = (
        _resampled(own, statistic) for statistic in (tau_of_sums, first_rate_of_sums)
    )
    if tau_RN is None or first_RN is None:
        names = ", ".join(label for label, one in chosen if one.prompts is None)
        return LearningCurve(
            refusal="What doubling the data would bring is not known: without counts of the same "
            f"prompts a fit has no interval (no counts, or of other prompts: {names or 'all'}); "
            "run mtp validate again.",
            left_out=len(measured),
        )
    tokens = _sizes(chosen)
    return LearningCurve(
        runs=runs,
        passes=_passes(own[0].records),
        tau=fit_curve(tokens, np.array([run.tau.value for run in runs]), tau_RN),
        first=fit_curve(tokens, np.array([run.first.value for run in runs]), first_RN),
        left_out=len(measured) - len(runs),
    )


def _refusal(num_sizes: int) -> str:
    there = ("there is none", "there is one", "there are two")[num_sizes]
    return (
        f"What doubling the data would bring is not known: a fit needs at least {LEAST_SIZES} "
        f"sizes of runs that are equal in everything else, and {there}. "
        "`mtp train -m … trainer.max_tokens=a,b,c` trains them over the same features."
    )


def _sizes(group: Sequence[tuple[str, Measured]]) -> np.ndarray:
    return np.array([one.records.cost.distinct_tokens or 0 for _, one in group])


def _recipe(records: RunRecords) -> object:
    """Equal for runs of one curve: target, settings, and how often each token was seen."""
    settings = compared_settings(records, free=_FREE)
    return records.target, round(_passes(records), 1), tuple(sorted(settings.items()))


def _passes(records: RunRecords) -> float:
    cost = records.cost
    return (cost.trained_tokens or 0) / max(1, cost.distinct_tokens or 1)


def _resampled(measured: Sequence[Measured], statistic: Statistic) -> np.ndarray | None:
    """The statistic of every run in the same resamples of the prompts, ``[R, N]``; ``None`` where
    the runs were not counted on the same prompts.
    """
    tables = [one.prompts for one in measured]
    known = [table for table in tables if table is not None]
    if len(known) < len(tables) or len({table.digests for table in known}) != 1:
        return None
    columns = [
        statistic(resample_sums(table.counts_PS, num_resamples=NUM_RESAMPLES, seed=0))
        for table in known
    ]
    return np.stack(columns, axis=1)
