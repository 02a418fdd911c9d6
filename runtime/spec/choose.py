"""How many tokens the next step drafts: none, one or K, by what such steps have cost so far.

A step is worth ``requests * emitted(K) / seconds(K)``. Seconds are measured, never modelled: of
whole steps, by the row count that the device really pays for (matrix instructions pad it to a tile)
and by how much context is read. ``emitted`` follows from the acceptance so far, by position. What
was not measured yet is tried; what was not tried for long is looked at again. Under keyed or greedy
verification the output does not depend on any of this, under rejection sampling its distribution
does not.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.config import EngineConfig

logger = logging.getLogger(__name__)

_GPU_TILE = 64  # rows of one matrix instruction
_TRIALS = 3  # steps per new cell; the first warms up and is not counted
_WINDOW = 16  # measured steps kept per cell
_LOOK_AGAIN = 256  # decode steps after which a length that lost is tried once more
_HYSTERESIS = 1.03  # a change has to promise this much
_FORGET = 1 - 1 / 1024  # per drafted chain
_PRIOR = (0.5, 4.0)  # acceptance before anything is known, and how many drafts that is worth
_CONTEXT_UNIT = 512  # tokens; context counts by powers of two above it


@dataclass(frozen=True)
class Load:
    """What a decode step runs over: requests, and all their tokens together."""

    num_requests: int
    context_tokens: int


@dataclass(frozen=True)
class Choice:
    """``k`` tokens were drafted from then on, because of ``reason``."""

    k: int
    reason: str


@dataclass(frozen=True)
class _Cell:
    """Steps that cost the same: K, rows paid by target and draft step, octave of the context."""

    k: int
    target_rows: int
    draft_rows: int
    context: int


class _Costs:
    """Seconds of the last steps of one cell."""

    def __init__(self) -> None:
        self.count = 0
        self.last_seen = 0
        self.median = math.inf
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def add(self, seconds: float, *, now: int) -> None:
        self.count += 1
        self.last_seen = now
        if self.count > 1:
            self._seconds.append(seconds)
            self.median = statistics.median(self._seconds)

    @property
    def is_known(self) -> bool:
        return self.count >= _TRIALS


def row_tile(device: torch.device) -> int:
    """Rows that the device's matrix instructions are padded to; 1 where nothing is padded."""
    return _GPU_TILE if device.type == "cuda" else 1


def paid_rows(num_rows: int, tile: int) -> int:
    """Rows that ``num_rows`` cost: the next multiple of ``tile``.

    Without a tile, costs grow smoothly and are told apart by powers of two.
    """
    if tile > 1:
        return -(-num_rows // tile) * tile
    return 1 << (num_rows - 1).bit_length() if num_rows else 0


def make_chooser(config: EngineConfig, device: torch.device) -> LengthChooser | None:
    """``None`` where every step drafts K tokens (``runtime.draft_length=pinned``)."""
    if config.draft_length == "pinned" or not config.num_draft_tokens:
        return None
    return LengthChooser(longest=config.num_draft_tokens, tile=row_tile(device))


class LengthChooser:
    """Chooses among 0, 1 and ``longest`` drafted tokens. All on the host; never asks the device."""

    def __init__(self, *, longest: int, tile: int) -> None:
        assert longest >= 1, "there is nothing to choose"
        self.candidates = tuple(sorted({0, 1, longest}))
        self.tile = tile
        self.choices: deque[Choice] = deque(maxlen=64)  # changes, the latest last
        self._costs: dict[_Cell, _Costs] = {}
        self._reached = [0.0] * longest
        self._accepted = [0.0] * longest
        self._current = longest
        self._now = 0

    def choose(self, load: Load) -> int:
        """K of the next decode step over ``load``. Changes nothing: it may be asked twice."""
        trial = self._trial(load)
        return self._best(load) if trial is None else trial

    def observe(self, k: int, load: Load, *, seconds: float, accepted: Sequence[int]) -> None:
        """One finished decode step: ``accepted`` drafts of each request (empty for K = 0).

        Steps whose K was clipped at a length limit are not comparable and are left out.
        """
        if k not in self.candidates:
            return
        if k != self._current and self._trial(load) is None and self._best(load) == k:
            self._current = k
            self.choices.append(Choice(k, self.explain(load)))
            logger.info("K = %d from now on: %s", k, self.choices[-1].reason)
        self._now += 1
        self._costs.setdefault(self._cell(k, load), _Costs()).add(seconds, now=self._now)
        for count in accepted if k else ():
            for j in range(k):
                self._reached[j] = _FORGET * self._reached[j] + (count >= j)
                self._accepted[j] = _FORGET * self._accepted[j] + (count > j)

    def explain(self, load: Load) -> str:
        """What each length is worth, and the rows it pays for."""
        parts = []
        for k in self.candidates:
            rows = load.num_requests * (k + 1)
            parts.append(
                f"K={k} {self._worth(k, load):.0f} tokens/s ({rows} rows paid as "
                f"{paid_rows(rows, self.tile)}, {self.emitted(k):.2f} tokens per step)"
            )
        return (
            f"batch {load.num_requests}, context {load.context_tokens} tokens: {', '.join(parts)}"
        )

    def emitted(self, k: int) -> float:
        """Tokens that a step with K drafts is expected to give one request."""
        share, weight = _PRIOR
        total = running = 1.0
        for j in range(k):
            rate = (self._accepted[j] + share * weight) / (self._reached[j] + weight)
            running *= rate
            total += running
        return total

    def _cell(self, k: int, load: Load) -> _Cell:
        return _Cell(
            k,
            paid_rows(load.num_requests * (k + 1), self.tile),
            paid_rows(load.num_requests, self.tile) if k > 1 else 0,
            (load.context_tokens // _CONTEXT_UNIT).bit_length(),
        )

    def _trial(self, load: Load) -> int | None:
        """A length that has to be measured (again), the longest first; ``None``: all are known."""
        last_seen = {}
        for k in reversed(self.candidates):
            costs = self._costs.get(self._cell(k, load))
            if costs is None or not costs.is_known:
                return k
            last_seen[k] = costs.last_seen
        oldest = min(last_seen, key=lambda k: last_seen[k])
        return oldest if self._now - last_seen[oldest] >= _LOOK_AGAIN else None

    def _best(self, load: Load) -> int:
        worth = {k: self._worth(k, load) for k in self.candidates}
        best = max(worth, key=lambda k: worth[k])
        return best if worth[best] >= _HYSTERESIS * worth[self._current] else self._current

    def _worth(self, k: int, load: Load) -> float:
        """Tokens per second; 0 before the cell was measured."""
        costs = self._costs.get(self._cell(k, load))
        return load.num_requests * self.emitted(k) / costs.median if costs else 0.0
