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


def paired_interval(
    sums_PS: np.ndarray,
    baseline_PS: np.ndarray,
    statistic: Statistic,
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Interval of the statistic of ``sums_PS`` minus that of ``baseline_PS``.

    Row p of both is the same prompt, and every resample draws the same prompts for both, so that
    what is easy or hard about a prompt cancels. Raises ``ValueError`` for unequal prompt counts.
    """
    if len(sums_PS) != len(baseline_PS):
        raise ValueError(
            f"paired bootstrap: {len(sums_PS)} prompts against {len(baseline_PS)}; both have to be "
            "of the same prompts in the same order"
        )
    num_own = sums_PS.shape[1]
    return prompt_interval(
        np.concatenate([sums_PS, baseline_PS], axis=1),
        lambda sums_RS: statistic(sums_RS[:, :num_own]) - statistic(sums_RS[:, num_own:]),
        level=level,
        num_resamples=num_resamples,
        seed=seed,
    )


def tau_of_sums(sums_RS: np.ndarray) -> np.ndarray:
    """Tokens per step of summed counts (drafts, then accepted by position), float64 ``[R]``."""
    taus: np.ndarray = 1 + np.divide(sums_RS[:, 1:].sum(-1), np.maximum(sums_RS[:, 0], 1))
    return taus


def first_rate_of_sums(sums_RS: np.ndarray) -> np.ndarray:
    """Share of drafts whose first token was accepted, of the same sums, float64 ``[R]``."""
    rates: np.ndarray = np.divide(sums_RS[:, 1], np.maximum(sums_RS[:, 0], 1))
    return rates
