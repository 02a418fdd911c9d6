"""The speculative step's contracts: no wait before the copy, order of events, exact sampling, and
mutants of the schedule that the recompute check must catch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_train.validate.rejection import joint_g_test
from runtime.batch import ForwardBatch
from runtime.config import DraftMode
from runtime.engine import Engine
from runtime.models.loader import Target
from runtime.no_wait import no_wait
from runtime.sampling import Stream
from runtime.scheduler import StepPlan
from runtime.spec import draw
from runtime.spec.base import PendingStep
from runtime.spec.mtp import MtpSchedule
from runtime.transfer import HostTransfer
from tests.unit.runtime.engine_fixtures import (
    ByteTokenizer,
    check_draft_state,
    make_engine,
    make_requests,
    random_head,
    run_stepwise,
    tiny_target,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_draft_tokens": 0},
        {"num_draft_tokens": 1},
        {"num_draft_tokens": 3, "page_size": 1, "num_pages": 512},
        {"num_draft_tokens": 2, "verify": "rejection", "draft_mode": "sampled"},
        {"num_draft_tokens": 2, "verify": "rejection"},
    ],
    ids=["plain", "k1", "k3_page1", "rejection_sampled", "rejection_argmax"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_step_never_waits_before_the_copy(
    target: Target, settings: dict[str, Any], temperature: float
) -> None:
    draft = random_head(target) if settings["num_draft_tokens"] else None
    engine = make_engine(target, draft, **settings)
    enqueue = engine.schedule.enqueue
    guarded = 0

    def under_guard(plan: StepPlan) -> PendingStep:
        nonlocal guarded
        guarded += 1
        with no_wait():
            return enqueue(plan)

    engine.schedule.enqueue = under_guard  # type: ignore[method-assign]
    engine.generate(make_requests(temperature=temperature, top_k=5, top_p=0.9, min_p=0.01))
    assert guarded > 5


class FakeAsyncTransfer(HostTransfer):
    """A device that answers late: copies run on a worker thread once the host has gone on."""

    is_async = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.worker = ThreadPoolExecutor(max_workers=1)
        self.released = threading.Event()

    def enqueue(self, *tensors: torch.Tensor) -> Future[tuple[list[Any], ...]]:
        self.released.clear()
        snapshots = [tensor.clone() for tensor in tensors]

        def copy() -> tuple[list[Any], ...]:
            assert self.released.wait(timeout=30), "the host waited before the draft was enqueued"
            return tuple(snapshot.tolist() for snapshot in snapshots)

        return self.worker.submit(copy)

    def wait(self, handle: Future[tuple[list[Any], ...]]) -> tuple[list[Any], ...]:
        self.events.append("wait")
        self.released.set()
        return handle.result(timeout=30)

    def mark(self, name: str) -> None:
        self.events.append(name)


def test_the_host_waits_only_after_the_draft_extension_is_enqueued(target: Target) -> None:
    transfer = FakeAsyncTransfer()
    requests = make_requests(3)
    engine = make_engine(target, random_head(target), num_draft_tokens=2, transfer=transfer)
    got = engine.generate(requests)
    assert [g.output_ids for g in got] == [
        g.output_ids for g in make_engine(target).generate(requests)
    ]
    steps = "|".join(transfer.events).split("wait")
    speculative = [step.strip("|") for step in steps if "propose" in step]
    assert speculative
    assert set(speculative) == {"propose|target|copy|extend"}
    plain = [step.strip("|") for step in steps if step.strip("|") and "propose" not in step]
    assert set(plain) == {"copy|extend"}


@pytest.mark.parametrize("sampling", [{}, {"stop": ("gh", "ca")}, {"temperature": 1.1}])
def test_plain_decoding_enqueues_the_next_step_before_it_waits(
    target: Target, sampling: dict[str, Any]
) -> None:
    """Same tokens as without look-ahead, with EOS, stop strings and length limits on the way."""
    requests = make_requests(8, seed=3, max_tokens=60, **sampling)
    tokenizer = ByteTokenizer()
    want = make_engine(target, tokenizer=tokenizer).generate(requests)
    transfer = LookAheadTransfer()
    engine = make_engine(target, transfer=transfer, tokenizer=tokenizer)
    got = engine.generate(requests)
    assert [(g.output_ids, g.finish_reason) for g in got] == [
        (g.output_ids, g.finish_reason) for g in want
    ]
    assert {g.finish_reason for g in got} == {"stop", "length"}
    assert transfer.most_in_flight == 2
    assert not engine.has_work
    assert engine.table.allocator.num_free == engine.config.num_pages


def test_aborting_while_a_step_is_in_flight(target: Target) -> None:
    requests = make_requests(3, ignore_eos=True)
    want = make_engine(target).generate(requests)
    engine = make_engine(target, transfer=LookAheadTransfer())
    states = [engine.add(request) for request in requests]
    for _ in range(6):
        engine.step()
    engine.abort("r0")
    while engine.has_work:
        engine.step()
    assert [tuple(s.output_ids) for s in states[1:]] == [g.output_ids for g in want[1:]]
    assert tuple(states[0].output_ids) == want[0].output_ids[: len(states[0].output_ids)]


class LookAheadTransfer(HostTransfer):
    """Counts the copies that are in flight at once."""

    is_async = True

    def __init__(self) -> None:
        self.in_flight = self.most_in_flight = 0

    def enqueue(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return [tensor.clone() for tensor in tensors]

    def wait(self, handle: list[torch.Tensor]) -> tuple[list[Any], ...]:
        self.in_flight -= 1
        return tuple(tensor.tolist() for tensor in handle)


# -- exactness of rejection sampling on a real-shaped model ---------------------------------------


NUM_TRIPLES = 12_000


@pytest.mark.slow
@pytest.mark.parametrize("draft_mode", ["argmax", "sampled"])
def test_rejection_sampling_has_the_exact_joint_of_three_tokens(
    target: Target, draft_mode: DraftMode
) -> None:
    head = random_head(target)
    test = joint_g_test(target.model, head, k=2, draft_mode=draft_mode, count=NUM_TRIPLES)
    assert test.passed


@pytest.mark.slow
def test_mutant_shared_draft_and_accept_stream_turns_the_joint_red(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = draw.philox_uniform

    def shared(seed: torch.Tensor, position: torch.Tensor, stream: Stream) -> torch.Tensor:
        return original(seed, position, Stream.ACCEPT)

    monkeypatch.setattr(draw, "philox_uniform", shared)
    head = random_head(target)
    test = joint_g_test(target.model, head, k=2, draft_mode="sampled", count=NUM_TRIPLES)
    assert not test.passed


# -- mutants of the schedule: equal output alone cannot see a broken draft -------------------------


def relay_from_row_zero(schedule: MtpSchedule) -> None:
    original = schedule._set_relay
    run_draft = schedule.run_draft
    first_rows: dict[str, torch.Tensor] = {}

    def remember(batch: ForwardBatch, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        out = run_draft(batch, ids, hidden)
        starts = torch.tensor([0, *batch.q_lens[:-1]]).cumsum(0)
        first_rows["rows"] = out[starts]
        return out

    def set_relay(rows: torch.Tensor, hidden: torch.Tensor) -> None:
        original(rows, first_rows["rows"] if len(first_rows["rows"]) == len(rows) else hidden)

    schedule.run_draft = remember  # type: ignore[method-assign]
    schedule._set_relay = set_relay  # type: ignore[method-assign]


def hidden_shifted_by_one(schedule: MtpSchedule) -> None:
    original = schedule.run_draft
    schedule.run_draft = lambda batch, ids, hidden: original(  # type: ignore[method-assign]
        batch, ids, hidden.roll(1, 0)
    )


def ids_not_shifted(schedule: MtpSchedule) -> None:
    original = schedule.run_draft
    schedule.run_draft = lambda batch, ids, hidden: original(  # type: ignore[method-assign]
        batch, batch.input_ids_N, hidden
    )


def new_token_not_inserted(schedule: MtpSchedule) -> None:
    """The extension keeps the rejected draft where the target's token belongs."""
    original = schedule.run_draft

    def run(batch: ForwardBatch, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if len(set(batch.q_lens)) == 1 and batch.q_lens[0] == 3:
            block = batch.input_ids_N.view(-1, 3)
            ids = torch.cat([block[:, 1:], block[:, -1:]], 1).reshape(-1)
        return original(batch, ids, hidden)

    schedule.run_draft = run  # type: ignore[method-assign]


def one_slot_of_draft_kv_leaked(schedule: MtpSchedule) -> None:
    """Every draft row may attend to one slot too many (whatever an earlier step left there)."""
    forward = schedule.draft.forward

    def leaky(batch: ForwardBatch) -> torch.Tensor:
        return forward(replace(batch, kv_lens=tuple(n + 1 for n in batch.kv_lens)))

    schedule.draft = _Leaky(schedule.draft, leaky)  # type: ignore[assignment]


class _Leaky:
    draft_loop = None

    def __init__(self, runner: Any, forward: Callable[[ForwardBatch], torch.Tensor]) -> None:
        self.model, self.pool, self.table, self.forward = (
            runner.model,
            runner.pool,
            runner.table,
            forward,
        )


def draft_position_off_by_one(schedule: MtpSchedule) -> None:
    original = schedule.run_draft
    schedule.run_draft = lambda batch, ids, hidden: original(  # type: ignore[method-assign]
        replace(batch, positions_N=batch.positions_N + 1), ids, hidden
    )


MUTANTS = [
    relay_from_row_zero,
    hidden_shifted_by_one,
    ids_not_shifted,
    new_token_not_inserted,
    one_slot_of_draft_kv_leaked,
    draft_position_off_by_one,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_mutants_keep_the_output_but_fail_the_recompute(
    target: Target, mutate: Callable[[MtpSchedule], None]
) -> None:
    requests = make_requests(4, ignore_eos=True)
    want = [g.output_ids for g in make_engine(target).generate(requests)]

    def build() -> Engine:
        engine = make_engine(target, random_head(target), num_draft_tokens=2)
        assert isinstance(engine.schedule, MtpSchedule)
        mutate(engine.schedule)
        return engine

    assert [g.output_ids for g in build().generate(requests)] == want, "verification repairs it"
    with pytest.raises(AssertionError, match="is off by"):
        run_stepwise(build(), requests, after_step=lambda engine: check_draft_state(engine))
