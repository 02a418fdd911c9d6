"""Draft-target speculation between host and device: one wait, and the order of events on a device
that works by itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from runtime.models.base import Model
from runtime.models.layer_drop import keep_layers
from runtime.models.llama import LlamaModel
from runtime.models.loader import Target
from runtime.no_wait import no_wait
from runtime.request import Generation, Request
from runtime.scheduler import StepPlan
from runtime.spec.base import WorkResult
from runtime.spec.draft_target import DraftTargetSchedule
from runtime.transfer import HostTransfer
from tests.unit.runtime.engine_fixtures import (
    make_engine,
    make_requests,
    tiny_target,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def shallow(target: Target) -> LlamaModel:
    return keep_layers(target.model, [0])


@pytest.mark.parametrize(
    "settings",
    [{}, {"verify": "rejection", "draft_mode": "sampled"}, {"verify": "rejection"}],
    ids=["keyed", "rejection_sampled", "rejection_argmax"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_nothing_waits_but_the_copy_of_the_ids(
    target: Target, shallow: LlamaModel, settings: dict[str, Any], temperature: float
) -> None:
    engine = make_engine(target, shallow, num_draft_tokens=3, **settings)
    schedule = engine.schedule
    assert isinstance(schedule, DraftTargetSchedule)
    enqueue, extend = schedule.enqueue, schedule.extend_two_rows
    guarded = {"enqueue": 0, "extend": 0}

    def enqueue_guarded(plan: StepPlan) -> Any:
        guarded["enqueue"] += 1
        with no_wait():
            return enqueue(plan)

    def extend_guarded(results: Sequence[WorkResult]) -> None:
        guarded["extend"] += 1
        with no_wait():
            extend(results)

    schedule.enqueue = enqueue_guarded  # type: ignore[method-assign]
    schedule.extend_two_rows = extend_guarded  # type: ignore[method-assign]
    engine.generate(make_requests(temperature=temperature, top_k=5, top_p=0.9, min_p=0.01))
    assert guarded["enqueue"] > guarded["extend"] > 5


class FakeDevice(HostTransfer):
    """A device that works by itself: what is enqueued is done in order on a worker thread.

    Two pieces of work take so long that they only end when the host has got further on: the first
    draft run of a step (until the target's batch has been put together) and the draft's last run
    (until the next batch has been scheduled). A host that waited for them would never get there.
    """

    is_async = True
    patience_s = 5.0

    def __init__(self) -> None:
        self.host: list[str] = []
        self.late: list[str] = []
        self.worker = ThreadPoolExecutor(max_workers=1)
        self.reached = {"batch": threading.Event(), "schedule": threading.Event()}

    def note(self, name: str) -> None:
        """The host has got to ``name``."""
        self.host.append(name)
        if name in self.reached:
            self.reached[name].set()

    def mark(self, name: str) -> None:
        is_first_draft = name == "draft" and "draft" not in self._since_schedule()
        self.note(name)
        if is_first_draft:
            self._hold_until("batch")
        elif name == "extend":
            self._hold_until("schedule")

    def enqueue(self, *tensors: torch.Tensor) -> Future[tuple[list[Any], ...]]:
        snapshots = [tensor.clone() for tensor in tensors]
        return self.worker.submit(lambda: tuple(snapshot.tolist() for snapshot in snapshots))

    def wait(self, handle: Future[tuple[list[Any], ...]]) -> tuple[list[Any], ...]:
        self.note("wait")
        return handle.result(timeout=30)

    def _hold_until(self, name: str) -> None:
        reached = self.reached[name]
        reached.clear()

        def work() -> None:
            if not reached.wait(timeout=self.patience_s):
                self.late.append(name)

        self.worker.submit(work)

    def _since_schedule(self) -> list[str]:
        last = len(self.host) - 1 - self.host[::-1].index("schedule")
        return self.host[last:]


def run_on_fake_device(
    target: Target, draft: Model, requests: Sequence[Request], *, k: int
) -> tuple[list[Generation], list[str]]:
    """Generations, and what the host did between two calls of the scheduler."""
    device = FakeDevice()
    engine = make_engine(target, draft, num_draft_tokens=k, transfer=device)
    schedule = engine.scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        device.note("schedule")
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    assert isinstance(engine.schedule, DraftTargetSchedule)
    engine.schedule.announce = lambda plan: device.note("announce")
    got = engine.generate(requests)
    device.note("schedule")  # nothing is left to schedule: the last run may end
    device.worker.shutdown()
    assert not device.late, f"the host waited for the draft before it got to {device.late}"
    steps = " ".join(device.host).split("schedule")
    return got, [step.strip() for step in steps if step.strip()]


def test_the_order_of_events_on_a_device_that_works_by_itself(
    target: Target, shallow: LlamaModel
) -> None:
    requests = make_requests(3, ignore_eos=True)
    got, steps = run_on_fake_device(target, shallow, requests, k=3)
    plain = make_engine(target).generate(requests)
    assert [g.output_ids for g in got] == [g.output_ids for g in plain]
    # Prefill: the new token goes into the draft's cache, nothing is drawn from the draft.
    assert steps[0] == "announce copy extend wait"
    assert set(steps) == {
        "announce copy extend wait",
        "draw draft draw announce batch draft draw propose target copy wait extend",
    }


def test_a_single_draft_comes_from_the_carried_logits_alone(
    target: Target, shallow: LlamaModel
) -> None:
    _, steps = run_on_fake_device(target, shallow, make_requests(2, ignore_eos=True), k=1)
    assert set(steps) == {
        "announce copy extend wait",
        "draw announce batch propose target copy wait extend",
    }


def test_mutant_that_waits_for_the_draft_before_it_schedules_is_seen(
    target: Target, shallow: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = DraftTargetSchedule.extend_two_rows

    def extend_and_wait(self: DraftTargetSchedule, results: Sequence[WorkResult]) -> None:
        extend(self, results)
        self.transfer.wait(self.transfer.enqueue(self.logits_RV))

    monkeypatch.setattr(DraftTargetSchedule, "extend_two_rows", extend_and_wait)
    monkeypatch.setattr(FakeDevice, "patience_s", 0.2)
    with pytest.raises(AssertionError, match="the host waited for the draft"):
        run_on_fake_device(target, shallow, make_requests(1, max_tokens=4, ignore_eos=True), k=2)
