"""Prompt-clustered bootstrap: tokens of one prompt are not independent, prompts are.

Shape legend: P prompts, S counted quantities, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]  # pooled sums [R, S] -> values [R]


@dataclass(frozen=True)
class Interval:
    """A two-sided percentile interval at ``level``."""

    low: float
    high: float
    level: float


def resample_sums(sums_PS: np.ndarray, *, num_resamples: int, seed: int) -> np.ndarray:
    """Sums over prompts drawn with replacement, float64 ``[R, S]``."""
    num_prompts = sums_PS.shape[0]
    if num_prompts == 0:
        raise ValueError("bootstrap: no prompts were measured")
    weights = np.random.default_rng(seed).multinomial(
        num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_resamples
    )
    return weights.astype(np.float64) @ sums_PS.astype(np.float64)


def prompt_interval(
    sums_PS: np.ndarray,
    statistic: Statistic,
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of ``statistic`` of the pooled sums; one row of ``sums_PS`` per prompt.

    Resamples whose statistic is not a number (nothing was counted) are left out.
    """
    values = statistic(resample_sums(sums_PS, num_resamples=num_resamples, seed=seed))
    values = values[np.isfinite(values)]
    if not len(values):
        return Interval(float("nan"), float("nan"), level)
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level)
