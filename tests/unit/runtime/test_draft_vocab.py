"""Drafting from a list of ids: exact in every verification mode, and q is zero outside."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mtp_train.validate.rejection import joint_g_test
from runtime.batch import ForwardBatch
from runtime.config import DraftMode
from runtime.draft_vocab import reduce_head, spread_probs, to_target_ids
from runtime.engine import Engine
from runtime.head_spec import check_head_tensors, save_head
from runtime.kv_cache import KVPool, SlotTable
from runtime.models.base import DraftModel
from runtime.models.heads import build_head
from runtime.models.loader import Target
from runtime.no_wait import no_wait
from runtime.request import SamplingParams
from runtime.sampling import SamplingTensors, Stream, inverse_cdf, philox_uniform, token_probs
from runtime.spec import mtp
from runtime.spec.mtp import MtpSchedule
from tests.unit.runtime.engine_fixtures import (
    VOCAB,
    StubDraft,
    check_draft_state,
    head_spec,
    make_engine,
    make_requests,
    random_head_tensors,
    run_stepwise,
    tiny_target,
)

IDS = torch.tensor([1, 3, 4, 8, 10])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


def hot_head(target: Target, ids: torch.Tensor = IDS) -> DraftModel:
    spec = head_spec(target)
    reduced, tensors = reduce_head(spec, random_head_tensors(spec), ids, coverage=0.5)
    return build_head(reduced, tensors, target.model)


# -- output ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_draft_tokens": 1},
        {"num_draft_tokens": 3, "page_size": 1, "num_pages": 512},
        {"num_draft_tokens": 2, "num_pages": 12},  # pages run out
        {"num_draft_tokens": 2, "verify": "rejection"},
    ],
    ids=["k1", "k3_page1", "k2_preempted", "k2_rejection_argmax"],
)
def test_output_and_draft_state_are_those_of_plain_decoding(
    target: Target, settings: dict[str, Any], temperature: float, late: bool
) -> None:
    """Keyed output equals at any temperature; of rejection sampling only the greedy one must."""
    requests = make_requests(6, temperature=temperature, max_tokens=30)
    want = {g.request_id: list(g.output_ids) for g in make_engine(target).generate(requests)}
    engine = make_engine(target, hot_head(target), **settings)
    checked = 0

    def after_step(engine: Engine) -> None:
        nonlocal checked
        checked += check_draft_state(engine)

    got = run_stepwise(engine, requests, late=late, after_step=after_step)
    assert checked > 10
    if settings.get("verify") != "rejection" or temperature == 0:
        assert got == want


@pytest.mark.parametrize("draft_mode", ["argmax", "sampled"])
def test_only_listed_tokens_are_drafted_and_all_are_emitted(
    target: Target, draft_mode: DraftMode
) -> None:
    engine = make_engine(
        target, hot_head(target), num_draft_tokens=2, verify="rejection", draft_mode=draft_mode
    )
    requests = make_requests(16, temperature=1.5, ignore_eos=True, max_tokens=40)
    results = engine.generate(requests)
    drafted = {i for g in results for step in g.steps for i in step.draft_ids}
    assert drafted == set(IDS.tolist()) if draft_mode == "sampled" else drafted <= set(IDS.tolist())
    emitted = {i for g in results for i in g.output_ids}
    assert emitted == set(range(VOCAB))
    assert sum(step.num_accepted for g in results for step in g.steps) > 20


class HotStub(DraftModel):
    """A stub that is always right, seen through the list: other tokens have no column."""

    def __init__(self, inner: StubDraft, ids_W: torch.Tensor) -> None:
        self.inner = inner
        self.device, self.dtype, self.width = inner.device, inner.dtype, inner.width
        self.vocab_size, self.draft_vocab_size = inner.vocab_size, len(ids_W)
        self.draft_vocab_ids = ids_W

    def new_pool(self, num_slots: int) -> KVPool:
        return self.inner.new_pool(num_slots)

    def forward(self, batch: ForwardBatch, table: SlotTable, pool: KVPool) -> torch.Tensor:
        return self.inner.forward(batch, table, pool)

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        assert self.draft_vocab_ids is not None
        return self.inner.logits(hidden_MD)[:, self.draft_vocab_ids]


def test_a_perfect_draft_is_accepted_exactly_while_its_tokens_are_listed(target: Target) -> None:
    k = 2
    requests = make_requests(4, ignore_eos=True, max_tokens=30)
    plain = make_engine(target).generate(requests)
    answers = {g.request_id: [*g.prompt_ids, *g.output_ids] for g in plain}
    stub = StubDraft(target, answers, lambda position: True)
    engine = make_engine(target, HotStub(stub, IDS), num_draft_tokens=k)
    stub.engine = engine
    listed = set(IDS.tolist())
    counts = {0: 0, 1: 0, 2: 0}
    for generation in engine.generate(requests):
        for step in generation.steps:
            wanted = generation.output_ids[step.start : step.start + k]
            if len(wanted) < k:  # beyond the last token the stub knows nothing
                continue
            in_a_row = next((j for j, i in enumerate(wanted) if i not in listed), k)
            assert step.num_accepted == in_a_row
            counts[in_a_row] += 1
    assert all(counts.values()), counts


@pytest.mark.parametrize("draft_mode", ["argmax", "sampled"])
def test_the_map_back_never_waits_for_the_device(target: Target, draft_mode: DraftMode) -> None:
    engine = make_engine(
        target, hot_head(target), num_draft_tokens=2, verify="rejection", draft_mode=draft_mode
    )
    enqueue = engine.schedule.enqueue

    def guarded(plan: Any) -> Any:
        with no_wait():
            return enqueue(plan)

    engine.schedule.enqueue = guarded  # type: ignore[method-assign]
    engine.generate(make_requests(temperature=0.8))


# -- the distribution ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("draft_mode", ["argmax", "sampled"])
def test_the_joint_of_three_tokens_is_exact(target: Target, draft_mode: DraftMode) -> None:
    test = joint_g_test(target.model, hot_head(target), k=2, draft_mode=draft_mode, count=8_000)
    assert test.passed


def mass_at_columns(probs: torch.Tensor, ids: Any, *, vocab_size: int) -> torch.Tensor:
    """q laid out by column instead of by id."""
    return torch.nn.functional.pad(probs, (0, vocab_size - probs.shape[1]))


def mass_outside(probs: torch.Tensor, ids: Any, *, vocab_size: int) -> torch.Tensor:
    """A q that is not zero outside of the list."""
    full = probs.new_full((probs.shape[0], vocab_size), 0.05)
    return full.index_copy_(1, ids, probs * (1 - 0.05 * (vocab_size - len(ids))))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [mass_at_columns, mass_outside])
def test_mutants_of_q_turn_the_joint_red(
    target: Target, monkeypatch: pytest.MonkeyPatch, mutant: Any
) -> None:
    monkeypatch.setattr(mtp, "spread_probs", mutant)
    test = joint_g_test(target.model, hot_head(target), k=2, draft_mode="sampled", count=8_000)
    assert not test.passed


def test_mutant_columns_read_as_ids_lose_the_acceptance(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output stays right (verification repairs it): only what was drafted tells."""

    def drafted() -> set[int]:
        engine = make_engine(target, hot_head(target), num_draft_tokens=2)
        results = engine.generate(make_requests(ignore_eos=True))
        return {i for g in results for step in g.steps for i in step.draft_ids}

    assert drafted() <= set(IDS.tolist())
    monkeypatch.setattr(mtp, "to_target_ids", lambda columns, ids: columns)
    assert not drafted() <= set(IDS.tolist())


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.6, min_p=0.05),
        SamplingParams(),
    ],
)
def test_sampling_columns_is_sampling_the_vocabulary_with_nothing_outside(
    sampling: SamplingParams,
) -> None:
    """The same q and the same draw as from logits that are -inf outside of the list."""
    count = 50
    logits_BW = torch.randn(count, len(IDS), generator=torch.Generator().manual_seed(0))
    tensors = SamplingTensors.build([sampling] * count, torch.device("cpu"))
    uniform_B = philox_uniform(tensors.seed_M, torch.arange(count), Stream.DRAFT)
    full_BV = torch.full((count, VOCAB), -torch.inf).index_copy_(1, IDS, logits_BW)
    want_BV = token_probs(full_BV, tensors)
    probs_BW = token_probs(logits_BW, tensors)
    got_BV = spread_probs(probs_BW, IDS, vocab_size=VOCAB)
    torch.testing.assert_close(got_BV, want_BV, rtol=0, atol=1e-6)
    outside = [i for i in range(VOCAB) if i not in IDS.tolist()]
    assert (got_BV[:, outside] == 0).all()
    drawn_B = to_target_ids(inverse_cdf(probs_BW, uniform_B), IDS)
    assert drawn_B.tolist() == inverse_cdf(want_BV, uniform_B).tolist()


def test_without_a_list_nothing_is_mapped() -> None:
    probs_BV = torch.rand(2, VOCAB)
    assert spread_probs(probs_BV, None, vocab_size=VOCAB) is probs_BV
    assert to_target_ids(IDS, None) is IDS


# -- the list itself -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([3, 1, 4]), "strictly ascending"),
        (torch.tensor([1, 3, 3]), "strictly ascending"),
        (torch.tensor([-1, 3]), "id -1 is outside of 0..10"),
        (torch.tensor([0, VOCAB]), "id 11 is outside of 0..10"),
        (torch.tensor([], dtype=torch.int64), "expected a list of int64 ids"),
        (torch.tensor([1, 3], dtype=torch.int32), "torch.int32"),
        (torch.tensor([[1, 3]]), "expected a list"),
    ],
)
def test_a_list_that_is_none_is_refused(target: Target, ids: torch.Tensor, message: str) -> None:
    spec = head_spec(target)
    with pytest.raises(ValueError, match=message):
        reduce_head(spec, random_head_tensors(spec), ids, coverage=0.5)


def test_offsets_in_place_of_ids_are_refused_when_a_head_is_loaded(target: Target) -> None:
    """`id - column`, as some layouts store it: never ascending from 1 on, and another hash."""
    spec = head_spec(target)
    reduced, tensors = reduce_head(spec, random_head_tensors(spec), IDS, coverage=0.5)
    offsets = IDS - torch.arange(len(IDS))
    with pytest.raises(ValueError, match="strictly ascending"):
        check_head_tensors(reduced, tensors | {"draft_vocab_ids": offsets}, source="head")
    other = IDS.clone()
    other[0] = 0
    with pytest.raises(ValueError, match="ids_sha256"):
        check_head_tensors(reduced, tensors | {"draft_vocab_ids": other}, source="head")


def test_a_reduced_head_is_not_reduced_again(target: Target, tmp_path: Any) -> None:
    spec = head_spec(target)
    tensors = random_head_tensors(spec)
    reduced, hot = reduce_head(spec, tensors, IDS, coverage=0.5)
    save_head(tmp_path / "head", reduced, hot)
    assert dataclasses.replace(reduced, draft_vocab=None) == spec
    assert set(hot) - set(tensors) == {"draft_vocab_ids"}
    with pytest.raises(ValueError, match=r"draft_vocab\.size=5"):
        reduce_head(reduced, hot, IDS, coverage=0.5)


def test_relay_logits_have_one_column_per_id(target: Target) -> None:
    engine = make_engine(
        target, hot_head(target), num_draft_tokens=1, verify="rejection", draft_mode="sample"
    )
    assert isinstance(engine.schedule, MtpSchedule)
    assert engine.schedule.drawn_from_RX.shape == (4, len(IDS))
