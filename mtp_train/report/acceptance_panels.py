"""Panels about acceptance: by position, by task, by context, by kind of token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import MappingProxyType

from mtp_train.report import formats
from mtp_train.report.charts import (
    Mark,
    Point,
    Row,
    Series,
    draw_rows,
    draw_series,
    span,
)
from mtp_train.report.facts import Acceptance, Breakdown, Parity, Prediction, Served
from mtp_train.report.svg import Scale, linear_scale
from mtp_train.report.verdict import main_acceptance
from mtp_train.report.view import Panel, Table

_DRAFTS = MappingProxyType({"argmax": "arg-max", "sampled": "sampling"})
_DIMENSIONS = (
    ("task", "By task", "Tokens per step on the tasks of each prompt set."),
    (
        "context",
        "By context length",
        "Tokens per step against how many tokens stand before the draft.",
    ),
    (
        "trained_length",
        "By trained length",
        "Tokens per step where as many tokens stand before the draft as in training, and beyond.",
    ),
    (
        "token_kind",
        "By kind of token",
        "Tokens per step by what the draft stands in: chat, code, thinking, tool call.",
    ),
)


def acceptance_panels(parity: Parity) -> tuple[Panel, ...]:
    return (
        _by_position(parity),
        _all_rows(parity),
        *(
            _by_label(parity.breakdown, dimension, title, lead)
            for dimension, title, lead in _DIMENSIONS
            if dimension != "trained_length" or parity.trained_len is not None
        ),
    )


def _by_position(parity: Parity) -> Panel:
    main = main_acceptance(parity)
    if main is None:
        return Panel("By position")
    rows = [
        row for row in parity.acceptance if (row.k, row.temperature) == (main.k, main.temperature)
    ]
    series = [_position_series(row, number) for number, row in enumerate(rows)]
    prediction = parity.prediction
    if prediction is not None and prediction.k == main.k:
        number = next(
            (n for n, row in enumerate(rows) if row.prompt_set == prediction.prompt_set), 0
        )
        series.append(_predicted_series(prediction, number))
    series += [
        _served_series(
            row, next((n for n, one in enumerate(rows) if one.prompt_set == row.prompt_set), 0)
        )
        for row in parity.served
        if row.k == main.k and row.dtype != "float32"
    ]
    top = max((point.high or point.y for item in series for point in item.points), default=1.0)
    drawing = draw_series(
        series,
        label=f"Share of drafts accepted up to each position, K = {main.k}",
        x_title="position in the draft",
        y_title="accepted up to here",
        x=Scale(0.6, main.k + 0.4, tuple((float(j), str(j)) for j in range(1, main.k + 1))),
        y=_share_scale(top),
    )
    lead = (
        f"Share of drafts whose first tokens were all accepted, K = {main.k}, "
        f"{formats.decoding(main.temperature, main.draft_mode)}."
    )
    if any(item.name == "predicted" for item in series):
        lead += " Hollow: predicted by the training forward over the same output."
    if any(item.name == "served" for item in series):
        lead += " Triangle: counted by the serving engine."
    return Panel("By position", lead, drawing, _position_table(rows, prediction))


def _position_series(row: Acceptance, number: int) -> Series:
    points = []
    for j, rate in enumerate(row.rates, start=1):
        conditional = row.conditional_rates[j - 1] if j <= len(row.conditional_rates) else None
        after = f"; {formats.share(conditional)} of those that got here" if j > 1 else ""
        known = f" {formats.interval(rate, 1, scale=100)}" if rate.has_interval else ""
        tip = (
            f"{formats.set_name(row.prompt_set)}, position {j}: {formats.share(rate.value)}"
            f"{known}{after}, {row.num_drafts:,} drafts"
        )
        points.append(Point(float(j), rate.value, tip, rate.low, rate.high))
    return Series(formats.set_name(row.prompt_set), tuple(points), number)


def _predicted_series(prediction: Prediction, number: int) -> Series:
    reached = list(itertools.accumulate(prediction.predicted, lambda a, b: a * b))
    points = tuple(
        Point(float(j), value, f"predicted by training, position {j}: {formats.share(value)}")
        for j, value in enumerate(reached, start=1)
    )
    return Series("predicted", points, number, is_hollow=True, is_joined=False)


def _served_series(row: Served, number: int) -> Series:
    what = f"{row.engine}, {formats.set_name(row.prompt_set)}"
    points = tuple(
        Point(
            float(j),
            rate,
            f"{what}, position {j}: {formats.share(rate)}, {row.num_drafts:,} drafts",
        )
        for j, rate in enumerate(row.rates, start=1)
    )
    return Series("served", points, number, is_hollow=True, is_joined=False, shape="triangle")


def _position_table(rows: Sequence[Acceptance], prediction: Prediction | None) -> Table:
    content = []
    for row in rows:
        for j, rate in enumerate(row.rates, start=1):
            known = j <= len(row.conditional_rates)
            content.append(
                (
                    formats.set_name(row.prompt_set),
                    str(j),
                    formats.share(rate.value),
                    formats.interval(rate, 1, scale=100),
                    formats.share(row.conditional_rates[j - 1]) if known else formats.ABSENT,
                    formats.count(row.num_drafts),
                )
            )
    if prediction is not None:
        reached = itertools.accumulate(prediction.predicted, lambda a, b: a * b)
        for j, (value, conditional) in enumerate(
            zip(reached, prediction.predicted, strict=True), start=1
        ):
            content.append(
                (
                    "predicted (P3)",
                    str(j),
                    formats.share(value),
                    formats.ABSENT,
                    formats.share(conditional),
                    formats.count(prediction.num_drafts),
                )
            )
    columns = ("prompts", "position", "accepted", "95 % interval", "of those here", "drafts")
    return Table(columns, tuple(content))


def _all_rows(parity: Parity) -> Panel:
    content = [
        (
            formats.set_name(row.prompt_set),
            str(row.k),
            f"{row.temperature:g}",
            _DRAFTS.get(row.draft_mode, row.draft_mode),
            formats.decimal(row.tau.value),
            formats.interval(row.tau),
            formats.count(row.num_drafts),
            formats.count(row.num_prompts),
        )
        for row in parity.acceptance
    ]
    content += [
        (
            f"{formats.set_name(row.prompt_set)}, {row.engine} ({row.dtype})",
            str(row.k),
            "0",
            _DRAFTS["argmax"],
            formats.decimal(row.tau.value),
            formats.interval(row.tau),
            formats.count(row.num_drafts),
            formats.count(row.num_prompts),
        )
        for row in parity.served
    ]
    columns = ("prompts", "K", "T", "drafted by", "τ", "95 % interval", "drafts", "N")
    return Panel(
        "Everything measured",
        "τ = 1 + accepted / verification steps, pooled over prompts, before trimming at the end of "
        "an answer. Intervals resample prompts; N counts them.",
        table=Table(columns, tuple(content), frozenset({0, 3})),
        is_open=True,
    )


def _by_label(breakdown: Sequence[Breakdown], dimension: str, title: str, lead: str) -> Panel:
    found = [row for row in breakdown if row.dimension == dimension]
    if not found:
        return Panel(title, lead)
    k = max(row.k for row in found)
    rows = [row for row in found if row.k == k and math.isfinite(row.tau.value)]
    sets = list(dict.fromkeys(row.prompt_set for row in rows))
    if dimension == "task":  # other dimensions have an order of their own
        rows.sort(key=lambda row: (sets.index(row.prompt_set), -row.tau.value))
    numbers = {name: number for number, name in enumerate(sets)}
    drawn = []
    for index, row in enumerate(rows):
        is_first = index == 0 or rows[index - 1].prompt_set != row.prompt_set
        drawn.append(
            Row(
                label="all prompts" if row.label == row.prompt_set else row.label,
                detail=f"{row.num_drafts:,}",
                heading=formats.set_name(row.prompt_set) if is_first and len(sets) > 1 else "",
                marks=(
                    Mark(
                        row.tau.value, _tip(row), numbers[row.prompt_set], row.tau.low, row.tau.high
                    ),
                ),
            )
        )
    ends = [v for row in rows for v in (row.tau.value, row.tau.low, row.tau.high) if v is not None]
    low, high = span(ends, pad=0.06, least=0.2)
    drawing = draw_rows(
        drawn,
        label=f"{title}: tokens per step with intervals, K = {k}",
        x_title=f"tokens per step τ (K = {k}); at the right: drafts",
        x=linear_scale(max(1.0, low), high),
    )
    return Panel(title, lead, drawing, _label_table(rows, k))


def _tip(row: Breakdown) -> str:
    rates = " ".join(formats.share(rate) for rate in row.rates)
    return (
        f"{row.label} ({formats.set_name(row.prompt_set)}): τ {formats.decimal(row.tau.value)} "
        f"{formats.interval(row.tau)}, {row.num_drafts:,} drafts of {row.num_prompts:,} prompts; "
        f"by position {rates}"
    )


def _label_table(rows: Sequence[Breakdown], k: int) -> Table:
    columns = (
        "prompts",
        "label",
        "τ",
        "95 % interval",
        *(f"position {j}" for j in range(1, k + 1)),
        "drafts",
        "N prompts",
    )
    content = tuple(
        (
            formats.set_name(row.prompt_set),
            row.label,
            formats.decimal(row.tau.value),
            formats.interval(row.tau),
            *(
                formats.share(row.rates[j]) if j < len(row.rates) else formats.ABSENT
                for j in range(k)
            ),
            formats.count(row.num_drafts),
            formats.count(row.num_prompts),
        )
        for row in rows
    )
    return Table(columns, content, frozenset({0, 1}))


def _share_scale(top: float) -> Scale:
    scale = linear_scale(0.0, 100 * min(1.0, top * 1.08), unit="%")
    return Scale(0.0, scale.high / 100, tuple((value / 100, text) for value, text in scale.ticks))
