"""The comparison as one page: two pictures, three tables, and what is missing."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from pathlib import Path

from mtp_train.compare.facts import Comparison, RunRow
from mtp_train.compare.tables import (
    acceptance_table,
    answers_table,
    cost_table,
    describe_condition,
    missing_lines,
    settings_table,
)
from mtp_train.console import format_duration
from mtp_train.learning_curve.panel import curve_panel
from mtp_train.report import formats
from mtp_train.report.charts import Mark, Row, draw_rows, draw_twice, span
from mtp_train.report.facts import Acceptance
from mtp_train.report.svg import Margins, Plot, Scale, Shape, linear_scale, log_scale, spread_labels
from mtp_train.report.template import render_template
from mtp_train.report.view import Panel, Section
from mtp_train.run_dir import write_text_atomic

_MOST_NAMES = 12  # names beside the marks; of more runs they are in the tips only
_CHARACTER = 6.4  # mean advance at 12 px
_LONGEST_NAME = 24
_LOG_RATIO = 8.0  # a cost that spans more than this is drawn on a logarithmic axis


def write_page(comparison: Comparison, file: Path) -> None:
    write_text_atomic(file, render(comparison))


def render(comparison: Comparison, *, now: datetime.datetime | None = None) -> str:
    """The HTML. ``now`` is what the footer says."""
    number = len(comparison.runs)
    return render_template(
        "compare.html.j2",
        now=now,
        title=f"{number} run{'s' * (number != 1)}",
        condition=describe_condition(comparison),
        sections=_sections(comparison),
        missing=missing_lines(comparison),
    )


def _sections(comparison: Comparison) -> tuple[Section, ...]:
    baseline = next((one.label for one in comparison.runs if one.is_baseline), None)
    against = f"Differences are to {baseline}." if baseline else ""
    return (
        Section(
            "acceptance",
            "Acceptance",
            (
                _by_cost(comparison, "Against training tokens", "tokens trained on", _tokens),
                _by_cost(comparison, "Against time", "hours of training", _train_hours),
                _in_rows(comparison),
                Panel(
                    "All figures", table=acceptance_table(comparison), is_open=True, is_broad=True
                ),
            ),
            against,
        ),
        Section(
            "data",
            "Data",
            (
                curve_panel(comparison.curve),
                Panel(
                    "Regenerated against recorded answers",
                    "Runs that differ in who wrote the answers and in nothing else, with tokens "
                    "within a tenth.",
                    table=answers_table(comparison),
                    is_open=True,
                    is_broad=True,
                    absent="no two runs differ in data.regenerate.enabled alone",
                ),
            ),
        ),
        Section(
            "settings",
            "Settings that differ",
            (
                Panel(
                    "Settings",
                    table=settings_table(comparison),
                    is_open=True,
                    is_broad=True,
                    absent="no recorded setting differs",
                ),
            ),
        ),
        Section(
            "cost",
            "Cost",
            (
                Panel(
                    "What each run took", table=cost_table(comparison), is_open=True, is_broad=True
                ),
            ),
            "Times are of the stages that a run started itself, over all their attempts.",
        ),
    )


def _in_rows(comparison: Comparison) -> Panel:
    measured = [(one, one.row) for one in comparison.runs if one.row is not None]
    if not measured:
        return Panel("Run by run")
    ends = [value for _, row in measured for value in _ends(row)]
    rows = [
        Row(
            one.label,
            f"{formats.decimal(row.tau.value)} {formats.interval(row.tau)}",
            (Mark(row.tau.value, _tip(one, row), _colour(one), row.tau.low, row.tau.high),),
        )
        for one, row in measured
    ]
    reference = next((row.tau.value for one, row in measured if one.is_baseline), None)
    drawing = draw_rows(
        rows,
        label="Tokens per step of every run",
        x_title="tokens per step",
        x=linear_scale(*span(ends, least=0.05)),
        reference=reference,
    )
    return Panel("Run by run", "The dashed line is the baseline.", drawing)


def _by_cost(
    comparison: Comparison, title: str, x_title: str, cost: Callable[[RunRow], float | None]
) -> Panel:
    points = [
        (one, one.row, value)
        for one in comparison.runs
        if one.row is not None and (value := cost(one)) is not None and value > 0
    ]
    if not points:
        return Panel(title)
    x = _cost_scale([value for _, _, value in points])
    y = linear_scale(*span([end for _, row, _ in points for end in _ends(row)], least=0.05))
    has_names = len(points) <= _MOST_NAMES

    def draw(width: float) -> str:
        longest = max(len(_clip(one.label)) for one, _, _ in points) if has_names else 0
        room = min(longest * _CHARACTER, width * 0.3)
        margins = Margins(top=26, right=16 + room)
        plot = Plot(width, 300, x, y, f"Tokens per step against {x_title}", margins)
        plot.axes(x_title, "tokens per step")
        for one, row, value in points:
            css = f"s{_colour(one)}"
            if row.tau.low is not None and row.tau.high is not None:
                plot.whisker(value, row.tau.low, row.tau.high, f"whisker {css}")
            shape: Shape = "diamond" if one.is_baseline else "circle"
            plot.mark(value, row.tau.value, shape, f"mark {css}", tip=_tip(one, row))
        if has_names:
            _draw_names(plot, points, room)
        return plot.render()

    without = sum(1 for one in comparison.runs if one.row is not None) - len(points)
    lead = "Whiskers: 95 % intervals over prompts. Diamond: the baseline."
    if without:
        lead += f" {without} measured run{'s' * (without != 1)} without a recorded cost not drawn."
    return Panel(title, lead, draw_twice(draw))


def _draw_names(plot: Plot, points: list[tuple[RunRow, Acceptance, float]], room: float) -> None:
    wanted = [plot.at_y(row.tau.value) + 4 for _, row, _ in points]
    places = spread_labels(wanted, gap=14, low=plot.margins.top, high=plot.bottom)
    for (one, row, value), place in zip(points, places, strict=True):
        css = f"s{_colour(one)}"
        start = plot.at_x(value) + 7
        plot.segment(start, plot.at_y(row.tau.value), plot.right + 6, place - 4, "grid")
        text = _clip(one.label, int(room / _CHARACTER))
        plot.text(plot.right + 9, place, text, f"name {css}")


def _cost_scale(values: list[float]) -> Scale:
    low, high = min(values), max(values)
    if high > _LOG_RATIO * low:
        scale = log_scale(low * 0.8, high * 1.25)
        ticks = tuple((value, formats.short(value)) for value, _ in scale.ticks)
        return Scale(scale.low, scale.high, ticks, is_log=True)
    scale = linear_scale(*span(values, least=0.2 * high))
    return Scale(
        scale.low, scale.high, tuple((value, formats.short(value)) for value, _ in scale.ticks)
    )


def _ends(row: Acceptance) -> list[float]:
    found = [row.tau.value, row.tau.low, row.tau.high]
    return [value for value in found if value is not None and math.isfinite(value)]


def _tokens(one: RunRow) -> float | None:
    value = one.records.cost.trained_tokens
    return None if value is None else float(value)


def _train_hours(one: RunRow) -> float | None:
    seconds = one.records.cost.seconds.get("train")
    return None if seconds is None else seconds / 3600


def _tip(one: RunRow, row: Acceptance) -> str:
    parts = [f"{one.label}: {formats.decimal(row.tau.value)} {formats.interval(row.tau)}"]
    cost = one.records.cost
    if cost.trained_tokens is not None:
        parts.append(f"{cost.trained_tokens:,} tokens")
    if "train" in cost.seconds:
        parts.append(f"{format_duration(cost.seconds['train'])} of training")
    return ", ".join(parts)


def _colour(one: RunRow) -> int:
    return 1 if one.is_baseline else 0


def _clip(text: str, count: int = _LONGEST_NAME) -> str:
    return text if len(text) <= count else text[: max(1, count - 1)] + "…"
