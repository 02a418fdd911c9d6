"""The single-token schedule (MTP with K = 1): 2 D rows, batch information made once, and a next
step that is planned exactly while the draft still runs."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.attention.base import AttentionBackend
from runtime.batch import BatchMode, ForwardBatch
from runtime.engine import Engine
from runtime.models.loader import Target
from runtime.scheduler import StepPlan
from runtime.spec import mtp
from runtime.spec.base import Runner
from runtime.spec.mtp import MtpSchedule
from runtime.spec.shift import ShiftedInputs, shift_inputs_torch
from runtime.transfer import HostTransfer
from tests.unit.runtime.engine_fixtures import (
    check_draft_state,
    make_engine,
    make_requests,
    random_head,
    run_stepwise,
    tiny_target,
)

TIMEOUT_S = 30


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


class FakeDevice(HostTransfer):
    """A device with one queue: copies, then the draft extension, which takes until the host has
    planned the next step. A host that waits for it before that waits for ever, and the test fails.
    """

    is_async = True

    def __init__(self) -> None:
        self.queue = ThreadPoolExecutor(max_workers=1)
        self.log: list[str] = []
        self.planned = threading.Event()
        self.running: Future[None] | None = None

    def enqueue(self, *tensors: torch.Tensor) -> Future[tuple[list[Any], ...]]:
        snapshots = [tensor.clone() for tensor in tensors]
        return self.queue.submit(lambda: tuple(tensor.tolist() for tensor in snapshots))

    def wait(self, handle: Future[tuple[list[Any], ...]]) -> tuple[list[Any], ...]:
        result = handle.result(timeout=TIMEOUT_S)
        self.log.append("lengths")
        return result

    def mark(self, name: str) -> None:
        self.log.append(name)

    def attach(self, engine: Engine) -> None:
        """Make ``engine``'s draft extensions work of the queue, and watch it plan."""
        schedule, scheduler = engine.schedule, engine.scheduler
        assert isinstance(schedule, MtpSchedule)
        extend, propose, plan = schedule._extend_verified, schedule.propose, scheduler.schedule

        def extend_later(*args: Any) -> torch.Tensor:
            self.planned.clear()

            def work() -> None:
                assert self.planned.wait(TIMEOUT_S), "the host waits for the draft"
                with torch.inference_mode():
                    extend(*args)
                self.log.append("extended")

            self.running = self.queue.submit(work)
            return torch.empty(0)

        def propose_in_order(*args: Any) -> Any:
            self.finish()  # the relay state comes out of the queue
            return propose(*args)

        def plan_and_tell() -> StepPlan:
            assert all(s.committed == len(s.tokens) - 1 for s in scheduler.running if s.committed)
            step = plan()
            self.log.append("planned")
            self.planned.set()
            return step

        schedule._extend_verified = extend_later  # type: ignore[method-assign]
        schedule.propose = propose_in_order  # type: ignore[method-assign]
        scheduler.schedule = plan_and_tell  # type: ignore[method-assign]

    def finish(self) -> None:
        if self.running is not None:
            self.planned.set()
            self.running.result(timeout=TIMEOUT_S)
            self.running = None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_next_step_is_planned_exactly_while_the_draft_runs(
    target: Target, temperature: float
) -> None:
    requests = make_requests(4, ignore_eos=True, max_tokens=16, temperature=temperature)
    want = [g.output_ids for g in make_engine(target).generate(requests)]
    device = FakeDevice()
    engine = make_engine(target, random_head(target), num_draft_tokens=1, transfer=device)
    device.attach(engine)
    got = [g.output_ids for g in engine.generate(requests)]
    device.finish()
    assert got == want
    log = device.log
    steps = [i for i, name in enumerate(log) if name == "propose"]
    assert len(steps) > 5
    for first, following in itertools.pairwise(steps):
        step = log[first:following]
        assert step == ["propose", "target", "copy", "extend", "lengths", "planned", "extended"]


def test_a_host_that_waits_for_the_draft_is_caught(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the test above: `collect` waits for everything."""
    monkeypatch.setattr("tests.unit.runtime.test_single_token.TIMEOUT_S", 0.5)
    device = FakeDevice()
    engine = make_engine(target, random_head(target), num_draft_tokens=1, transfer=device)
    device.attach(engine)
    collect = engine.schedule.collect

    def wait_for_all(pending: Any) -> Any:
        if device.running is not None:
            device.running.result(timeout=5)
        return collect(pending)

    engine.schedule.collect = wait_for_all  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="the host waits for the draft"):
        engine.generate(make_requests(2, ignore_eos=True))


class Watch:
    """What target and head run over, and how often it is built and planned."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        schedule = engine.schedule
        assert isinstance(schedule, MtpSchedule)
        self.target: list[ForwardBatch] = []
        self.draft: list[ForwardBatch] = []
        self.num_plans = self.num_built = 0
        schedule.target = self._watch(schedule.target, self.target)
        schedule.draft = self._watch(schedule.draft, self.draft)
        backend: AttentionBackend = engine.target.backend  # type: ignore[attr-defined]
        plan, build = backend.plan, mtp.build_batch

        def count_plan(batch: ForwardBatch, table: Any) -> Any:
            self.num_plans += 1
            return plan(batch, table)

        def count_build(*args: Any, **options: Any) -> ForwardBatch:
            self.num_built += 1
            return build(*args, **options)

        monkeypatch.setattr(backend, "plan", count_plan)
        monkeypatch.setattr(mtp, "build_batch", count_build)

    def reset(self) -> None:
        self.target.clear()
        self.draft.clear()
        self.num_plans = self.num_built = 0

    @staticmethod
    def _watch(runner: Runner, seen: list[ForwardBatch]) -> Runner:
        class Watched(Runner):
            def forward(self, batch: ForwardBatch) -> torch.Tensor:
                seen.append(batch)
                return super().forward(batch)

        return Watched(runner.model, runner.pool, runner.table)


def test_target_and_head_run_over_the_same_two_rows_planned_once(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(target, random_head(target), num_draft_tokens=1)
    for request in make_requests(4, ignore_eos=True):
        engine.add(request)
    watch = Watch(engine, monkeypatch)
    checked = 0
    while engine.has_work:
        watch.reset()
        engine.step()
        (batch,), (drafted,) = watch.target, watch.draft
        if batch.mode is not BatchMode.VERIFY:
            continue
        checked += 1
        count = len(batch.q_lens)
        assert batch.q_lens == drafted.q_lens == (2,) * count
        assert batch.input_ids_N.shape == (2 * count,)
        assert (watch.num_built, watch.num_plans) == (1, 1)
        assert batch.write_slots_N is drafted.write_slots_N
        assert batch.positions_N is drafted.positions_N
    assert checked > 8


@pytest.mark.parametrize("settings", [{}, {"page_size": 1, "num_pages": 512}, {"num_pages": 12}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_equals_plain_decoding_and_the_draft_a_recompute(
    target: Target, settings: dict[str, Any], temperature: float
) -> None:
    requests = make_requests(6, temperature=temperature, max_tokens=30)
    want = {g.request_id: list(g.output_ids) for g in make_engine(target).generate(requests)}
    engine = make_engine(target, random_head(target), num_draft_tokens=1, **settings)
    checked = 0

    def after_step(engine: Engine) -> None:
        nonlocal checked
        checked += check_draft_state(engine)

    assert run_stepwise(engine, requests, late=True, after_step=after_step) == want
    assert checked > 10


def test_a_batch_that_differs_gets_a_plan_of_its_own(target: Target) -> None:
    """The shared plan must not outlive what it was made for."""
    engine = make_engine(target)
    row = engine.table.acquire_row()
    engine.table.reserve(row, 8)
    batch = mtp.build_batch(
        BatchMode.VERIFY,
        table=engine.table,
        table_rows=[row],
        starts=[2],
        q_lens=[2],
        input_ids_N=torch.tensor([1, 2]),
        device=torch.device("cpu"),
    )
    backend = engine.target.backend  # type: ignore[attr-defined]
    plan = backend.plan_once(batch, engine.table)
    same = replace(batch, input_ids_N=torch.tensor([3, 4]), hidden_ND=torch.zeros(2, 3))
    assert backend.plan_once(same, engine.table) is plan
    for other in (
        replace(batch, kv_lens=(5,)),
        replace(batch, write_slots_N=batch.write_slots_N.clone()),
        replace(batch, mode=BatchMode.PREFILL),
    ):
        assert backend.plan_once(other, engine.table) is not plan


# -- mutants: the output is repaired by verification, the draft's state is not ---------------------


def token_one_row_late(
    ids: torch.Tensor, last: torch.Tensor, emitted: torch.Tensor
) -> ShiftedInputs:
    right = shift_inputs_torch(ids, last, emitted)
    late = shift_inputs_torch(ids, last, (emitted + 1).clamp_max(ids.shape[1]))
    return ShiftedInputs(late.ids_N, right.end_rows_B)


def relay_from_the_last_row(
    ids: torch.Tensor, last: torch.Tensor, emitted: torch.Tensor
) -> ShiftedInputs:
    right = shift_inputs_torch(ids, last, emitted)
    all_rows = torch.full_like(emitted, ids.shape[1])
    return ShiftedInputs(right.ids_N, shift_inputs_torch(ids, last, all_rows).end_rows_B)


def ids_not_shifted(ids: torch.Tensor, last: torch.Tensor, emitted: torch.Tensor) -> ShiftedInputs:
    right = shift_inputs_torch(ids, last, emitted)
    return ShiftedInputs(ids.reshape(-1), right.end_rows_B)


@pytest.mark.parametrize("mutant", [token_one_row_late, relay_from_the_last_row, ids_not_shifted])
def test_mutants_of_the_shift_keep_the_output_and_fail_the_recompute(
    target: Target, monkeypatch: pytest.MonkeyPatch, mutant: Any
) -> None:
    requests = make_requests(4, ignore_eos=True)
    want = [g.output_ids for g in make_engine(target).generate(requests)]
    monkeypatch.setattr(target.model.ops, "shift_inputs", mutant)

    def build() -> Engine:
        return make_engine(target, random_head(target), num_draft_tokens=1)

    assert [g.output_ids for g in build().generate(requests)] == want
    with pytest.raises(AssertionError, match="is off by"):
        run_stepwise(build(), requests, after_step=check_draft_state)


def test_mutant_a_plan_that_is_kept_for_the_next_step_changes_the_output(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(2, ignore_eos=True)
    want = [g.output_ids for g in make_engine(target).generate(requests)]
    kept: dict[Any, Any] = {}

    def stale(self: AttentionBackend, batch: ForwardBatch, table: Any) -> Any:
        key = (id(table), batch.mode, batch.q_lens)
        if key not in kept:
            kept[key] = self.plan(batch, table)
        return kept[key]

    monkeypatch.setattr(AttentionBackend, "plan_once", stale)
    engine = make_engine(target, random_head(target), num_draft_tokens=1)
    assert [g.output_ids for g in engine.generate(requests)] != want
