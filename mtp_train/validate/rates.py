"""Conditional acceptance rates of two sides, and whether they differ: the judge of P3 and P6.

Shape legend: P prompts, R resamples, K positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np

from mtp_train.validate.bootstrap import Interval, prompt_interval
from mtp_train.validate.replay import ReplayedStep

MAX_GAP = 0.015
FAMILY_LEVEL = 0.99


def judge_position(
    gap: float, interval: Interval, *, num_drafts: int, min_drafts: int
) -> Literal["agrees", "undecided", "differs"]:
    """One position's verdict. With ``min_drafts`` the gap itself counts. With fewer, the interval
    does: it lies within the bound, beyond it, or touches it, which decides nothing.
    """
    if num_drafts >= min_drafts:
        return "agrees" if abs(gap) <= MAX_GAP else "differs"
    if interval.low > MAX_GAP or interval.high < -MAX_GAP:
        return "differs"
    if interval.low >= -MAX_GAP and interval.high <= MAX_GAP:
        return "agrees"
    return "undecided"


def all_sums(steps_of_prompts: Sequence[Sequence[ReplayedStep]], k: int) -> np.ndarray:
    """Per prompt drafts, then steps that accepted more than j for each position j: int64
    ``[P, 1 + K]``.
    """
    rows = [
        (len(steps), *(sum(step.num_accepted > j for step in steps) for j in range(k)))
        for steps in steps_of_prompts
    ]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 1 + k)


def tau_of(sums: np.ndarray) -> np.ndarray:
    """Tokens per step ``[R]`` of sums ``[R, 1 + K]``."""
    tau: np.ndarray = 1 + sums[:, 1:].sum(1) / np.maximum(sums[:, 0], 1)
    return tau


def conditional_rates(sums: np.ndarray) -> np.ndarray:
    """Ratios of neighbours ``[R, K]``; 0 where nothing got that far."""
    reached, passed = sums[:, :-1], sums[:, 1:]
    return np.divide(passed, reached, out=np.zeros(passed.shape), where=reached > 0)


def conditional_gap(k: int, j: int, sums: np.ndarray) -> np.ndarray:
    """Gap of conditional rate j, ``[R]``, from sums of both sides side by side."""
    return conditional_rates(sums[:, : k + 1])[:, j] - conditional_rates(sums[:, k + 1 :])[:, j]


def gap_intervals(ours: np.ndarray, theirs: np.ndarray) -> list[Interval]:
    """Family-wise intervals of the gap of each conditional rate; ``ours`` and ``theirs`` are sums
    per prompt, ``[P, 1 + K]``.
    """
    k = ours.shape[1] - 1
    level = 1 - (1 - FAMILY_LEVEL) / k  # Bonferroni over positions
    both = np.concatenate([ours, theirs], axis=1)
    return [prompt_interval(both, partial(conditional_gap, k, j), level=level) for j in range(k)]
