"""A small chart: scales, axes, lines, marks. SVG text out; colours and fonts are the page's.

Every mark can carry a ``tip``, which the page's script shows on hover and touch. All text is
escaped here; everything else is numbers.

Not a plotting package: the one at hand puts 4.8 MB of script into every report and fixes its
colours when it is written. These charts take a few kB, follow the reader's light or dark theme,
stand in print, and need no script to be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]
Shape = Literal["circle", "square", "diamond", "triangle"]
SHAPES: tuple[Shape, ...] = ("circle", "square", "diamond", "triangle")
_LOG_STEPS = (1, 1.5, 2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Scale:
    """Data values ``low`` to ``high`` onto 0 to 1; ``ticks`` are (value, text)."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def unit(self, value: float) -> float:
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_scale(low: float, high: float, *, count: int = 5, unit: str = "") -> Scale:
    """Round ticks inside the range; the range itself is kept, and made non-empty."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    step = _nice_step((high - low) / count)
    digits = next(n for n in range(12) if math.isclose(round(step, n), step, rel_tol=1e-6))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    ticks = [
        (index * step, f"{index * step:,.{digits}f}{unit}") for index in range(first, last + 1)
    ]
    return Scale(low, high, tuple(ticks))


def log_scale(low: float, high: float) -> Scale:
    """``low`` and ``high`` above 0."""
    if high <= low:
        low, high = low / 2, high * 2
    values = [
        step * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for step in _LOG_STEPS
    ]
    ticks = [value for value in values if low <= value <= high]
    if len(ticks) > 6:
        ticks = [value for value in ticks if f"{value:e}"[:3] in ("1.0", "2.0", "5.0")]
    return Scale(low, high, tuple((value, f"{value:g}") for value in ticks), is_log=True)


@dataclass(frozen=True)
class Margins:
    top: float = 12
    right: float = 14
    bottom: float = 42
    left: float = 48


@dataclass
class Plot:
    """Collects elements; coordinates of ``x`` and ``y`` are data values. Size in CSS pixels."""

    width: float
    height: float
    x: Scale
    y: Scale
    label: str  # what a screen reader says
    margins: Margins = Margins()
    _parts: list[str] = field(default_factory=list)

    def at_x(self, value: float) -> float:
        inner = self.width - self.margins.left - self.margins.right
        return self.margins.left + inner * self.x.unit(value)

    def at_y(self, value: float) -> float:
        inner = self.height - self.margins.top - self.margins.bottom
        return self.margins.top + inner * (1 - self.y.unit(value))

    @property
    def right(self) -> float:
        return self.width - self.margins.right

    @property
    def bottom(self) -> float:
        return self.height - self.margins.bottom

    def axes(self, x_title: str, y_title: str = "") -> None:
        """Horizontal hairlines with their values, ticks below, titles."""
        left = self.margins.left
        for value, text in self.y.ticks:
            y = self.at_y(value)
            self.segment(left, y, self.right, y, "grid")
            self.text(left - 8, y + 4, text, "tick", anchor="end")
        for value, text in self.x.ticks:
            self.text(self.at_x(value), self.bottom + 18, text, "tick", anchor="middle")
        middle = (left + self.right) / 2
        self.text(middle, self.height - 6, x_title, "axis", anchor="middle")
        if y_title:
            self.text(0, 12, y_title, "axis")

    def region(self, low: float, high: float, css: str) -> None:
        """A band over the whole width between two values of y."""
        top, bottom = self.at_y(high), self.at_y(low)
        width = self.right - self.margins.left
        self._add("rect", css, x=self.margins.left, y=top, width=width, height=bottom - top)

    def line(self, points: Sequence[tuple[float, float]], css: str) -> None:
        path = " ".join(f"{_px(self.at_x(x))},{_px(self.at_y(y))}" for x, y in points)
        self._parts.append(f'<polyline class="{css}" points="{path}"/>')

    def whisker(self, x: float, low: float, high: float, css: str, *, shift: float = 0) -> None:
        """An upright interval at ``x``, moved ``shift`` pixels to the right."""
        at = self.at_x(x) + shift
        self.segment(at, self.at_y(low), at, self.at_y(high), css)

    def mark(
        self, x: float, y: float, shape: Shape, css: str, *, tip: str = "", shift: float = 0
    ) -> None:
        self.mark_px(self.at_x(x) + shift, self.at_y(y), shape, css, tip=tip)

    def mark_px(
        self, px: float, py: float, shape: Shape, css: str, *, tip: str = "", size: float = 4.5
    ) -> None:
        """A mark at pixel coordinates, with a larger invisible target for fingers."""
        if shape == "circle":
            self._add("circle", css, cx=px, cy=py, r=size)
        else:
            self._parts.append(f'<path class="{css}" d="{_outline(shape, px, py, size)}"/>')
        if tip:
            place = f'cx="{_px(px)}" cy="{_px(py)}" r="13"'
            self._parts.append(f'<circle class="hit" {place} data-tip="{escape(tip)}"/>')

    def strip(self, x_low: float, x_high: float, tip: str) -> None:
        """An invisible column that shows ``tip``: for lines with many points."""
        left, right = self.at_x(x_low), self.at_x(x_high)
        height = self.bottom - self.margins.top
        self._parts.append(
            f'<rect class="hit" x="{_px(left)}" y="{_px(self.margins.top)}" '
            f'width="{_px(right - left)}" height="{_px(height)}" data-tip="{escape(tip)}"/>'
        )

    def segment(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line between pixel coordinates."""
        self._add("line", css, x1=x1, y1=y1, x2=x2, y2=y2)

    def rect(self, x: float, y: float, width: float, height: float, css: str) -> None:
        """A rectangle in pixel coordinates."""
        self._add("rect", css, x=x, y=y, width=width, height=height)

    def text(self, px: float, py: float, text: str, css: str, *, anchor: Anchor = "start") -> None:
        self._parts.append(
            f'<text class="{css}" x="{_px(px)}" y="{_px(py)}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def render(self) -> str:
        size = f"{_px(self.width)} {_px(self.height)}"
        label = escape(self.label)
        spoken = f'role="img" aria-label="{label}"' if label else 'aria-hidden="true"'
        return (
            f'<svg viewBox="0 0 {size}" style="max-width:{_px(self.width)}px" {spoken}>'
            f"{''.join(self._parts)}</svg>"
        )

    def _add(self, tag: str, css: str, **attributes: float) -> None:
        values = " ".join(f'{name}="{_px(value)}"' for name, value in attributes.items())
        self._parts.append(f'<{tag} class="{css}" {values}/>')


def spread_labels(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Positions near ``wanted``, in the same order, at least ``gap`` apart and within the range."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    floor = low
    for index in order:
        placed[index] = max(wanted[index], floor)
        floor = placed[index] + gap
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def _outline(shape: Shape, x: float, y: float, size: float) -> str:
    if shape == "square":
        s = size * 0.9
        corners = [(x - s, y - s), (x + s, y - s), (x + s, y + s), (x - s, y + s)]
    elif shape == "diamond":
        s = size * 1.25
        corners = [(x, y - s), (x + s, y), (x, y + s), (x - s, y)]
    else:
        s = size * 1.15
        corners = [(x, y - s), (x + s, y + s * 0.8), (x - s, y + s * 0.8)]
    return "M" + "L".join(f"{_px(a)} {_px(b)}" for a, b in corners) + "Z"


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * (1 - 1e-9))


def _px(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") if "." in f"{value:.1f}" else f"{value:.1f}"
