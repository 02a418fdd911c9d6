"""Draft-target speculation: the output is plain decoding's, the draft's state is right after every
step, and mutants that must fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_train.validate.rejection import joint_g_test
from runtime.batch import BatchMode
from runtime.config import DraftMode
from runtime.engine import Engine
from runtime.models.base import Model
from runtime.models.layer_drop import keep_layers
from runtime.models.llama import LlamaModel
from runtime.models.loader import Target
from runtime.request import Generation, Request, SamplingParams
from runtime.sampling import Stream
from runtime.scheduler import StepPlan
from runtime.spec import draw
from runtime.spec.base import WorkResult
from runtime.spec.draft_target import DraftRows, DraftTargetSchedule
from runtime.transfer import ImmediateTransfer
from tests.unit.runtime.draft_models import StubModel, tiny_draft
from tests.unit.runtime.engine_fixtures import (
    ByteTokenizer,
    check_draft_state,
    make_engine,
    make_requests,
    run_stepwise,
    tiny_target,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """Another model, nearly always wrong."""
    return tiny_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def shallow(target: Target) -> LlamaModel:
    """The target without its last layer: right about every other time."""
    return keep_layers(target.model, [0])


@pytest.fixture(params=["shallow", "other", "itself"])
def draft(request: pytest.FixtureRequest, target: Target) -> Model:
    if request.param == "itself":
        return target.model
    model: Model = request.getfixturevalue(request.param)
    return model


def outputs(generations: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.output_ids for generation in generations]


def check_after_step(engine: Engine) -> None:
    check_draft_state(engine)


# -- output and state ------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch_tokens", [16, 64])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_greedy_output_equals_plain_decoding_and_the_state_is_right_after_every_step(
    target: Target, draft: Model, k: int, late: bool, page_size: int, max_batch_tokens: int
) -> None:
    requests = make_requests()
    plain = make_engine(target).generate(requests)
    engine = make_engine(
        target,
        draft,
        num_draft_tokens=k,
        page_size=page_size,
        num_pages=1024 // page_size,
        max_batch_tokens=max_batch_tokens,
    )
    got = run_stepwise(engine, requests, late=late, after_step=check_after_step)
    assert [tuple(got[request.request_id]) for request in requests] == outputs(plain)
    assert engine.table.allocator.num_free == engine.config.num_pages


def test_the_state_check_covers_every_number_of_accepted_drafts(
    target: Target, shallow: LlamaModel
) -> None:
    engine = make_engine(target, shallow, num_draft_tokens=3)
    checked = 0
    states = [engine.add(request) for request in make_requests(ignore_eos=True, max_tokens=40)]
    while engine.has_work:
        engine.step()
        checked += check_draft_state(engine)
    assert checked > 50
    assert {step.num_accepted for state in states for step in state.steps} == {0, 1, 2, 3}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_keyed_output_equals_plain_sampling(
    target: Target, shallow: LlamaModel, k: int, temperature: float
) -> None:
    requests = make_requests(temperature=temperature, top_k=8, top_p=0.95)
    plain = make_engine(target).generate(requests)
    engine = make_engine(target, shallow, num_draft_tokens=k)
    got = run_stepwise(engine, requests, after_step=check_after_step)
    assert [tuple(got[request.request_id]) for request in requests] == outputs(plain)


def test_only_batches_in_which_everybody_decodes_speculate(
    target: Target, shallow: LlamaModel
) -> None:
    """A late prompt makes the batch mixed: one plain token each, and the draft keeps up."""
    first, late = make_requests(2, ignore_eos=True, max_tokens=24)
    engine = make_engine(target, shallow, num_draft_tokens=2, max_batch_tokens=20)
    enqueue, kinds = engine.schedule.enqueue, []

    def watched(plan: StepPlan) -> Any:
        pending = enqueue(plan)
        kinds.append("decode" if plan.is_decode_only else "mixed")
        assert pending.is_speculative == plan.is_decode_only
        return pending

    engine.schedule.enqueue = watched  # type: ignore[method-assign]
    engine.add(first)
    while engine.has_work:
        if len(kinds) == 3:
            engine.add(late)  # 37 tokens: two chunks beside the row that decodes
        engine.step()
        check_draft_state(engine)
    assert kinds[:6] == ["mixed", "decode", "decode", "mixed", "mixed", "decode"]


BEHAVIOURS: dict[str, Callable[[int], bool]] = {
    "right": lambda position: True,
    "wrong": lambda position: False,
    "every_other": lambda position: position % 2 == 0,
}


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_stub_drafts(target: Target, behaviour: str, k: int) -> None:
    requests = make_requests(3, ignore_eos=True, max_tokens=31)
    plain = make_engine(target).generate(requests)
    stub = make_stub(target, plain, BEHAVIOURS[behaviour])
    engine = make_engine(target, stub, num_draft_tokens=k)
    stub.engine = engine
    got = engine.generate(requests)
    assert outputs(got) == outputs(plain)
    for generation in got:
        inside = [s for s in generation.steps if s.start + k + 1 < len(generation.output_ids)]
        accepted = [step.num_accepted for step in inside]
        if behaviour == "right":
            assert set(accepted) == {k}
        elif behaviour == "wrong":
            assert set(accepted) == {0}
        else:
            first = [step.start + len(generation.prompt_ids) for step in inside]
            assert accepted == [1 if position % 2 == 0 else 0 for position in first]


def make_stub(
    target: Target, plain: Sequence[Generation], behaviour: Callable[[int], bool]
) -> StubModel:
    return StubModel(
        target, {g.request_id: [*g.prompt_ids, *g.output_ids] for g in plain}, behaviour
    )


@pytest.mark.slow
@pytest.mark.parametrize("draft_mode", ["argmax", "sampled"])
def test_rejection_sampling_has_the_exact_joint_of_three_tokens(
    target: Target, shallow: LlamaModel, draft_mode: DraftMode
) -> None:
    test = joint_g_test(target.model, shallow, k=2, draft_mode=draft_mode, count=12_000)
    assert test.passed


@pytest.mark.slow
def test_mutant_shared_draft_and_accept_stream_turns_the_joint_red(
    target: Target, shallow: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = draw.philox_uniform

    def shared(seed: torch.Tensor, position: torch.Tensor, stream: Stream) -> torch.Tensor:
        return original(seed, position, Stream.ACCEPT)

    monkeypatch.setattr(draw, "philox_uniform", shared)
    test = joint_g_test(target.model, shallow, k=2, draft_mode="sampled", count=12_000)
    assert not test.passed


# -- the ends of a request -------------------------------------------------------------------------


def test_eos_and_stop_strings_inside_an_accepted_run(target: Target) -> None:
    tokenizer = ByteTokenizer()
    requests = make_requests(8, seed=3, max_tokens=60, stop=("gh", "ca"))
    plain = make_engine(target, tokenizer=tokenizer).generate(requests)
    assert {g.finish_reason for g in plain} == {"stop", "length"}
    engine = make_engine(target, target.model, num_draft_tokens=4, tokenizer=tokenizer)
    got = engine.generate(requests)
    assert [(g.output_ids, g.finish_reason, g.text) for g in got] == [
        (g.output_ids, g.finish_reason, g.text) for g in plain
    ]
    assert any(
        g.steps and g.steps[-1].start + g.steps[-1].num_accepted + 1 > len(g.output_ids)
        for g in got
        if g.finish_reason == "stop"
    ), "nobody ended inside an accepted run"


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("prompt_len", [24, 36, 37, 38, 39])
def test_the_length_limit_clips_the_draft_so_that_its_row_ahead_fits(
    target: Target, k: int, prompt_len: int
) -> None:
    prompt = (tuple(range(3, 11)) * 5)[:prompt_len]
    requests = [
        Request("long", prompt, SamplingParams(max_tokens=500, ignore_eos=True)),
        Request("short", prompt[:7], SamplingParams(max_tokens=1, ignore_eos=True)),
        Request("other", prompt[:9], SamplingParams(max_tokens=40, ignore_eos=True)),
    ]
    plain = make_engine(target, max_model_len=40).generate(requests)
    engine = make_engine(target, target.model, num_draft_tokens=k, max_model_len=40)
    rows = watch_rows(engine)
    assert outputs(engine.generate(requests)) == outputs(plain)
    assert max(row.start + row.count for row in rows) <= 40


def test_every_draft_row_has_a_slot_of_its_own_request(target: Target) -> None:
    """At page size 1 a missing reservation would be somebody else's slot."""
    engine = make_engine(
        target, target.model, num_draft_tokens=3, page_size=1, num_pages=200, max_running=4
    )
    rows = watch_rows(engine)
    longest = 0
    for request in make_requests(6, ignore_eos=True, max_tokens=30):
        engine.add(request)
    while engine.has_work:
        ahead = {state.row: state.committed for state in engine.scheduler.running}
        rows.clear()
        engine.step()
        for row in rows:
            if row.table_row in ahead:
                longest = max(longest, row.start + row.count - ahead[row.table_row])
    assert longest == 3 + 2, "K + 2 slots from the committed length on, when all K are accepted"


def watch_rows(engine: Engine) -> list[DraftRows]:
    """All rows of the draft from now on; asserts that each is within its request's pages."""
    schedule = engine.schedule
    assert isinstance(schedule, DraftTargetSchedule)
    original, seen = schedule.run_draft, []

    def watched(mode: BatchMode, rows: Sequence[DraftRows], ids: torch.Tensor) -> torch.Tensor:
        for row in rows:
            missing = engine.table.pages_missing(row.table_row, row.start + row.count)
            assert missing == 0, f"{row} is {missing} pages beyond its reservation"
        seen.extend(rows)
        return original(mode, rows, ids)

    schedule.run_draft = watched  # type: ignore[method-assign]
    return seen


def test_preemption_by_recompute_changes_nothing(target: Target, shallow: LlamaModel) -> None:
    requests = make_requests(6, max_tokens=40, ignore_eos=True)
    roomy = make_engine(target).generate(requests)
    engine = make_engine(
        target, shallow, num_draft_tokens=2, page_size=1, num_pages=128, max_running=4
    )
    watch_rows(engine)
    got = run_stepwise(engine, requests, after_step=check_after_step)
    assert engine.scheduler.num_preemptions > 0, "pages never ran out"
    assert [tuple(got[r.request_id]) for r in requests] == outputs(roomy)
    assert engine.table.allocator.num_free == 128


def test_abort_between_steps_leaves_the_others_alone(target: Target, shallow: LlamaModel) -> None:
    requests = make_requests(4, ignore_eos=True)
    plain = make_engine(target).generate(requests)
    engine = make_engine(target, shallow, num_draft_tokens=2)
    states = [engine.add(request) for request in requests]
    for _ in range(4):
        engine.step()
    engine.abort("r1")
    while engine.has_work:
        engine.step()
        check_draft_state(engine)
    for index in (0, 2, 3):
        assert tuple(states[index].output_ids) == plain[index].output_ids
    assert engine.table.allocator.num_free == engine.config.num_pages


class AbortingTransfer(ImmediateTransfer):
    """Somebody gives up while the host waits for the ids of the third speculative step."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.engine: Engine | None = None
        self.num_steps = 0

    def wait(self, handle: Any) -> tuple[list[Any], ...]:
        self.num_steps += len(handle) == 3
        if self.num_steps == 3:
            assert self.engine is not None
            for name in self.names:
                self.engine.abort(name)
        return super().wait(handle)


@pytest.mark.parametrize("names", [["r1"], ["r0", "r1", "r2", "r3"]])
def test_abort_in_the_middle_of_a_speculative_step(
    target: Target, shallow: LlamaModel, names: list[str]
) -> None:
    requests = make_requests(4, ignore_eos=True)
    plain = make_engine(target).generate(requests)
    transfer = AbortingTransfer(names)
    engine = transfer.engine = make_engine(
        target, shallow, num_draft_tokens=2, transfer=transfer, page_size=1, num_pages=512
    )
    watch_rows(engine)
    states = [engine.add(request) for request in requests]
    while engine.has_work:
        engine.step()
        check_draft_state(engine)
    for state, generation in zip(states, plain, strict=True):
        is_aborted = state.request.request_id in names
        assert (state.finish_reason == "abort") == is_aborted
        length = len(state.output_ids) if is_aborted else None
        assert tuple(state.output_ids) == generation.output_ids[:length]
    assert engine.table.allocator.num_free == 512


def test_encoding_needs_no_draft(target: Target, shallow: LlamaModel) -> None:
    engine = make_engine(target, shallow, num_draft_tokens=2)
    rows = watch_rows(engine)
    sequences = [[3, 4, 5, 6], [7] * 33]
    for mine, wanted in zip(engine.score(sequences), make_engine(target).score(sequences)):  # noqa: B905
        assert torch.equal(mine, wanted)
    assert not rows
    with pytest.raises(ValueError, match="needs an engine with a draft head"):
        next(engine.forward_draft(sequences))


# -- what cannot work ------------------------------------------------------------------------------


def test_another_vocabulary_is_refused(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draft = tiny_draft(tmp_path_factory.mktemp("draft"), vocab_size=13)
    with pytest.raises(ValueError, match=r"has 13 tokens, the target's 11.*same vocabulary"):
        make_engine(target, draft, num_draft_tokens=2)


@pytest.mark.parametrize("layers", [[], [2], [1, 0], [0, 0], [-1]])
def test_layers_that_are_not_there_are_refused(target: Target, layers: list[int]) -> None:
    with pytest.raises(ValueError, match=r"layers=.*at least one layer of 0\.\.1"):
        keep_layers(target.model, layers)


def test_kept_layers_share_weights_and_own_their_cache(target: Target, shallow: LlamaModel) -> None:
    assert shallow.blocks[0] is target.model.blocks[0]
    assert shallow.embedding_VD is target.model.embedding_VD
    assert len(shallow.new_pool(16).k) == 1
    assert len(target.model.new_pool(16).k) == 2
    assert len(target.model.blocks) == 2


# -- mutants: equal output alone cannot see a broken draft -----------------------------------------


def one_row_instead_of_two(schedule: DraftTargetSchedule) -> None:
    """The hole that full acceptance leaves stays open."""
    run = schedule.run_draft

    def run_draft(mode: BatchMode, rows: Sequence[DraftRows], ids: torch.Tensor) -> torch.Tensor:
        if mode is not BatchMode.VERIFY:
            return run(mode, rows, ids)
        last = [DraftRows(row.table_row, row.start + 1, 1) for row in rows]
        return run(BatchMode.DECODE, last, ids[1::2]).repeat_interleave(2, 0, output_size=len(ids))

    schedule.run_draft = run_draft  # type: ignore[method-assign]


def relay_from_the_first_row(schedule: DraftTargetSchedule) -> None:
    run = schedule.run_draft

    def run_draft(mode: BatchMode, rows: Sequence[DraftRows], ids: torch.Tensor) -> torch.Tensor:
        hidden = run(mode, rows, ids)
        if mode is BatchMode.VERIFY:
            hidden = hidden[::2].repeat_interleave(2, 0, output_size=len(ids))
        return hidden

    schedule.run_draft = run_draft  # type: ignore[method-assign]


def rows_one_position_late(schedule: DraftTargetSchedule) -> None:
    """As if the draft's cache were as long as the target's: ids shifted as for a head."""
    run = schedule.run_draft

    def run_draft(mode: BatchMode, rows: Sequence[DraftRows], ids: torch.Tensor) -> torch.Tensor:
        if mode is BatchMode.VERIFY:
            rows = [replace(row, start=row.start - 1) for row in rows]
        return run(mode, rows, ids)

    schedule.run_draft = run_draft  # type: ignore[method-assign]


def last_draft_instead_of_the_new_token(schedule: DraftTargetSchedule) -> None:
    extend = schedule.extend_two_rows

    def extend_wrongly(results: Sequence[WorkResult]) -> None:
        extend(
            [
                replace(result, new_ids=(*result.new_ids[:-1], result.draft_ids[-1]))
                for result in results
            ]
        )

    schedule.extend_two_rows = extend_wrongly  # type: ignore[method-assign]


def new_token_not_given_to_the_draft_after_prefill(schedule: DraftTargetSchedule) -> None:
    extend = schedule._extend_draft

    def extend_wrongly(works: Any, batch: Any, hidden: Any, last_rows: Any, new_ids: Any) -> Any:
        return extend(works, batch, hidden, last_rows, torch.zeros_like(new_ids))

    schedule._extend_draft = extend_wrongly  # type: ignore[method-assign]


def carried_logits_of_another_request(schedule: DraftTargetSchedule) -> None:
    carry = schedule._carry_over
    schedule._carry_over = lambda rows, hidden: carry(  # type: ignore[method-assign]
        rows, hidden.roll(1, 0)
    )


MUTANTS = [
    one_row_instead_of_two,
    relay_from_the_first_row,
    rows_one_position_late,
    last_draft_instead_of_the_new_token,
    new_token_not_given_to_the_draft_after_prefill,
    carried_logits_of_another_request,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_mutants_keep_the_output_but_fail_the_recompute(
    target: Target, shallow: LlamaModel, mutate: Callable[[DraftTargetSchedule], None]
) -> None:
    requests = make_requests(4, ignore_eos=True)
    want = outputs(make_engine(target).generate(requests))

    def build() -> Engine:
        engine = make_engine(target, shallow, num_draft_tokens=2)
        assert isinstance(engine.schedule, DraftTargetSchedule)
        mutate(engine.schedule)
        return engine

    assert outputs(build().generate(requests)) == want, "verification repairs it"
    with pytest.raises(AssertionError, match="is off by"):
        run_stepwise(build(), requests, after_step=check_after_step)


def test_mutant_without_the_slot_ahead_leaves_the_reservation(target: Target) -> None:
    engine = make_engine(target, target.model, num_draft_tokens=3, page_size=1, num_pages=200)
    engine.scheduler.draft_ahead = 0
    watch_rows(engine)
    with pytest.raises(AssertionError, match="beyond its reservation"):
        engine.generate(make_requests(4, ignore_eos=True))
