"""How every benchmark measures: interleaved rounds, medians, and a limit measured on the spot.

A result is `ours` beside a `peer` (what a user would run instead), in one process, alternating
round by
round, so that whatever else the machine does hits both. `limit` is the best the hardware showed
for the
same bytes or the same matrix products a moment before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from runtime.linear import LinearMaker


class NotHereError(Exception):
    """What a benchmark needs is not on this machine; the text says how to get it."""


@dataclass(frozen=True)
class Timing:
    """Medians over rounds; ``limit`` in units per second, ``share`` from each round's own limit."""

    ours_s: float
    peer_s: float
    limit: float
    share: float


@dataclass(frozen=True)
class BenchResult:
    """One row of `results.json`. `ours`, `peer` and `limit` share `unit`; more is better."""

    name: str
    ours: float
    peer: float
    ratio: float
    limit: float | None
    share_of_limit: float | None
    unit: str
    command: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, name: str, timing: Timing, *, units: float, note: str) -> BenchResult:
        """Rates of ``units`` tokens per call, and how many times the peer's rate ours is."""
        return cls(
            name=name,
            ours=units / timing.ours_s,
            peer=units / timing.peer_s,
            ratio=timing.peer_s / timing.ours_s,
            limit=timing.limit,
            share_of_limit=timing.share,
            unit="tokens/s",
            command=f"make bench BENCH={name}",
            note=note,
        )


def interleave(
    ours: Callable[[], object],
    peer: Callable[[], object],
    limit: Callable[[], float],
    *,
    units: float,
    rounds: int,
) -> Timing:
    """Alternate both sides and the limit's measurement, after one warm-up; ``units`` per call.

    The starting side alternates too. The machine's speed drifts, so each round has its own limit.
    """
    ours()
    peer()
    limit()
    times: tuple[list[float], list[float]] = ([], [])
    limits, shares = [], []
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        for which in order:
            if which == 0:
                limits.append(limit())
            start = time.perf_counter()
            (ours, peer)[which]()
            times[which].append(time.perf_counter() - start)
        shares.append(units / times[0][-1] / limits[-1])
    return Timing(
        statistics.median(times[0]),
        statistics.median(times[1]),
        statistics.median(limits),
        statistics.median(shares),
    )


def best_seconds(function: Callable[[], object], *, rounds: int) -> float:
    """The fastest round: what a limit is made of."""
    function()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def streaming_bytes_per_second(dtype: torch.dtype, make_linear: LinearMaker) -> float:
    """Best rate of a packed one-row product over matrices that do not fit into the caches."""
    rows, width, copies = 49152, 576, 4
    matrices = [make_linear(torch.randn(rows, width).to(dtype), None) for _ in range(copies)]
    x = torch.randn(1, width).to(dtype)

    def sweep() -> None:
        for matrix in matrices:
            matrix(x)

    with torch.inference_mode():
        seconds = best_seconds(sweep, rounds=5)
    return copies * rows * width * x.element_size() / seconds


def matrix_seconds_per_row(
    shapes: list[tuple[int, int]], dtype: torch.dtype, make_linear: LinearMaker, *, rows: int
) -> tuple[float, float]:
    """Best seconds per row of packed products over `shapes` (out, in), and the flop/s that is."""
    seconds = flops = 0.0
    with torch.inference_mode():
        for out_width, in_width in shapes:
            linear = make_linear(torch.randn(out_width, in_width).to(dtype), None)
            x = torch.randn(rows, in_width).to(dtype)
            seconds += best_seconds(lambda linear=linear, x=x: linear(x), rounds=8)
            flops += 2.0 * rows * out_width * in_width
    return seconds / rows, flops / seconds
