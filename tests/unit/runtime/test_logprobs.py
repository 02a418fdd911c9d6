"""Log-probabilities of the answer's tokens: those of a fresh scoring pass, under every schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from runtime.engine import Engine
from runtime.models.base import Model
from runtime.models.layer_drop import keep_layers
from runtime.models.loader import Target
from runtime.no_wait import no_wait
from runtime.request import Generation, Request
from runtime.spec.base import PendingStep, WorkResult
from tests.unit.runtime.engine_fixtures import (
    ByteTokenizer,
    make_engine,
    make_requests,
    random_head,
    tiny_target,
)

DRAFTS: dict[str, Callable[[Target], Model | None]] = {
    "plain": lambda target: None,
    "head": random_head,
    "model": lambda target: keep_layers(target.model, [0]),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


def asking(requests: Sequence[Request]) -> list[Request]:
    return [replace(r, sampling=replace(r.sampling, logprobs=True)) for r in requests]


def check_scores(target: Target, generations: Sequence[Generation]) -> None:
    """Against one pass over prompt and answer."""
    scorer = make_engine(target)
    sequences = [[*g.prompt_ids, *g.output_ids] for g in generations]
    for generation, scores_T in zip(generations, scorer.score(sequences), strict=True):
        assert generation.logprobs is not None
        wanted = scores_T[len(generation.prompt_ids) - 1 :]
        assert len(generation.logprobs) == len(generation.output_ids)
        torch.testing.assert_close(torch.tensor(generation.logprobs), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_they_are_the_targets_own_whatever_drafts(
    target: Target, draft: str, temperature: float
) -> None:
    """With stop strings and ends inside of accepted runs, filters, preemption and chunks."""
    model = DRAFTS[draft](target)
    engine = make_engine(
        target,
        model,
        num_draft_tokens=3 if model else 0,
        page_size=1,
        num_pages=128,
        max_batch_tokens=16,
        tokenizer=ByteTokenizer(),
    )
    requests = make_requests(
        8, seed=3, max_tokens=40, temperature=temperature, top_k=5, stop=("gh", "ca")
    )
    generations = engine.generate(asking(requests))
    assert engine.scheduler.num_preemptions > 0
    assert {generation.finish_reason for generation in generations} == {"stop", "length"}
    check_scores(target, generations)
    plain = make_engine(target, tokenizer=ByteTokenizer()).generate(requests)
    assert [g.output_ids for g in generations] == [g.output_ids for g in plain]
    assert {g.logprobs for g in plain} == {None}


@pytest.mark.parametrize("draft", DRAFTS)
def test_nobody_waits_for_them_within_a_step(target: Target, draft: str) -> None:
    model = DRAFTS[draft](target)
    engine = make_engine(target, model, num_draft_tokens=2 if model else 0)
    commit = engine._commit
    guarded = 0

    def under_guard(pending: PendingStep, results: Sequence[WorkResult]) -> object:
        nonlocal guarded
        guarded += 1
        with no_wait():
            return commit(pending, results)

    engine._commit = under_guard  # type: ignore[assignment]
    check_scores(target, engine.generate(asking(make_requests(3))))
    assert guarded > 5


def test_only_who_asks_pays(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = Engine._score_new

    def counted(self: Engine, state, pending, start, result) -> None:  # type: ignore[no-untyped-def]
        nonlocal calls
        before = len(state.logprobs)
        original(self, state, pending, start, result)
        calls += len(state.logprobs) - before

    monkeypatch.setattr(Engine, "_score_new", counted)
    first, *others = make_requests(4)
    engine = make_engine(target)
    got = engine.generate([*asking([first]), *others])
    assert [g.logprobs is not None for g in got] == [True, False, False, False]
    assert calls == len(got[0].output_ids)
