"""Two hundred requests at once through every schedule, with aborts and too few pages.

`python -m tests.load --seconds 3600` goes on for as long as it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.models.loader import Target
from runtime.request import FinishReason, Generation, RequestState
from runtime.sampling import SamplingTensors
from runtime.scheduler import Scheduler, Work
from runtime.spec.base import PendingStep, PlainSchedule, WorkResult
from tests.load.driver import count_living_tensors, run_traffic
from tests.load.rounds import plain_answers
from tests.load.schedules import WAYS
from tests.load.traffic import Visitor, make_traffic
from tests.unit.runtime.engine_fixtures import tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def traffic(target: Target) -> tuple[list[Visitor], Mapping[str, Generation]]:
    visitors = make_traffic(200, seed=1)
    return visitors, plain_answers(target, visitors)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_two_hundred_requests(
    target: Target,
    traffic: tuple[list[Visitor], Mapping[str, Generation]],
    way: str,
    page_size: int,
) -> None:
    visitors, wanted = traffic
    engine = WAYS[way].engine(target, page_size=page_size)
    outcome = run_traffic(engine, visitors, wanted)
    speculates = bool(engine.config.num_draft_tokens)
    assert outcome.most_living >= 100
    assert outcome.preemptions >= 5, "pages hardly ever ran out"
    assert outcome.aborted_in_a_step > 10
    assert bool(outcome.aborted_in_speculation) == bool(outcome.accepted) == speculates
    assert set(outcome.ended) == {"stop", "length", "abort"}
    assert sum(outcome.ended.values()) == len(visitors)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_kept_of_what_has_ended(target: Target, way: str) -> None:
    engine = WAYS[way].engine(target, page_size=16)
    counts = []
    for seed in range(3):
        visitors = make_traffic(20, seed=100 + seed)
        run_traffic(engine, visitors, plain_answers(target, visitors))
        del visitors
        counts.append(count_living_tensors())
    assert counts[-1] <= counts[0], f"living tensors after each round: {counts}"


# -- mutants ---------------------------------------------------------------------------------------


def states_remembered(patch: pytest.MonkeyPatch) -> None:
    finish = Engine._finish

    def keep(self: Engine, state: RequestState, reason: FinishReason) -> None:
        finish(self, state, reason)
        self._states[state.request.request_id] = state

    patch.setattr(Engine, "_finish", keep)


def pages_of_the_aborted_lost(patch: pytest.MonkeyPatch) -> None:
    remove = Scheduler.remove

    def lose(self: Scheduler, state: RequestState) -> None:
        if state.finish_reason == "abort" and state.row >= 0:
            self.table._pages[state.row].pop()
        remove(self, state)

    patch.setattr(Scheduler, "remove", lose)


def committed_kept_on_preemption(patch: pytest.MonkeyPatch) -> None:
    """As if the pages of a preempted request were still its own."""
    reset = RequestState.reset_for_recompute

    def keep(self: RequestState) -> None:
        committed = self.committed
        reset(self)
        self.committed = max(committed - 1, 0)

    patch.setattr(RequestState, "reset_for_recompute", keep)


def sampling_of_the_batch_before(patch: pytest.MonkeyPatch) -> None:
    sampling = PlainSchedule.sampling

    def stale(self: PlainSchedule, works: Sequence[Work]) -> SamplingTensors:
        if self._sampling is not None and len(self._sampling_key) == len(works):
            return self._sampling
        return sampling(self, works)

    patch.setattr(PlainSchedule, "sampling", stale)


def aborted_requests_committed(patch: pytest.MonkeyPatch) -> None:
    """Who has left in the middle of the step still gets its tokens."""

    def commit(self: Engine, pending: PendingStep, results: Sequence[WorkResult]) -> Any:
        for result in results:
            if result.work.state.finish_reason == "abort":
                result.work.state.tokens.extend(result.new_ids)
        return original(self, pending, results)

    original = Engine._commit
    patch.setattr(Engine, "_commit", commit)


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (states_remembered, "remembered"),
        (pages_of_the_aborted_lost, "page leak"),
        (committed_kept_on_preemption, "not plain decoding"),
        (sampling_of_the_batch_before, "not plain decoding"),
        (aborted_requests_committed, "the stream is not the answer"),
    ],
)
def test_mutants_are_seen(
    target: Target,
    traffic: tuple[list[Visitor], Mapping[str, Generation]],
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
    message: str,
) -> None:
    visitors, wanted = traffic
    mutate(monkeypatch)
    engine = WAYS["draft_target_k3"].engine(target, page_size=1)
    with pytest.raises(AssertionError, match=message):
        run_traffic(engine, visitors, wanted)
