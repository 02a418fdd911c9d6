"""A learning curve as words, table and picture: for `mtp compare` and the report alike."""

from __future__ import annotations

import math

from mtp_train.learning_curve.facts import CurveFit, LearningCurve
from mtp_train.report import formats
from mtp_train.report.charts import draw_twice, span
from mtp_train.report.facts import Figure
from mtp_train.report.svg import Margins, Plot, Scale, linear_scale, log_scale
from mtp_train.report.view import Panel, Table

TITLE = "What more data brings"
_LINE_POINTS = 48
_COLUMNS = ("what", "fit", "runs", "sizes", "scatter", "now", "a doubling brings", "then")


def describe_curve(curve: LearningCurve) -> str:
    """What doubling the data would bring in one sentence, or why that is not known."""
    if curve.tau is None or curve.first is None:
        return curve.refusal
    fit = curve.tau
    return (
        f"Doubling the data from {formats.short(_rounded(fit.largest))} tokens would bring τ "
        f"{_gain(fit.gain, 3)}, first position {_gain(curve.first.gain, 1, scale=100)} points, by "
        f"{_form(fit)} through {fit.num_runs} runs of {fit.num_sizes} sizes."
    )


def curve_table(curve: LearningCurve) -> Table:
    """One row for tokens per step, one for the first position; empty without a fit."""
    if curve.tau is None or curve.first is None:
        return Table(_COLUMNS, ())
    return Table(
        _COLUMNS,
        (
            _row("tokens per step", curve.tau, 3, 1.0),
            _row("first position, %", curve.first, 1, 100.0),
        ),
        frozenset({0, 1}),
    )


def curve_panel(curve: LearningCurve) -> Panel:
    """Tokens per step over tokens, the fit, and its doubling."""
    if curve.tau is None:
        return Panel(TITLE, absent=curve.refusal)
    lead = (
        f"{describe_curve(curve)} Filled: measured by the runtime, with 95 % intervals over "
        f"prompts; every run saw its tokens {_times(curve.passes)}. Hollow: the fit at twice the "
        "tokens; its interval holds the runs' scatter around the fit and the choice of prompts, "
        "not another recipe."
    )
    drawing = draw_twice(lambda width: plot_curve(curve, width))
    return Panel(TITLE, lead, drawing, curve_table(curve), is_open=True, is_broad=True)


def plot_curve(curve: LearningCurve, width: float) -> str:
    """The picture as SVG text, without colours. ``curve`` has a fit."""
    fit = curve.tau
    assert fit is not None, "refused curves have no picture"
    ends = [fit.doubled.value, *_ends(fit.doubled)]
    ends += [v for run in curve.runs for v in (run.tau.value, *_ends(run.tau))]
    smallest = min(run.num_tokens for run in curve.runs)
    plain = log_scale(smallest * 0.8, fit.largest * 2.5)
    ticks = tuple((value, formats.short(value)) for value, _ in plain.ticks)
    x = Scale(plain.low, plain.high, ticks, is_log=True)
    y = linear_scale(*span(ends, least=0.05))
    plot = Plot(width, 300, x, y, "Tokens per step over training tokens", Margins(top=26))
    plot.axes("distinct tokens trained on", "tokens per step")
    plot.line(_points(fit, smallest), "line s0")
    for run in curve.runs:
        _whisker(plot, run.num_tokens, run.tau, "whisker s0")
        tip = f"{run.label}: {run.num_tokens:,} tokens, τ {formats.decimal(run.tau.value)}"
        plot.mark(run.num_tokens, run.tau.value, "circle", "mark s0", tip=tip)
    _whisker(plot, 2 * fit.largest, fit.doubled, "whisker s1")
    tip = (
        f"fit at {2 * fit.largest:,.0f} tokens: τ {formats.decimal(fit.doubled.value)} "
        f"{formats.interval(fit.doubled)}"
    )
    plot.mark(2 * fit.largest, fit.doubled.value, "diamond", "hollow s1", tip=tip)
    return plot.render()


def _whisker(plot: Plot, tokens: float, figure: Figure, css: str) -> None:
    if figure.low is not None and figure.high is not None:
        plot.whisker(tokens, figure.low, figure.high, css)


def _points(fit: CurveFit, smallest: float) -> list[tuple[float, float]]:
    ratio = 2 * fit.largest / smallest
    places = [smallest * ratio ** (index / _LINE_POINTS) for index in range(_LINE_POINTS + 1)]
    return [(tokens, fit.at(tokens)) for tokens in places]


def _row(name: str, fit: CurveFit, digits: int, scale: float) -> tuple[str, ...]:
    now = fit.at(fit.largest)
    return (
        name,
        _formula(fit, digits, scale),
        str(fit.num_runs),
        str(fit.num_sizes),
        formats.decimal(scale * fit.scatter, digits + 1),
        formats.decimal(scale * now, digits),
        f"{_gain(fit.gain, digits, scale=scale)}, fit's error "
        f"{formats.decimal(scale * fit.gain_error, digits + 1)}",
        f"{formats.decimal(scale * fit.doubled.value, digits)} "
        f"{formats.interval(fit.doubled, digits, scale=scale)}",
    )


def _formula(fit: CurveFit, digits: int, scale: float) -> str:
    d = f"d = tokens / {formats.short(_rounded(fit.largest))}"
    shown = [formats.decimal(scale * value, digits) for value in fit.parameters[:2]]
    if fit.form == "log":
        return f"{shown[0]} + {shown[1]} log₂ d, {d}"
    return f"{shown[0]} − {shown[1]} d^−{formats.decimal(fit.parameters[2], 2)}, {d}"


def _form(fit: CurveFit) -> str:
    if fit.form == "log":
        return "a straight line over the logarithm of the tokens"
    return "a power law with an irreducible part"


def _gain(figure: Figure, digits: int, *, scale: float = 1.0) -> str:
    """``+0.035 [+0.020, +0.050]``."""
    value, low, high = (
        formats.signed(None if v is None else scale * v, digits)
        for v in (figure.value, figure.low, figure.high)
    )
    return f"{value} [{low}, {high}]" if figure.has_interval else value


def _times(passes: float) -> str:
    return "once" if math.isclose(passes, 1.0, abs_tol=0.05) else f"{passes:.3g} times"


def _rounded(tokens: float) -> float:
    """Three digits: what a sentence can hold."""
    return float(f"{tokens:.3g}")


def _ends(figure: Figure) -> list[float]:
    return [value for value in (figure.low, figure.high) if value is not None]
