"""The best K by batch size, as vLLM's ``num_speculative_tokens_per_batch_size``.

vLLM 0.32 takes a list of ``[first, last, K]`` in its speculative configuration: batch sizes are
inclusive, the first range starts at 1, K = 0 does not draft, and what lies behind the last range
keeps its K. Between two measured concurrencies the border is their geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.bench.facts import Cell

OPTION = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True)
class Schedule:
    """One head's. ``ranges``: first and last batch size (both inclusive) and K; ``off_from``: the
    smallest batch size at which speculation is off for good, 0 where it never is; ``undecided``:
    concurrencies at which the choice against plain decoding is within its interval.
    """

    head: str
    ranges: tuple[tuple[int, int, int], ...]
    off_from: int
    undecided: tuple[int, ...]

    @property
    def most(self) -> int:
        """``num_speculative_tokens``: the largest K that is ever drafted."""
        return max(k for _, _, k in self.ranges)


def best_schedules(cells: Sequence[Cell]) -> list[Schedule]:
    """For each head whose K is known and that stood beside plain decoding."""
    plain = {cell.concurrency for cell in cells if cell.speed_up is None and _counts(cell)}
    heads = dict.fromkeys(cell.head for cell in cells if cell.speed_up is not None and cell.k)
    schedules = []
    for head in heads:
        best: dict[int, int] = {}
        undecided = []
        for concurrency in sorted(plain):
            here = [
                cell
                for cell in cells
                if cell.head == head
                and cell.concurrency == concurrency
                and cell.k
                and cell.speed_up is not None
                and _counts(cell)
            ]
            if not here:
                continue
            top = max(here, key=lambda cell: cell.speed_up.value if cell.speed_up else 0.0)
            assert top.speed_up is not None, "chosen among cells that have one"
            assert top.k is not None, "likewise"
            best[concurrency] = top.k if top.speed_up.value > 1 else 0
            if not (top.speed_up.is_above_one or top.speed_up.is_below_one):
                undecided.append(concurrency)
        if best:
            schedules.append(_schedule(head, best, undecided))
    return schedules


def ranges_of(best: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
    """``best``: K by measured batch size. Neighbours with one K are joined."""
    sizes = sorted(best)
    ranges: list[tuple[int, int, int]] = []
    first = 1
    for index, size in enumerate(sizes):
        is_last = index + 1 == len(sizes)
        last = size if is_last else math.isqrt(size * sizes[index + 1])
        last = max(last, first)
        if ranges and ranges[-1][2] == best[size]:
            ranges[-1] = (ranges[-1][0], last, best[size])
        else:
            ranges.append((first, last, best[size]))
        first = last + 1
    return tuple(ranges)


def speculative_config(
    schedule: Schedule, *, method: str, head: Path | None, has_option: bool
) -> dict[str, Any]:
    """vLLM's ``--speculative-config``. Without the option (``has_option``) the K of batch size 1
    stands for all. Raises ``ValueError`` where nothing is to be drafted.
    """
    if not schedule.most:
        raise ValueError(f"{schedule.head}: no K is faster than plain decoding")
    first = schedule.ranges[0][2]
    config: dict[str, Any] = {
        "method": method,
        "model": str(head) if head else "HEAD",
        "num_speculative_tokens": schedule.most if has_option else max(first, 1),
    }
    if has_option:
        config[OPTION] = [list(item) for item in schedule.ranges]
    return config


def _schedule(head: str, best: Mapping[int, int], undecided: Sequence[int]) -> Schedule:
    ranges = ranges_of(best)
    off_from = ranges[-1][0] if ranges[-1][2] == 0 else 0
    return Schedule(head, ranges, off_from, tuple(undecided))


def _counts(cell: Cell) -> bool:
    return cell.tokens_per_s is not None and not cell.excluded
