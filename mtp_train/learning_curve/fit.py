"""Acceptance against tokens: a fit, and what one doubling of the tokens would bring by it.

Two forms of ``y(d)``, with ``d`` the tokens over those of the largest run:

    log    y = a + b log2(d)            a doubling brings b, wherever it begins
    power  y = c - A d^-alpha           with an irreducible part c; alpha -> 0 is the form above

The power law is taken where there are four sizes and the corrected Akaike criterion (Hurvich and
Tsai 1989, Biometrika 76) prefers it to the straight line; three parameters fit three sizes always
and say nothing. For a given exponent both are linear least squares, so the exponent is searched on
a grid and nothing can fail to converge.

The interval of a prediction adds two errors, by simulation: that of the fit (residual scatter,
Student's t with ``n - p`` degrees of freedom: training noise and a form that is not quite right)
and that of the prompts (the same resample of prompts for every run, fitted again). The scatter
holds a part of the second already, so the interval is rather too wide than too narrow. It says
nothing about other prompts, recipes or sources.

Shape legend: N runs, R resamples, M draws of both errors, E exponents, Q parameters.
"""

from __future__ import annotations

import numpy as np

from mtp_train.learning_curve.facts import CurveFit, Form
from mtp_train.report.facts import Figure

LEAST_SIZES = 3
_LEAST_SIZES_OF_POWER = 4
_SAME_SIZE = 1.1  # runs whose tokens differ by less are of one size
_EXPONENTS_E = np.geomspace(0.02, 3.0, 240)
_LEVEL = 0.95
_DRAWS = 100_000  # of Student's t: with one degree of freedom its quantiles need many
_TINY = 1e-18


def count_sizes(tokens: np.ndarray) -> int:
    """Sizes that differ: ``tokens`` sorted, cut where the next is more than a tenth larger."""
    ordered = np.sort(np.asarray(tokens, dtype=np.float64))
    if not len(ordered):
        return 0
    return 1 + int((ordered[1:] > _SAME_SIZE * ordered[:-1]).sum())


def fit_curve(
    tokens: np.ndarray, values_N: np.ndarray, resampled_RN: np.ndarray, *, seed: int = 0
) -> CurveFit:
    """``resampled_RN``: the values again in resamples of the prompts, the same for all runs where
    they were measured on the same.

    Raises ``ValueError`` for fewer than three sizes: a line through two points has no error.
    """
    d_N = np.asarray(tokens, dtype=np.float64)
    num_sizes = count_sizes(d_N)
    if num_sizes < LEAST_SIZES:
        raise ValueError(f"a fit needs {LEAST_SIZES} sizes at least, there are {num_sizes}")
    largest = float(d_N.max())
    d_N = d_N / largest
    values_N = np.asarray(values_N, dtype=np.float64)
    exponent = _choose_exponent(d_N, values_N, num_sizes)
    form: Form = "log" if exponent is None else "power"
    exponents_R = None if exponent is None else _best_exponents(d_N, resampled_RN)[0]
    linear = _solve(_design(d_N, exponent), values_N)
    parameters = (*map(float, linear), *(() if exponent is None else (exponent,)))
    jacobian_NQ = _jacobian(d_N, parameters)
    residuals_N = values_N - _design(d_N, exponent) @ linear
    free = len(d_N) - len(parameters)
    scatter = float(np.sqrt(max(residuals_N @ residuals_N, 0.0) / free))
    covariance_QQ = scatter**2 * np.linalg.pinv(jacobian_NQ.T @ jacobian_NQ)
    resampled_RQ = _refit(d_N, resampled_RN, exponents_R)
    doubled_Q, now_Q = (_jacobian(np.array([d]), parameters)[0] for d in (2.0, 1.0))
    random = np.random.default_rng(seed)
    t_M = random.standard_t(free, size=_DRAWS)
    t_M = np.concatenate([t_M, -t_M])  # symmetric, as Student's t is

    def predict(gradient_Q: np.ndarray, value: float, values_R: np.ndarray) -> Figure:
        error = float(np.sqrt(max(gradient_Q @ covariance_QQ @ gradient_Q, 0.0)))
        # Deviations: a bootstrap's own bias is no part of the prediction.
        deviations_M = random.choice(values_R - np.median(values_R), size=len(t_M))
        low, high = np.quantile(
            value + error * t_M + deviations_M, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2]
        )
        return Figure(value, float(low), float(high), _LEVEL)

    value_now, value_doubled = (float(_values(d, np.array([parameters]))[0]) for d in (1.0, 2.0))
    now_R, doubled_R = (_values(d, resampled_RQ) for d in (1.0, 2.0))
    slope_Q = doubled_Q - now_Q
    return CurveFit(
        form=form,
        parameters=parameters,
        largest=largest,
        num_runs=len(d_N),
        num_sizes=num_sizes,
        scatter=scatter,
        gain=predict(slope_Q, value_doubled - value_now, doubled_R - now_R),
        gain_error=float(np.sqrt(max(slope_Q @ covariance_QQ @ slope_Q, 0.0))),
        doubled=predict(doubled_Q, value_doubled, doubled_R),
    )


def _choose_exponent(d_N: np.ndarray, values_N: np.ndarray, num_sizes: int) -> float | None:
    """The power law's exponent, or ``None`` for the straight line."""
    if num_sizes < _LEAST_SIZES_OF_POWER:
        return None
    exponents_1, squares_1 = _best_exponents(d_N, values_N[None])
    exponent = float(exponents_1[0])
    if exponent in (_EXPONENTS_E[0], _EXPONENTS_E[-1]):
        return None  # not determined by these runs
    residuals_N = values_N - _design(d_N, None) @ _solve(_design(d_N, None), values_N)
    line = _corrected_akaike(float(residuals_N @ residuals_N), len(d_N), num_parameters=2)
    power = _corrected_akaike(float(squares_1[0]), len(d_N), num_parameters=3)
    return exponent if power < line else None


def _corrected_akaike(squares: float, num_runs: int, *, num_parameters: int) -> float:
    k = num_parameters + 1  # the scatter is one, too
    if num_runs <= k + 1:
        return float("inf")
    fit = num_runs * np.log(max(squares, _TINY) / num_runs)
    return float(fit + 2 * k + 2 * k * (k + 1) / (num_runs - k - 1))


def _best_exponents(d_N: np.ndarray, values_RN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The exponent of least squares for every row, and its sum of squares, both ``[R]``."""
    bases_ENQ = np.stack([np.linalg.qr(_design(d_N, e))[0] for e in _EXPONENTS_E])
    explained_ERQ = np.einsum("rn,enq->erq", values_RN, bases_ENQ)
    squares_ER = (values_RN**2).sum(-1) - (explained_ERQ**2).sum(-1)
    best_R = squares_ER.argmin(0)
    return _EXPONENTS_E[best_R], np.maximum(squares_ER.min(0), 0.0)


def _design(d_N: np.ndarray, exponent: float | None) -> np.ndarray:
    """Columns of the form that is linear once the exponent is known, ``[N, 2]``."""
    column_N = np.log2(d_N) if exponent is None else -(d_N**-exponent)
    return np.stack([np.ones_like(d_N), column_N], axis=1)


def _solve(design_NQ: np.ndarray, values_N: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.lstsq(design_NQ, values_N, rcond=None)[0])


def _refit(d_N: np.ndarray, values_RN: np.ndarray, exponents_R: np.ndarray | None) -> np.ndarray:
    """Parameters of every resample, ``[R, 2]`` or ``[R, 3]``."""
    if exponents_R is None:
        return _solve(_design(d_N, None), values_RN.T).T
    rows = []
    for exponent in np.unique(exponents_R):
        chosen_R = exponents_R == exponent
        linear = _solve(_design(d_N, float(exponent)), values_RN[chosen_R].T).T
        rows.append((chosen_R, np.column_stack([linear, np.full(len(linear), exponent)])))
    fitted_RQ = np.empty((len(values_RN), 3))
    for chosen_R, values in rows:
        fitted_RQ[chosen_R] = values
    return fitted_RQ


def _values(d: float, parameters_RQ: np.ndarray) -> np.ndarray:
    """Fitted values at ``d`` for every row of parameters, ``[R]``."""
    first, second = parameters_RQ[:, 0], parameters_RQ[:, 1]
    if parameters_RQ.shape[1] == 2:
        return np.asarray(first + second * np.log2(d))
    return np.asarray(first - second * d ** -parameters_RQ[:, 2])


def _jacobian(d_N: np.ndarray, parameters: tuple[float, ...]) -> np.ndarray:
    """Derivatives of the fitted values by the parameters, ``[N, Q]``."""
    if len(parameters) == 2:
        return _design(d_N, None)
    _, amplitude, exponent = parameters
    power_N = d_N**-exponent
    return np.stack([np.ones_like(d_N), -power_N, amplitude * np.log(d_N) * power_N], axis=1)
