"""The charts' shapes: points with intervals over an axis, rows with intervals, curves over steps.

Each is drawn twice, for a page and for a phone: scaling one drawing would make its text unreadable.
Colours come from the page by series number (``s0``, ``s1``, …), shapes repeat what colours say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtp_train.report.svg import (
    SHAPES,
    Margins,
    Plot,
    Scale,
    Shape,
    linear_scale,
    log_scale,
    spread_labels,
)

WIDE, NARROW = 540, 330
_CHARACTER = 6.4  # mean advance at 12 px
_MAX_BINS = 150
_SHIFT = 11  # pixels between the marks of two series at one place


@dataclass(frozen=True)
class Drawing:
    """One chart in both widths, as SVG text."""

    wide: str
    narrow: str


@dataclass(frozen=True)
class Point:
    """``x`` in the units of the axis; ``low`` and ``high`` bound ``y`` where that was measured."""

    x: float
    y: float
    tip: str
    low: float | None = None
    high: float | None = None
    is_marked: bool = False  # a ring around it


@dataclass(frozen=True)
class Series:
    """``number`` picks colour and shape; a hollow one is a prediction or a reference."""

    name: str
    points: tuple[Point, ...]
    number: int
    is_hollow: bool = False
    is_joined: bool = True
    shape: Shape | None = None  # instead of the number's


@dataclass(frozen=True)
class Mark:
    value: float
    tip: str
    number: int
    low: float | None = None
    high: float | None = None
    is_hollow: bool = False


@dataclass(frozen=True)
class Row:
    """One line of :func:`draw_rows`. ``heading`` starts a group above it."""

    label: str
    detail: str
    marks: tuple[Mark, ...]
    heading: str = ""


def draw_twice(draw: Callable[[float], str]) -> Drawing:
    return Drawing(draw(WIDE), draw(NARROW))


def shape_of(number: int) -> Shape:
    return SHAPES[number % len(SHAPES)]


def draw_swatch(number: int, *, is_hollow: bool = False) -> str:
    """One mark for a legend, as SVG text."""
    plot = Plot(14, 14, Scale(0, 1, ()), Scale(0, 1, ()), "")
    css = f"{'hollow' if is_hollow else 'mark'} s{number}"
    plot.mark_px(7, 7, shape_of(number), css)
    return plot.render()


def draw_series(
    series: Sequence[Series],
    *,
    label: str,
    x_title: str,
    y_title: str,
    y: Scale,
    x: Scale,
    shade_below: float | None = None,
    shade_text: str = "",
    note: str = "",
) -> Drawing:
    """Points with intervals, joined per series; names stand at the right end.

    ``shade_below`` shades everything under that value; ``note`` is written above the plot's right
    end.
    """

    def draw(width: float) -> str:
        longest = max((len(item.name) for item in series), default=0)
        margins = Margins(top=26, right=16 + longest * _CHARACTER)
        plot = Plot(width, 300 if width == WIDE else 270, x, y, label, margins)
        if shade_below is not None and y.low < shade_below:
            plot.region(y.low, shade_below, "below")
        plot.axes(x_title, y_title)
        if shade_below is not None:
            at = plot.at_y(shade_below)
            plot.segment(margins.left, at, plot.right, at, "unity")
            if y.low < shade_below:
                plot.text(margins.left + 8, plot.bottom - 8, shade_text, "hint")
        for index, item in enumerate(series):
            _draw_one(plot, item, shift=(index - (len(series) - 1) / 2) * _SHIFT)
        if note:
            plot.text(width, 12, note, "note", anchor="end")
        _name_series(plot, series)
        return plot.render()

    return draw_twice(draw)


def _draw_one(plot: Plot, item: Series, *, shift: float) -> None:
    css = f"s{item.number}"
    if item.is_joined and len(item.points) > 1:
        moved = shift / (plot.right - plot.margins.left) * (plot.x.high - plot.x.low)
        plot.line([(point.x + moved, point.y) for point in item.points], f"line {css}")
    for point in item.points:
        if point.low is not None and point.high is not None:
            plot.whisker(point.x, point.low, point.high, f"whisker {css}", shift=shift)
    kind = "hollow" if item.is_hollow else "mark"
    for point in item.points:
        if point.is_marked:
            at = plot.at_x(point.x) + shift
            plot.mark_px(at, plot.at_y(point.y), "circle", "ring", size=9)
        shape = item.shape or shape_of(item.number)
        plot.mark(point.x, point.y, shape, f"{kind} {css}", tip=point.tip, shift=shift)


def _name_series(plot: Plot, series: Sequence[Series]) -> None:
    named = [item for item in series if item.points and item.name]
    wanted = [plot.at_y(item.points[-1].y) + 4 for item in named]
    places = spread_labels(wanted, gap=15, low=plot.margins.top, high=plot.bottom + 2)
    for item, place in zip(named, places, strict=True):
        plot.text(plot.right + 10, place, item.name, f"name s{item.number}")


def draw_rows(
    rows: Sequence[Row], *, label: str, x_title: str, x: Scale, reference: float | None = None
) -> Drawing:
    """Rows of marks with intervals over one horizontal axis; the detail stands at the right."""

    def draw(width: float) -> str:
        is_wide = width == WIDE
        pitch = 26 if is_wide else 40
        label_width = max((len(row.label) for row in rows), default=0) * _CHARACTER + 12
        detail_width = max((len(row.detail) for row in rows), default=0) * _CHARACTER + 10
        margins = Margins(
            top=8,
            right=detail_width if is_wide else 12,
            bottom=40,
            left=min(label_width, 190) if is_wide else 12,
        )
        num_headings = sum(bool(row.heading) for row in rows)
        height = margins.top + margins.bottom + pitch * len(rows) + 26 * num_headings
        plot = Plot(width, height, x, Scale(0, 1, ()), label, margins)
        _draw_columns(plot, x_title, reference)
        top: float = margins.top
        for row in rows:
            if row.heading:
                plot.text(0, top + 17, row.heading, "heading")
                top += 26
            line = top + (13 if is_wide else 27)
            if is_wide:
                plot.text(0, line + 4, _clip(row.label, margins.left - 8), "label")
                plot.text(width, line + 4, row.detail, "detail", anchor="end")
            else:
                room = width - detail_width - 8
                plot.text(0, top + 14, _clip(row.label, room), "label")
                plot.text(width, top + 14, row.detail, "detail", anchor="end")
            _draw_marks(plot, row, line)
            top += pitch
        return plot.render()

    return draw_twice(draw)


def _draw_columns(plot: Plot, x_title: str, reference: float | None) -> None:
    for value, text in plot.x.ticks:
        at = plot.at_x(value)
        plot.segment(at, plot.margins.top, at, plot.bottom, "grid")
        plot.text(at, plot.bottom + 16, text, "tick", anchor="middle")
    if reference is not None and plot.x.low <= reference <= plot.x.high:
        at = plot.at_x(reference)
        plot.segment(at, plot.margins.top, at, plot.bottom, "unity")
    middle = (plot.margins.left + plot.right) / 2
    plot.text(middle, plot.height - 6, x_title, "axis", anchor="middle")


def _draw_marks(plot: Plot, row: Row, line: float) -> None:
    values = [mark.value for mark in row.marks]
    if len(values) > 1:
        ends = plot.at_x(min(values)), plot.at_x(max(values))
        plot.segment(ends[0], line, ends[1], line, "span")
    for mark in row.marks:
        css = f"s{mark.number}"
        if mark.low is not None and mark.high is not None:
            low, high = plot.at_x(mark.low), plot.at_x(mark.high)
            plot.segment(low, line, high, line, f"whisker {css}")
    for mark in row.marks:
        css = f"{'hollow' if mark.is_hollow else 'mark'} s{mark.number}"
        at = plot.at_x(mark.value)
        plot.mark_px(at, line, shape_of(mark.number), css, tip=mark.tip)


def draw_curve(
    curve: Sequence[tuple[float, float]],
    dots: Sequence[Series],
    *,
    label: str,
    x_title: str,
    y_title: str,
    y: Scale,
    x: Scale,
    curve_name: str = "",
) -> Drawing:
    """A long curve in bins, and few points over the same steps."""
    bins = bin_curve(curve)

    def draw(width: float) -> str:
        names = [curve_name, *(item.name for item in dots)]
        margins = Margins(top=26, right=16 + max(map(len, names)) * _CHARACTER)
        plot = Plot(width, 250, x, y, label, margins)
        plot.axes(x_title, y_title)
        if bins:
            plot.line([(b.middle, b.mean) for b in bins], "line curve")
            for b in bins:
                plot.strip(b.first - 0.5, b.last + 0.5, b.describe(curve_name or "value"))
        for item in dots:
            _draw_one(plot, item, shift=0)
        ends = [Series(curve_name, (Point(0, bins[-1].mean, ""),), 8)] if bins else []
        _name_series(plot, [*ends, *dots])
        return plot.render()

    return draw_twice(draw)


@dataclass(frozen=True)
class Bin:
    """Consecutive points of a curve and their mean."""

    first: float
    last: float
    mean: float
    count: int

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2

    def describe(self, name: str) -> str:
        if self.count == 1:
            return f"step {self.first:,.0f}: {name} {self.mean:.3f}"
        steps = f"steps {self.first:,.0f}–{self.last:,.0f}"
        return f"{steps}: {name} {self.mean:.3f} (mean of {self.count})"


def bin_curve(points: Sequence[tuple[float, float]], *, max_bins: int = _MAX_BINS) -> list[Bin]:
    """At most ``max_bins`` means over consecutive points, every point in one bin."""
    size = max(1, math.ceil(len(points) / max_bins))
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [Bin(p[0][0], p[-1][0], sum(v for _, v in p) / len(p), len(p)) for p in parts]


def span(values: Sequence[float], *, pad: float = 0.08, least: float = 0.0) -> tuple[float, float]:
    """Range of the finite values with room around it; at least ``least`` wide."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    extra = max((high - low) * pad, (least - (high - low)) / 2)
    return low - extra, high + extra


def scale_for_losses(values: Sequence[float]) -> Scale:
    """Logarithmic where a linear axis would flatten the end of training."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    if low > 0 and high > 2.5 * low:
        return log_scale(low * 0.94, high * 1.06)
    return linear_scale(*span(finite))


def _clip(text: str, room: float) -> str:
    count = int(room / _CHARACTER)
    return text if len(text) <= count else text[: max(1, count - 1)] + "…"
