"""Who answers: the interface between regeneration and whatever runs the target.

Regeneration keeps as many questions in flight as an engine has room for and takes answers as they
come, in any order (:mod:`data_prep.regenerate`). Two kinds of engine implement that: the runtime in
this process (:class:`RuntimeAnswers`) and servers behind HTTP (:mod:`data_prep.endpoints`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from data_prep.conversation import Message
from data_prep.normalise import Split
from data_prep.token_set import TokenRow
from runtime.request import (
    FinishReason,
    HiddenRows,
    Phase,
    Request,
    RequestState,
    SamplingParams,
)

if TYPE_CHECKING:
    from runtime.engine import Engine

HiddenSink = Callable[[HiddenRows, TokenRow, Split], None]
"""Receives the hidden states of one kept row: one per token of the row but the last.

It must be idempotent by the row's ``sample_id``: after a crash between the sink and the journal an
answer is decoded, and handed over, again. It need not be durable when it returns: an answer that is
in the journal is never handed over again, so what a crash costs the sink has to be computed from
the token set later (`mtp precompute`). It may see a row that later falls to the token budget.
"""


@dataclass(frozen=True)
class Question:
    """One prompt: as the ids a server feeds its model, and as the messages they were made from.

    ``key`` names the answer in the journal. ``tools`` holds the JSON text of each definition.
    """

    key: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    messages: tuple[Message, ...] = ()
    tools: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What came back for the question ``key``.

    ``output_ids`` end with the token that ended the turn when ``finish_reason`` is ``stop``. A
    ``fault`` is a reject reason: the answer cannot be used (and ``output_ids`` is empty). With
    ``finish_reason="abort"`` nothing is remembered, and another run asks again.
    ``is_retokenised``: the engine gave text, which was tokenised again and passed every check.
    """

    key: str
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    fault: str = ""
    detail: str = ""
    is_retokenised: bool = False
    hidden: HiddenRows | None = field(default=None, repr=False)


class AnswerEngine(Protocol):
    """Answers questions, many at a time, in any order."""

    @property
    def capacity(self) -> int:
        """Questions worth having in flight; may shrink while the engine works."""
        ...

    @property
    def identity(self) -> Mapping[str, str]:
        """What answers depend on beyond the target's files; enters the fingerprint."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What is not exact or not reproducible about these answers, for the user."""
        ...

    def submit(self, question: Question, *, captures_hidden: bool = False) -> None:
        """Start on a question. Never waits. ``captures_hidden``: the reply carries the states."""
        ...

    def collect(self) -> list[Reply]:
        """Wait until at least one question is answered. Call only while some are in flight.

        Raises ``ValueError`` when no answer can be expected any more; every answer that had arrived
        was returned before.
        """
        ...

    def cancel(self) -> None:
        """Give up whatever is in flight."""
        ...


@dataclass(frozen=True)
class Answering:
    """An engine that is ready, and where the hidden states go if it captures them."""

    engine: AnswerEngine
    hidden_sink: HiddenSink | None = None


OpenAnswering = Callable[[], AbstractContextManager[Answering]]
"""Opens the engine only once it is known that there is something to answer."""


class RuntimeAnswers:
    """The runtime's engine, in this process.

    The engine must be idle and is this object's alone until :meth:`cancel`.
    """

    identity: Mapping[str, str] = {}
    notes: Sequence[str] = ()

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._living: list[RequestState] = []
        # A queue behind the running batch: who finishes is replaced in the same step.
        self.capacity = 2 * engine.config.max_running

    def submit(self, question: Question, *, captures_hidden: bool = False) -> None:
        request = Request(question.key, question.prompt_ids, question.sampling)
        self._living.append(self._engine.add(request, captures_hidden=captures_hidden))

    def collect(self) -> list[Reply]:
        assert self._living, "nothing is in flight"
        while not (finished := [s for s in self._living if s.phase is Phase.FINISHED]):
            self._engine.step()
        self._living = [state for state in self._living if state.phase is not Phase.FINISHED]
        return [self._reply(state) for state in finished]

    def cancel(self) -> None:
        for state in self._living:
            self._engine.abort(state.request.request_id)
        self._living.clear()

    def _reply(self, state: RequestState) -> Reply:
        assert state.finish_reason is not None
        hidden = None
        if state.captures_hidden:
            hidden = self._engine.take_hidden(state, len(state.tokens) - 1)
        return Reply(
            state.request.request_id, tuple(state.output_ids), state.finish_reason, hidden=hidden
        )
