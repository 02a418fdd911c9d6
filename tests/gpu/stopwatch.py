"""Time on the device, and what the host does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runtime.engine import Engine
from runtime.scheduler import StepPlan
from runtime.spec.base import PendingStep


class Mark:
    """A place in the device's stream; on a CPU, which does everything at once, a time."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._time = 0.0

    def set(self) -> None:
        if self._event is not None:
            self._event.record()
        else:
            self._time = time.perf_counter()

    def seconds_to(self, later: Mark) -> float:
        if self._event is not None:
            assert later._event is not None
            return self._event.elapsed_time(later._event) / 1e3
        return later._time - self._time


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(call: Callable[[], Any], device: torch.device, *, repeats: int) -> float:
    """Mean seconds of ``repeats`` calls after one that is not counted."""
    call()
    start, stop = Mark(device), Mark(device)
    synchronize(device)
    start.set()
    for _ in range(repeats):
        call()
    stop.set()
    synchronize(device)
    return start.seconds_to(stop) / repeats


class StepWatch:
    """Where the time of an engine's steps goes.

    ``wall_s``: the steps; ``wait_s``: of it the host waiting for ids; ``busy_s``: from the first to
    the last kernel of each step. Host work is wall - wait. What of it the device did not have to
    wait for is hidden: host work - (wall - busy).
    """

    def __init__(self) -> None:
        self.wall_s = self.wait_s = 0.0
        self.num_steps = 0
        self._marks: list[tuple[Mark, Mark]] = []

    @property
    def busy_s(self) -> float:
        return sum(start.seconds_to(stop) for start, stop in self._marks)

    @property
    def host_s(self) -> float:
        return self.wall_s - self.wait_s

    @property
    def share_hidden(self) -> float:
        idle_s = max(0.0, self.wall_s - self.busy_s)
        return max(0.0, 1.0 - idle_s / self.host_s) if self.host_s > 0 else 1.0

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Count everything that ``engine`` does within."""
        device = engine.target.device
        enqueue, wait = engine.schedule.enqueue, engine.transfer.wait

        def timed_enqueue(plan: StepPlan) -> PendingStep:
            marks = Mark(device), Mark(device)
            marks[0].set()
            pending = enqueue(plan)
            marks[1].set()
            self._marks.append(marks)
            self.num_steps += 1
            return pending

        def timed_wait(handle: Any) -> Any:
            start = time.perf_counter()
            result = wait(handle)
            self.wait_s += time.perf_counter() - start
            return result

        engine.schedule.enqueue = timed_enqueue  # type: ignore[method-assign]
        engine.transfer.wait = timed_wait  # type: ignore[method-assign]
        synchronize(device)
        start = time.perf_counter()
        try:
            yield
        finally:
            synchronize(device)
            self.wall_s += time.perf_counter() - start
            engine.schedule.enqueue = enqueue  # type: ignore[method-assign]
            engine.transfer.wait = wait  # type: ignore[method-assign]
