"""Where the seconds of a training step go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["data_wait", "pack", "forward", "loss", "backward", "optimiser"]


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of one optimiser step on this rank, over its micro-batches."""

    data_wait: float = 0.0  # for samples that were not read yet
    pack: float = 0.0  # packing, target normalisers, copies to the device
    forward: float = 0.0
    loss: float = 0.0
    backward: float = 0.0  # with the reduction of gradients
    optimiser: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.data_wait + self.pack + self.forward + self.loss + self.backward + self.optimiser
        )


class PhaseClock:
    """Adds up the phases of a step.

    On a GPU the work of a phase is timed by events on the current stream, which are read only in
    :meth:`take`: nothing waits for the device before that.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count the body as ``name``. Phases do not nest."""
        if self._is_cuda and name != "data_wait":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            return
        started = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - started)

    def take(self) -> PhaseSeconds:
        """The phases since the last call. Waits for the device where it has been timed."""
        for name, start, end in self._events:
            end.synchronize()
            self._add(name, start.elapsed_time(end) / 1000)
        taken = PhaseSeconds(**self._seconds)
        self._seconds, self._events = {}, []
        return taken

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
