"""Tables and JSON of a bench."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from mtp_train.bench.arithmetic import is_loss
from mtp_train.bench.facts import Cell, CellRun, Column, Estimate, Spread
from mtp_train.bench.schedule import Schedule
from mtp_train.console import make_table


def winners_table(cells: Sequence[Cell], columns: Sequence[Column]) -> Table:
    """Tokens per second by contestant and concurrency, with speed-ups, winners and losses."""
    names = dict.fromkeys(cell.contestant for cell in cells)
    found = {(cell.contestant, cell.concurrency): cell for cell in cells}
    rows = [
        (name, *(_rate_text(found.get((name, column.concurrency)), column) for column in columns))
        for name in names
    ]
    heads = [f"{column.concurrency} at once" for column in columns]
    return make_table(
        "tokens/s, and times plain decoding",
        ("", *heads),
        rows,
        caption="WINS: fastest (wins?: within its interval of the next). slower: than plain "
        "decoding (slower?: within its interval). \\[low, high]: 95 %, paired by round",
    )


def details_table(cells: Sequence[Cell]) -> Table:
    """Latencies in milliseconds, τ and acceptance of every cell."""
    rows = [
        (
            cell.contestant,
            cell.concurrency,
            _spread_text(cell.itl),
            _spread_text(cell.per_token),
            _spread_text(cell.ttft),
            "n/a" if cell.tau is None else f"{cell.tau:.2f}",
            " ".join(f"{rate:.2f}" for rate in cell.acceptance) or "n/a",
            "n/a" if cell.equal_texts is None else f"{cell.equal_texts:.0%}",
            f"{cell.num_failed}/{cell.num_requests}",
        )
        for cell in cells
    ]
    return make_table(
        "latency in ms (median/95th percentile), drafts, answers",
        (
            *("", "at once", "ITL", "per token", "TTFT", "τ", "accepted"),
            *("equal", "failed"),
        ),
        rows,
        caption="ITL: between what arrives at once; per token: of an answer behind its first one. "
        "accepted: share of drafts past each position; equal: texts as plain decoding's, of plain "
        "decoding as those of its other rounds",
    )


def note_lines(
    cells: Sequence[Cell], columns: Sequence[Column], failed: dict[str, str]
) -> list[str]:
    """What the tables cannot say: missing counters, exclusions, failures, losses."""
    lines = []
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.tau is None:
            reasons.setdefault(cell.no_tau, []).append(cell.contestant)
    for reason, names in reasons.items():
        lines.append(f"τ n/a for {', '.join(dict.fromkeys(names))}: {reason}")
    for cell in cells:
        if cell.excluded:
            lines.append(
                f"{cell.contestant}, {cell.concurrency} at once, cannot win: "
                f"{cell.excluded.splitlines()[0]}"
            )
    for column in columns:
        if column.losses:
            lines.append(
                f"{column.concurrency} at once: slower than plain decoding: "
                f"{', '.join(column.losses)}"
            )
    lines += [
        f"{name} FAILED: {reason.splitlines()[0]} (all of it in the record)"
        for name, reason in failed.items()
    ]
    return lines


def schedule_lines(
    schedule: Schedule, config: dict[str, Any] | None, *, option_note: str, has_interval: bool
) -> list[str]:
    """Which K at which batch size, as text and as vLLM takes it."""
    parts = [f"{first}–{last}: {f'K={k}' if k else 'off'}" for first, last, k in schedule.ranges]
    lines = [f"{schedule.head}: best by batch size: {', '.join(parts)}"]
    if schedule.off_from == 1:
        lines.append("  leave speculation off: plain decoding was the fastest at every load")
    elif schedule.off_from:
        lines.append(f"  switch speculation off from batch size {schedule.off_from} on")
    else:
        lines.append("  at no measured load was plain decoding faster")
    if not has_interval:
        lines.append("  one round has no interval: measure more of them before believing it")
    elif schedule.undecided:
        sizes = ", ".join(map(str, schedule.undecided))
        lines.append(f"  not decided at {sizes} at once: the interval holds plain decoding's rate")
    if config is not None:
        lines.append(f"  --speculative-config '{json.dumps(config)}'")
    if option_note:
        lines.append(f"  {option_note}")
    return lines


def run_values(run: CellRun) -> dict[str, Any]:
    """One run of a cell for the record: figures, no text of anybody's."""
    counts = asdict(run.counts) if run.counts else None
    return {
        "contestant": run.contestant,
        "concurrency": run.concurrency,
        "round": run.round,
        "wall_s": run.wall_s,
        "tokens": run.num_tokens,
        "tokens_per_s": run.tokens_per_s,
        "requests": len(run.answers),
        "failed": run.num_failed,
        "errors": list(dict.fromkeys(a.error for a in run.answers if a.error)),
        "counts": counts,
        "no_counts": run.no_counts,
        "error": run.error,
    }


def _rate_text(cell: Cell | None, column: Column) -> str:
    if cell is None or cell.tokens_per_s is None:
        return "failed" if cell else "–"
    text = f"{cell.tokens_per_s.value:.1f}"
    if cell.speed_up is not None:
        text += f"  ×{_estimate_text(cell.speed_up)}"
    marks = []
    if cell.contestant == column.winner:
        marks.append("WINS" if column.is_clear else "wins?")
    if is_loss(cell) and cell.speed_up is not None:
        marks.append("slower" if cell.speed_up.is_below_one else "slower?")
    if cell.excluded:
        marks.append("excluded")
    return " ".join([text, *marks])


def _estimate_text(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} \\[{estimate.low:.2f}, {estimate.high:.2f}]"


def _spread_text(spread: Spread | None) -> str:
    return "n/a" if spread is None else f"{spread.p50 * 1000:.0f}/{spread.p95 * 1000:.0f}"
