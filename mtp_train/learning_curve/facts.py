"""A learning curve as plain records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mtp_train.report.facts import Figure

Form = Literal["log", "power"]


@dataclass(frozen=True)
class CurveFit:
    """``parameters``: (a, b) of ``a + b log2(d)`` or (c, A, alpha) of ``c - A d^-alpha``, with
    ``d`` the tokens over those of the largest run. ``gain``: what twice its tokens would bring.
    """

    form: Form
    parameters: tuple[float, ...]
    largest: float  # tokens
    num_runs: int
    num_sizes: int
    scatter: float  # standard deviation of the residuals, n - p in the denominator
    gain: Figure
    gain_error: float  # standard error by the residuals alone
    doubled: Figure  # the value itself at twice the tokens

    def at(self, tokens: float) -> float:
        """The fitted value."""
        d = tokens / self.largest
        if self.form == "log":
            a, b = self.parameters
            return a + b * math.log2(d)
        c, amplitude, exponent = self.parameters
        return float(c - amplitude * d**-exponent)


@dataclass(frozen=True)
class SizedRun:
    """One point: distinct tokens, and what was measured with them."""

    label: str
    num_tokens: int
    tau: Figure
    first: Figure


@dataclass(frozen=True)
class LearningCurve:
    """``tau`` and ``first`` (share of drafts whose first token is accepted) are fits, or ``None``
    with ``refusal`` saying why in a sentence.

    ``passes``: times that every token was seen, the same for all runs. ``left_out``: measured runs
    that do not belong to the curve.
    """

    runs: tuple[SizedRun, ...] = ()
    passes: float = 1.0
    tau: CurveFit | None = None
    first: CurveFit | None = None
    refusal: str = ""
    left_out: int = 0
