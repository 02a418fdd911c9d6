"""Scales, bins and label placement: the arithmetic under the charts."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree

import pytest

from mtp_train.report.charts import (
    NARROW,
    WIDE,
    Mark,
    Point,
    Row,
    Series,
    bin_curve,
    draw_curve,
    draw_rows,
    draw_series,
    scale_for_losses,
)
from mtp_train.report.svg import Plot, Scale, linear_scale, log_scale, spread_labels


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.0, 1.2, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (0.93, 1.31, ["1.0", "1.1", "1.2", "1.3"]),
        (0.0, 341.0, ["0", "100", "200", "300"]),
        (0.0, 20_000.0, ["0", "5,000", "10,000", "15,000", "20,000"]),
        (-0.3, 0.3, ["-0.2", "0.0", "0.2"]),
    ],
)
def test_ticks_are_round_exact_and_inside(low: float, high: float, texts: list[str]) -> None:
    scale = linear_scale(low, high)
    assert [text for _, text in scale.ticks] == texts
    for value, text in scale.ticks:
        assert float(text.replace(",", "")) == pytest.approx(value, abs=1e-12)
        assert 0 <= scale.unit(value) <= 1 + 1e-9


def test_an_empty_range_is_widened() -> None:
    scale = linear_scale(2.0, 2.0)
    assert scale.low < 2.0 < scale.high
    assert scale_for_losses([3.0]).ticks


def test_log_scale_places_equal_ratios_equally() -> None:
    scale = log_scale(1.0, 100.0)
    assert scale.unit(10.0) == pytest.approx(0.5)
    assert [value for value, _ in scale.ticks] == [1, 2, 5, 10, 20, 50, 100]
    assert scale_for_losses([14.0, 4.0]).is_log
    assert not scale_for_losses([4.4, 4.0]).is_log


def test_y_grows_upwards_and_x_to_the_right() -> None:
    plot = Plot(200, 100, linear_scale(0, 1), linear_scale(0, 1), "test")
    assert plot.at_y(1.0) == plot.margins.top < plot.at_y(0.0) == plot.bottom
    assert plot.at_x(0.0) == plot.margins.left < plot.at_x(1.0) == plot.right


def test_labels_keep_their_order_and_their_distance() -> None:
    placed = spread_labels([50.0, 51.0, 10.0, 99.0], gap=15, low=0, high=100)
    assert placed[2] < placed[0] < placed[1] < placed[3]
    ordered = sorted(placed)
    assert all(b - a >= 15 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert max(placed) <= 100


def test_bins_hold_every_point_once_and_keep_the_mean() -> None:
    points = [(float(step), float(step % 7)) for step in range(1, 1001)]
    bins = bin_curve(points, max_bins=150)
    assert len(bins) <= 150
    assert sum(b.count for b in bins) == 1000
    total = sum(b.mean * b.count for b in bins)
    assert total == pytest.approx(sum(value for _, value in points))
    assert bins[0].describe("loss") == "steps 1–7: loss 3.000 (mean of 7)"
    assert bin_curve([]) == []


def test_drawings_are_well_formed_escaped_and_inside() -> None:
    hostile = '<script>"&'
    points = (Point(1.0, 0.4, hostile, 0.3, 0.5), Point(2.0, 0.2, hostile))
    scale = Scale(0.5, 2.5, ((1.0, "1"), (2.0, "2")))
    options = {"label": hostile, "x_title": hostile, "y_title": hostile, "x": scale}
    drawings = [
        draw_series(
            [Series(hostile, points, 0), Series("b", points, 1, is_hollow=True)],
            y=linear_scale(0, 1),
            shade_below=0.5,
            shade_text=hostile,
            **options,
        ),
        draw_curve([(1, 0.5), (2, 0.3)], [Series("v", points, 0)], y=linear_scale(0, 1), **options),
        draw_rows(
            [Row(hostile * 9, "12", (Mark(0.5, hostile, 0, 0.2, 0.8),), heading=hostile)],
            label="rows",
            x_title="x",
            x=linear_scale(0, 1),
            reference=0.5,
        ),
    ]
    for drawing in drawings:
        for text, width in ((drawing.wide, WIDE), (drawing.narrow, NARROW)):
            root = ElementTree.fromstring(text)
            assert root.get("viewBox", "").split()[2] == str(width)
            marks = [e for e in root.iter() if e.get("class", "").startswith(("mark", "hollow"))]
            assert marks
            for element in root.iter("circle"):
                assert 0 <= float(element.get("cx", "nan")) <= width
            assert "nan" not in text
            assert math.isfinite(float(root.get("viewBox", "").split()[3]))
