"""Panels about speed: against concurrency, latencies, the cost model, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtp_train.report import formats
from mtp_train.report.charts import (
    Mark,
    Point,
    Row,
    Series,
    draw_rows,
    draw_series,
    draw_swatch,
    span,
)
from mtp_train.report.facts import DecodeSpeed, Parity, Speed
from mtp_train.report.svg import Scale, linear_scale
from mtp_train.report.verdict import best_speed, measured_cells
from mtp_train.report.view import Key, Panel, Table

_PLAIN = 7  # series number of decoding without a draft


def concurrency_panel(parity: Parity) -> Panel:
    """Speed-up against the number of requests that decode together, the best K of each ringed."""
    title = "Speed-up against concurrency"
    cells = [cell for cell in measured_cells(parity) if not cell.context_len]
    best = best_speed(parity)
    if best is None:
        return Panel(title)
    sizes = sorted({cell.batch_size for cell in cells})
    winners = [best_speed(parity, batch_size=size) for size in sizes]
    series = [
        Series(
            f"K = {k}",
            tuple(
                Point(
                    float(sizes.index(cell.batch_size)),
                    cell.speedup.value,
                    _tip(cell),
                    cell.speedup.low,
                    cell.speedup.high,
                    is_marked=any(cell is winner for winner in winners),
                )
                for cell in sorted(cells, key=lambda cell: cell.batch_size)
                if cell.k == k
            ),
            number,
        )
        for number, k in enumerate(sorted({cell.k for cell in cells}))
    ]
    ends = [1.0, *(v for cell in cells for v in _ends(cell))]
    low, high = span(ends, pad=0.1, least=0.4)
    drawing = draw_series(
        series,
        label="Speed-up over plain decoding by batch size and K, with intervals",
        x_title="requests decoding together",
        y_title="speed-up",
        x=Scale(-0.45, len(sizes) - 0.55, tuple((float(i), str(s)) for i, s in enumerate(sizes))),
        y=linear_scale(max(0.0, low), high, unit=formats.TIMES),
        shade_below=1.0,
        shade_text="slower than plain decoding",
        note=f"best: K = {best.k}, {formats.times(best.speedup.value)} at batch {best.batch_size}",
    )
    lead = (
        f"Tokens/s with the draft over tokens/s without, on {formats.set_name(best.prompt_set)}. "
        f"Bars: {formats.level(best.speedup)} intervals. Ring: the best K at that concurrency, by "
        "the lower end."
    )
    return Panel(title, lead, drawing, _speed_table(parity.speed))


def speed_panels(parity: Parity) -> tuple[Panel, ...]:
    return (
        *(
            _latency(parity, title, lead, pick)
            for title, lead, pick in (
                (
                    "Time between tokens, median",
                    "Between two arrivals at one request; with a draft one arrival can bring "
                    "several tokens.",
                    _p50,
                ),
                ("Time between tokens, 99th percentile", "The waits that users notice.", _p99),
                (
                    "Time to first token",
                    "Until every request of the batch has its first token (median over runs).",
                    _first,
                ),
            )
        ),
        _cost_model(parity),
        _latency_table(parity),
        _memory(parity),
    )


def cell_name(cell: Speed) -> str:
    context = f", context {cell.context_len:,}" if cell.context_len else ""
    return f"batch {cell.batch_size}{context}"


def _p50(speed: DecodeSpeed) -> float | None:
    return speed.inter_token_p50_ms


def _p99(speed: DecodeSpeed) -> float | None:
    return speed.inter_token_p99_ms


def _first(speed: DecodeSpeed) -> float | None:
    return speed.first_token_ms


def _latency(
    parity: Parity, title: str, lead: str, pick: Callable[[DecodeSpeed], float | None]
) -> Panel:
    """Without draft (hollow) and with each K, per batch size."""
    groups: dict[str, list[Speed]] = {}
    for cell in measured_cells(parity):
        groups.setdefault(cell_name(cell), []).append(cell)
    lengths = sorted({cell.k for cell in parity.speed})
    rows, values = [], [0.0]
    for name, cells in groups.items():
        plain = pick(cells[0].plain)
        marks = (
            []
            if plain is None
            else [_mark(plain, f"{name}, without draft", _PLAIN, is_hollow=True)]
        )
        for cell in cells:
            value = pick(cell.draft)
            if value is not None:
                marks.append(_mark(value, f"{name}, K = {cell.k}", lengths.index(cell.k)))
        if marks:
            values += [mark.value for mark in marks]
            rows.append(Row(name, "", tuple(marks)))
    if not rows:
        return Panel(title, lead)
    names = ", ".join(f"K = {k}" for k in lengths)
    keys = [Key("without draft", draw_swatch(_PLAIN, is_hollow=True))]
    keys += [Key(f"K = {k}", draw_swatch(number)) for number, k in enumerate(lengths)]
    drawing = draw_rows(
        rows,
        label=f"{title} without draft and with {names}",
        x_title="milliseconds",
        x=linear_scale(0.0, max(values) * 1.08),
    )
    return Panel(title, lead, drawing, legend=tuple(keys))


def _mark(value: float, what: str, number: int, *, is_hollow: bool = False) -> Mark:
    tip = f"{what}: {formats.milliseconds(value)} ms"
    return Mark(value, tip, number, is_hollow=is_hollow)


def _cost_model(parity: Parity) -> Panel:
    title = "Cost model beside measurement"
    lead = (
        "Filled: measured, with its interval. Hollow: predicted as tokens per step / "
        "(1 + K·c + v), with c (one more drafted token) and v (verifying) measured beforehand with "
        "forced drafts, in plain steps."
    )
    cells = [cell for cell in measured_cells(parity) if cell.predicted is not None]
    if not cells:
        return Panel(title, lead)
    lengths = sorted({cell.k for cell in cells})
    rows = []
    for cell in cells:
        assert cell.predicted is not None, "cells without a prediction were left out"
        number = lengths.index(cell.k)
        error = cell.predicted / cell.speedup.value - 1
        tip = (
            f"predicted {formats.times(cell.predicted)} ({formats.signed(100 * error)} % off); "
            f"c = {formats.decimal(cell.draft_cost)}, v = {formats.decimal(cell.verify_cost)}"
        )
        rows.append(
            Row(
                f"{cell_name(cell)}, K = {cell.k}",
                f"{formats.signed(100 * error)} %",
                (
                    Mark(
                        cell.speedup.value, _tip(cell), number, cell.speedup.low, cell.speedup.high
                    ),
                    Mark(cell.predicted, tip, number, is_hollow=True),
                ),
            )
        )
    ends = [1.0, *(v for c in cells for v in (*_ends(c), c.predicted or 1.0))]
    drawing = draw_rows(
        rows,
        label="Measured and predicted speed-up per batch size and K",
        x_title="speed-up; at the right: prediction against measurement",
        x=linear_scale(*span(ends, least=0.3), unit=formats.TIMES),
        reference=1.0,
    )
    keys = tuple(Key(f"K = {k}", draw_swatch(number)) for number, k in enumerate(lengths))
    return Panel(title, lead, drawing, _cost_table(cells), legend=keys)


def _cost_table(cells: Sequence[Speed]) -> Table:
    columns = ("cell", "K", "measured", "predicted", "tokens per step", "c", "v")
    return Table(
        columns,
        tuple(
            (
                cell_name(cell),
                str(cell.k),
                formats.times(cell.speedup.value),
                formats.times(cell.predicted),
                formats.decimal(cell.emitted_per_step),
                formats.decimal(cell.draft_cost),
                formats.decimal(cell.verify_cost),
            )
            for cell in cells
        ),
    )


def _speed_table(cells: Sequence[Speed]) -> Table:
    columns = ("cell", "K", "speed-up", "interval", "tok/s without", "tok/s with", "batches × runs")
    return Table(
        columns,
        tuple(
            (
                cell_name(cell),
                str(cell.k),
                formats.times(cell.speedup.value),
                formats.speedup_interval(cell.speedup),
                formats.decimal(cell.plain.tokens_per_s, 1),
                formats.decimal(cell.draft.tokens_per_s, 1),
                _runs(cell) or formats.ABSENT,
            )
            for cell in cells
        ),
    )


def _runs(cell: Speed) -> str:
    """Batches times runs of each: what the interval is over."""
    if cell.num_groups is None or cell.num_repeats is None:
        return ""
    return f"{cell.num_groups} {formats.TIMES} {cell.num_repeats}"


def _latency_table(parity: Parity) -> Panel:
    content: list[tuple[str, ...]] = []
    seen = set()
    for cell in measured_cells(parity):
        name = cell_name(cell)
        if name not in seen:
            seen.add(name)
            content.append((name, "none", *_latencies(cell.plain)))
        content.append(("", f"K = {cell.k}", *_latencies(cell.draft)))
    columns = ("cell", "draft", "tok/s", "p50, ms", "p99, ms", "first, ms")
    return Panel(
        "Latencies with and without draft",
        "Tokens/s of the whole batch; time between arrivals at one request, median and 99th "
        "percentile; time to first token.",
        table=Table(columns, tuple(content), frozenset({0, 1})),
        is_open=True,
    )


def _latencies(speed: DecodeSpeed) -> tuple[str, ...]:
    return (
        formats.decimal(speed.tokens_per_s, 1),
        formats.milliseconds(speed.inter_token_p50_ms),
        formats.milliseconds(speed.inter_token_p99_ms),
        formats.milliseconds(speed.first_token_ms),
    )


def _memory(parity: Parity) -> Panel:
    target, draft = parity.target_kv_bytes, parity.draft_kv_bytes
    title, lead = (
        "K/V memory per token",
        "What every token in the cache takes; the draft comes on top.",
    )
    if target is None or draft is None:
        return Panel(title, lead)
    rows = (
        ("target", f"{target:,} B", "100 %"),
        ("draft", f"{draft:,} B", formats.share(draft / target)),
        ("together", f"{target + draft:,} B", formats.share(1 + draft / target)),
    )
    return Panel(
        title, lead, table=Table(("cache", "per token", "of the target's"), rows), is_open=True
    )


def _tip(cell: Speed) -> str:
    plain, draft = (formats.decimal(part.tokens_per_s, 1) for part in (cell.plain, cell.draft))
    runs = f"; {_runs(cell)} runs" if _runs(cell) else ""
    return (
        f"{cell_name(cell)}, K = {cell.k}: {formats.times(cell.speedup.value)} "
        f"{formats.speedup_interval(cell.speedup)}; {plain} → {draft} tokens/s{runs}"
    )


def _ends(cell: Speed) -> list[float]:
    figure = cell.speedup
    return [value for value in (figure.value, figure.low, figure.high) if value is not None]
