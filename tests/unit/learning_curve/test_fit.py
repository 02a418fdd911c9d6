"""The fit against what must come out, against a slow reference, and its interval's coverage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mtp_train.learning_curve.fit import count_sizes, fit_curve

SIZES = (100_000, 200_000, 400_000, 800_000)


def still(values: np.ndarray, count: int = 400) -> np.ndarray:
    """Resamples in which prompts do not matter."""
    return np.tile(values, (count, 1))


def test_a_straight_line_over_the_logarithm_is_found_exactly() -> None:
    values = 1.2 + 0.07 * np.log2(np.array(SIZES) / SIZES[-1])
    fit = fit_curve(np.array(SIZES), values, still(values))
    assert fit.form == "log"
    assert fit.parameters == pytest.approx((1.2, 0.07))
    assert fit.gain.value == pytest.approx(0.07)
    assert fit.doubled.value == pytest.approx(1.27)
    assert (fit.gain.low, fit.gain.high) == pytest.approx((0.07, 0.07))
    assert fit.at(50_000) == pytest.approx(1.2 - 4 * 0.07)


def test_the_error_of_a_line_is_the_textbooks() -> None:
    """Slope's standard error: s / sqrt(sum (x - mean)^2), s^2 = sum r^2 / (n - 2)."""
    x = np.log2(np.array(SIZES) / SIZES[-1])
    values = 1.2 + 0.07 * x + np.array([0.01, -0.02, 0.015, -0.004])
    slope = ((x - x.mean()) * (values - values.mean())).sum() / ((x - x.mean()) ** 2).sum()
    residuals = values - values.mean() - slope * (x - x.mean())
    scatter = (sum(r**2 for r in residuals) / 2) ** 0.5
    fit = fit_curve(np.array(SIZES), values, still(values, 200_000))
    error = scatter / ((x - x.mean()) ** 2).sum() ** 0.5
    assert fit.scatter == pytest.approx(scatter)
    assert fit.gain.value == pytest.approx(slope)
    assert fit.gain_error == pytest.approx(error)
    # Student's 97.5 % quantile with two degrees of freedom is 4.303; simulated to about 1 %.
    assert fit.gain.high == pytest.approx(slope + 4.303 * error, rel=0.05)
    assert fit.gain.low == pytest.approx(slope - 4.303 * error, rel=0.05)


def test_a_power_law_with_its_ceiling_is_found_where_runs_tell() -> None:
    """Two seeds of six sizes, little noise, half of the gap to the ceiling per doubling."""
    sizes = np.array([size for size in (25_000, 50_000, *SIZES) for _ in range(2)])
    noise = np.random.default_rng(3).normal(0, 0.002, len(sizes))
    truth = 1.9 - 0.05 * (sizes / sizes.max()) ** -0.9
    fit = fit_curve(sizes, truth + noise, still(truth + noise))
    assert fit.form == "power"
    assert fit.parameters == pytest.approx((1.9, 0.05, 0.9), rel=0.15)
    gain = 0.05 * (1 - 2**-0.9)
    assert fit.gain.low is not None
    assert fit.gain.high is not None
    assert fit.gain.low < gain < fit.gain.high
    assert fit.gain.value == pytest.approx(gain, rel=0.2)


def test_the_exponent_is_that_of_a_slow_search_and_the_jacobian_that_of_differences() -> None:
    sizes = np.array([size for size in (25_000, 50_000, *SIZES) for _ in range(2)])
    noise = np.random.default_rng(3).normal(0, 0.002, len(sizes))
    values = 1.9 - 0.05 * (sizes / sizes.max()) ** -0.9 + noise
    fit = fit_curve(sizes, values, still(values))
    best = (float("inf"), 0.0)
    for exponent in np.linspace(0.5, 1.5, 2001):
        design = np.array([[1.0, -((size / sizes.max()) ** -exponent)] for size in sizes])
        solved = np.linalg.solve(design.T @ design, design.T @ values)
        best = min(best, (float(((values - design @ solved) ** 2).sum()), float(exponent)))
    assert fit.parameters[2] == pytest.approx(best[1], rel=0.025)  # the grid's step

    def gain(parameters: np.ndarray) -> float:
        return float(parameters[1] * (1 - 2 ** -parameters[2]))

    def value(parameters: np.ndarray, size: float) -> float:
        return float(parameters[0] - parameters[1] * (size / sizes.max()) ** -parameters[2])

    at = np.array(fit.parameters)
    steps = 1e-6 * np.eye(3)
    rows = [[(value(at + h, s) - value(at - h, s)) / 2e-6 for h in steps] for s in sizes]
    slope = np.array([(gain(at + h) - gain(at - h)) / 2e-6 for h in steps])
    covariance = fit.scatter**2 * np.linalg.inv(np.array(rows).T @ np.array(rows))
    assert fit.gain_error == pytest.approx(float(slope @ covariance @ slope) ** 0.5, rel=1e-3)


def test_four_runs_do_not_tell_a_ceiling_and_a_line_is_taken() -> None:
    values = 1.9 - 0.2 * (np.array(SIZES) / SIZES[-1]) ** -0.4
    assert fit_curve(np.array(SIZES), values, still(values)).form == "log"


def test_prompts_widen_the_interval() -> None:
    values = 1.2 + 0.07 * np.log2(np.array(SIZES) / SIZES[-1])
    random = np.random.default_rng(1)
    together = values + random.normal(0, 0.05, (4000, 1))  # an easy or a hard resample
    apart = values + random.normal(0, 0.05, (4000, 4))
    common, own = (fit_curve(np.array(SIZES), values, r) for r in (together, apart))
    # What shifts all runs alike is no error of a gain, but one of the value.
    assert common.gain.low == pytest.approx(0.07, abs=1e-6)
    assert common.doubled.high == pytest.approx(1.27 + 1.96 * 0.05, abs=0.01)
    error = 0.05 / sum((x - 1.5) ** 2 for x in range(4)) ** 0.5
    assert own.gain.high == pytest.approx(0.07 + 1.96 * error, abs=0.005)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """95 % of 300 trials of four runs; below 0.90 has a probability under 1e-3."""
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(300):
        noise = random.normal(0, 0.01, 4)
        values = 1.2 + 0.05 * np.log2(np.array(SIZES) / SIZES[-1]) + noise
        gain = fit_curve(np.array(SIZES), values, still(values, 2000)).gain
        assert gain.low is not None
        assert gain.high is not None
        hits += gain.low <= 0.05 <= gain.high
    assert hits / 300 >= 0.90


@pytest.mark.parametrize("sizes", [(100_000,), (100_000, 200_000), (100_000, 105_000, 200_000)])
def test_fewer_than_three_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    values = np.linspace(1.1, 1.2, len(sizes))
    with pytest.raises(ValueError, match="a fit needs 3 sizes at least, there are"):
        fit_curve(np.array(sizes), values, still(values))


def test_sizes_within_a_tenth_are_one() -> None:
    for order in itertools.permutations((100, 108, 230)):
        assert count_sizes(np.array(order)) == 2
    assert count_sizes(np.array([])) == 0
