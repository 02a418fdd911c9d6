"""Drive an engine through random traffic and check what has to hold whatever happens.

Every request ends in exactly one way; a finished one has the tokens, the text's end and the events
of plain decoding alone; one that gave up has a beginning of them; no page and no row is lost, and
nothing is kept of a request that has ended.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from runtime.engine import Engine
from runtime.request import Generation, RequestState
from runtime.spec.base import PendingStep, WorkResult
from tests.load.schedules import HookedTransfer
from tests.load.traffic import Visitor

MAX_LOGPROB_GAP = 1e-4


@dataclass
class Outcome:
    """What one run of traffic came to. ``ended`` counts finish reasons."""

    steps: int = 0
    most_living: int = 0
    preemptions: int = 0
    accepted: int = 0
    aborted_in_a_step: int = 0
    aborted_in_speculation: int = 0
    ended: Counter[str] = field(default_factory=Counter)


def run_traffic(
    engine: Engine, visitors: Sequence[Visitor], wanted: Mapping[str, Generation]
) -> Outcome:
    """Serve ``visitors`` to the last; ``wanted`` is plain decoding's answer by request id.

    Raises ``AssertionError`` for the first thing that is wrong.
    """
    transfer = engine.transfer
    assert isinstance(transfer, HookedTransfer), "the engine cannot be interrupted in a step"
    crowd = Crowd(engine, visitors)
    transfer.in_step = crowd.leave_in_the_step
    collect = engine.schedule.collect

    def collect_watched(pending: PendingStep) -> list[WorkResult]:
        crowd.is_speculative = pending.is_speculative
        return collect(pending)

    engine.schedule.collect = collect_watched  # type: ignore[method-assign]
    before = engine.scheduler.num_preemptions
    while crowd.is_expected or engine.has_work:
        crowd.arrive()
        crowd.leave_between_steps()
        if engine.has_work:
            for event in engine.step():
                crowd.streamed[event.request_id].extend(event.token_ids)
                if event.finish_reason is not None:
                    crowd.goodbyes[event.request_id].append(event.finish_reason)
        crowd.step += 1
    transfer.in_step = lambda: None
    engine.schedule.collect = collect  # type: ignore[method-assign]
    check_nothing_is_left(engine)
    for visitor in visitors:
        check_visitor(crowd, visitor, wanted[visitor.request.request_id])
    states = crowd.states.values()
    return Outcome(
        steps=crowd.step,
        most_living=crowd.most_living,
        preemptions=engine.scheduler.num_preemptions - before,
        accepted=sum(step.num_accepted for state in states for step in state.steps),
        aborted_in_a_step=crowd.num_left_in_a_step,
        aborted_in_speculation=crowd.num_left_in_speculation,
        ended=Counter(str(state.finish_reason) for state in states),
    )


class Crowd:
    """Who has come, what they were told, and who leaves next."""

    def __init__(self, engine: Engine, visitors: Sequence[Visitor]) -> None:
        self.engine = engine
        self.step = 0
        self.most_living = 0
        self.num_left_in_a_step = 0
        self.num_left_in_speculation = 0
        self.is_speculative = False  # the step whose ids the host waits for
        self.states: dict[str, RequestState] = {}
        self.streamed: dict[str, list[int]] = {v.request.request_id: [] for v in visitors}
        self.goodbyes: dict[str, list[str]] = {v.request.request_id: [] for v in visitors}
        self._coming = list(reversed(visitors))
        self._here: list[Visitor] = []

    @property
    def is_expected(self) -> bool:
        return bool(self._coming)

    def arrive(self) -> None:
        while self._coming and self._coming[-1].arrives <= self.step:
            visitor = self._coming.pop()
            self.states[visitor.request.request_id] = self.engine.add(visitor.request)
            self._here.append(visitor)
        self._here = [v for v in self._here if self._is_living(v)]
        self.most_living = max(self.most_living, len(self._here))

    def leave_between_steps(self) -> None:
        self._leave(
            [
                visitor
                for visitor in self._here
                if visitor.gives_up == "between_steps"
                and self.step - visitor.arrives >= visitor.patience
            ]
        )

    def leave_in_the_step(self) -> None:
        count = self._leave(
            [
                visitor
                for visitor in self._here
                if visitor.gives_up == "in_a_step"
                and self._state(visitor).row >= 0
                and len(self._state(visitor).output_ids) >= visitor.patience
            ]
        )
        self.num_left_in_a_step += count
        self.num_left_in_speculation += count if self.is_speculative else 0

    def _leave(self, visitors: Sequence[Visitor]) -> int:
        leaving = [visitor for visitor in visitors if self._is_living(visitor)]
        for visitor in leaving:
            self.engine.abort(visitor.request.request_id)
            self.goodbyes[visitor.request.request_id].append("abort")
        return len(leaving)

    def _state(self, visitor: Visitor) -> RequestState:
        return self.states[visitor.request.request_id]

    def _is_living(self, visitor: Visitor) -> bool:
        return self._state(visitor).finish_reason is None


def check_visitor(crowd: Crowd, visitor: Visitor, wanted: Generation) -> None:
    """One request's end, its tokens and its stream."""
    name = visitor.request.request_id
    state = crowd.states[name]
    assert crowd.goodbyes[name] == [state.finish_reason], f"{name} ended as {crowd.goodbyes[name]}"
    output = tuple(state.output_ids)
    assert tuple(crowd.streamed[name]) == output, f"{name}: the stream is not the answer"
    assert output == wanted.output_ids[: len(output)], f"{name}: not plain decoding's tokens"
    check_scores(name, state, wanted)
    if state.finish_reason == "abort":
        assert visitor.gives_up != "never", f"{name} was aborted by nobody"
        return
    assert len(output) == len(wanted.output_ids), f"{name}: not all of plain decoding's tokens"
    assert state.finish_reason == wanted.finish_reason, f"{name}: ended otherwise"


def check_scores(name: str, state: RequestState, wanted: Generation) -> None:
    """Log-probabilities, where they were asked for: one per token, and plain decoding's."""
    scores = state.take_logprobs()
    assert (scores is None) == (wanted.logprobs is None), f"{name}: log-probabilities"
    if scores is not None and wanted.logprobs is not None:
        assert len(scores) == len(state.output_ids), f"{name}: {len(scores)} log-probabilities"
        gaps = [abs(a - b) for a, b in zip(scores, wanted.logprobs, strict=False)]
        assert max(gaps, default=0.0) < MAX_LOGPROB_GAP, f"{name}: log-probabilities differ"


def check_nothing_is_left(engine: Engine) -> None:
    """All pages and rows are free, and no request is remembered."""
    engine.table.check()
    allocator = engine.table.allocator
    assert allocator.num_free == allocator.num_pages, "pages are lost"
    assert not engine.scheduler.running, "somebody is still running"
    assert not engine.scheduler.waiting, "somebody is still waiting"
    assert not engine._states, "requests that have ended are remembered"


def count_living_tensors() -> int:
    """Tensors that somebody still holds."""
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
