"""The engine: a step loop over scheduler and schedule, and the four things people ask of it.

How a token is made: `scheduler.schedule()` picks rows -> `schedule.enqueue()` runs target (and
draft) without waiting -> `schedule.collect()` waits for the ids -> the engine commits them, checks
EOS, stop strings and lengths, and frees what is finished. Host lengths are exact between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from runtime.batch import upload_ids
from runtime.config import EngineConfig
from runtime.cuda_graph import GraphRecorder
from runtime.kv_cache import SlotTable
from runtime.models.base import DraftModel, Model
from runtime.request import (
    FinishReason,
    Generation,
    HiddenRows,
    Phase,
    Request,
    RequestState,
    SamplingParams,
    SpecStep,
    TokenEvent,
    check_request,
)
from runtime.scheduler import Scheduler, StepPlan
from runtime.spec.base import PendingStep, WorkResult
from runtime.spec.choose import make_chooser
from runtime.spec.draft_target import OnLeader
from runtime.spec.mtp import MtpSchedule
from runtime.spec.runners import RunnerFactory
from runtime.spec.schedules import make_schedule
from runtime.stopping import Detokenizer, append_tokens, visible_text
from runtime.team import team_for
from runtime.transfer import HostTransfer, transfer_for

HiddenSink = Callable[[HiddenRows], None]
_SCORE_ROWS = 256  # rows whose full logits exist at once


class Engine:
    """Continuous batching over one target and, with ``draft``, speculation: MTP with a draft head,
    draft-target with a model of its own. A head that reads residual streams of the target gets
    them from the target's own forwards, and whoever asks for hidden states gets them too.

    Weights are shared, never copied: several engines may use the same models one after another.
    A draft model is given on the leader of ``target.group``, ``OnLeader()`` on its other ranks.
    Each engine owns its K/V pools. ``tokenizer`` is needed only for stop strings and
    ``Generation.text``.
    """

    def __init__(
        self,
        target: Model,
        *,
        config: EngineConfig,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Detokenizer | None = None,
        draft: Model | OnLeader | None = None,
        transfer: HostTransfer | None = None,
        recorder: GraphRecorder | None = None,
    ) -> None:
        """Raises ``ValueError`` for K without a draft, a draft of another vocabulary, or lengths
        beyond a model's sliding window.
        """
        if config.num_draft_tokens and draft is None:
            raise ValueError(
                f"runtime.num_draft_tokens={config.num_draft_tokens}: needs a draft head or a "
                "draft model; give one or set it to 0"
            )
        _check_context(config, target=target, draft=draft)
        if isinstance(draft, DraftModel) and draft.layer_ids:
            target = target.tapped(draft.layer_ids)
        self.config = config
        self.target = target
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tokenizer = tokenizer
        self.table = SlotTable(
            num_rows=config.max_running,
            max_len=config.max_model_len + config.num_extra_slots,
            page_size=config.page_size,
            num_pages=config.num_pages,
        )
        self.transfer = transfer or transfer_for(target.device)
        self.team = team_for(target, self.table, config)
        self.schedule = make_schedule(
            config,
            target,
            draft,
            make_runner=RunnerFactory(config, self.table, recorder).make,
            transfer=self.transfer,
            announce=self.team.tell_step,
        )
        self.scheduler = Scheduler(
            self.table,
            max_running=config.max_running,
            max_batch_tokens=config.max_batch_tokens,
            max_model_len=config.max_model_len,
            num_draft_tokens=config.num_draft_tokens,
            num_extra_slots=config.num_extra_slots,
            draft_ahead=self.schedule.draft_ahead,
            chooser=make_chooser(config, target.device),
        )
        self._states: dict[str, RequestState] = {}
        self._num_added = 0
        self._in_flight: PendingStep | None = None  # plain decoding runs one step ahead of the host

    # -- requests ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def add(
        self,
        request: Request,
        *,
        encode_only: bool = False,
        captures_hidden: bool = False,
        captures_draft: bool = False,
    ) -> RequestState:
        """Queue a request; may be called between any two steps.

        Raises ``ValueError`` for an empty prompt, a token id outside the vocabulary, a prompt that
        does not fit, stop strings without a tokenizer, T > 0 under greedy verification or a living
        id.
        """
        (state,) = self._add_all(
            [request],
            encode_only=encode_only,
            captures_hidden=captures_hidden,
            captures_draft=captures_draft,
        )
        return state

    def _add_all(
        self,
        requests: Sequence[Request],
        *,
        encode_only: bool = False,
        captures_hidden: bool = False,
        captures_draft: bool = False,
    ) -> list[RequestState]:
        """Queue all requests or, when one of them is refused, none."""
        names: set[str] = set()
        for request in requests:
            check_request(
                request,
                config=self.config,
                vocab_size=self.target.vocab_size,
                has_tokenizer=self.tokenizer is not None,
                encode_only=encode_only,
            )
            if request.request_id in self._states:
                raise ValueError(
                    f"request_id={request.request_id!r}: a request with this id is living"
                )
            if request.request_id in names:
                raise ValueError(f"request_id={request.request_id!r}: given twice in one call")
            names.add(request.request_id)
        states = []
        for request in requests:
            state = RequestState(
                request=request,
                tokens=list(request.prompt_ids),
                arrival=self._num_added,
                encode_only=encode_only,
                captures_hidden=captures_hidden,
                captures_draft=captures_draft,
            )
            self._num_added += 1
            self._states[request.request_id] = state
            self.scheduler.add(state)
            states.append(state)
        return states

    def abort(self, request_id: str) -> None:
        """Stop a living request and free its pages. Unknown ids (already finished) are ignored."""
        state = self._states.get(request_id)
        if state is not None:
            self._finish(state, "abort")

    def generate(
        self,
        requests: Sequence[Request],
        *,
        hidden_sink: HiddenSink | None = None,
        on_finish: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Decode all requests; results in request order.

        ``hidden_sink`` gets the target states of each finished request (all tokens but the last);
        ``on_finish`` each generation as soon as it is done.
        """
        states = self._add_all(requests, captures_hidden=hidden_sink is not None)
        results: dict[str, Generation] = {}
        for state in self._run(states):
            generation = self._generation(state)
            results[generation.request_id] = generation
            if hidden_sink is not None:
                hidden_sink(self.take_hidden(state, len(state.tokens) - 1))
            if on_finish is not None:
                on_finish(generation)
        return [results[request.request_id] for request in requests]

    def stream(self, requests: Sequence[Request]) -> Generator[TokenEvent, None, None]:
        """Decode all requests and yield the tokens of every step as they come.

        Closing the iterator aborts what is left.
        """
        states = {state.request.request_id: state for state in self._add_all(requests)}
        try:
            while any(state.phase is not Phase.FINISHED for state in states.values()):
                for event in self.step():
                    if event.request_id in states:
                        yield event
        finally:
            for state in states.values():
                self._finish(state, "abort")

    def forward_hidden(
        self, sequences: Sequence[Sequence[int]], *, max_batch_tokens: int = 0
    ) -> Iterator[HiddenRows]:
        """Post-final-norm states of every token of every sequence, as they get done.

        ``key`` is the sequence's index. ``max_batch_tokens`` (0: the engine's) bounds the rows of
        one forward.
        """
        return self._encode(
            sequences, max_batch_tokens or self.config.max_batch_tokens, draft=False
        )

    def forward_draft(self, sequences: Sequence[Sequence[int]]) -> Iterator[HiddenRows]:
        """As :meth:`forward_hidden`, with the head's own (first-step) states beside them."""
        return self._encode(sequences, self.config.max_batch_tokens, draft=True)

    def score(
        self, sequences: Sequence[Sequence[int]], *, decode_path: bool = False
    ) -> list[torch.Tensor]:
        """``log p(t_{i+1} | t_0..t_i)``, float32 ``[T-1]`` per sequence.

        ``decode_path`` feeds one row per sequence and step through the K/V cache, as decoding does.
        """
        budget = self.config.max_running if decode_path else self.config.max_batch_tokens
        scores: dict[int, torch.Tensor] = {}
        for rows in self._encode(sequences, budget, draft=False, one_row=decode_path):
            ids = torch.tensor(rows.token_ids, device=self.target.device)
            parts = []
            for start in range(0, len(ids) - 1, _SCORE_ROWS):
                stop = min(start + _SCORE_ROWS, len(ids) - 1)
                logits_MV = self.logits(rows.hidden_TD[start:stop]).float()
                next_ids = ids[start + 1 : stop + 1, None]
                parts.append(logits_MV.log_softmax(-1).gather(1, next_ids)[:, 0])
            scores[int(rows.key)] = torch.cat(parts) if parts else torch.empty(0)
        return [scores[index] for index in range(len(sequences))]

    @torch.inference_mode()
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """The target's logits ``[M, V]`` of rows of its states, on every number of ranks."""
        return self.team.logits(hidden_MD)

    # -- several ranks ----------------------------------------------------------------------------

    @torch.inference_mode()
    def follow(self) -> None:
        """Where the target is spread over ranks, all but the first call this: it computes this
        rank's part of whatever the first one is asked, until that calls :meth:`dismiss`.

        Every rank builds its engine with the same arguments.
        """
        self.team.follow(self.schedule)

    def dismiss(self) -> None:
        """Let the other ranks return from :meth:`follow`; does nothing on one process."""
        self.team.dismiss()

    # -- the step loop ----------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """One step over whoever is scheduled. Call only while :attr:`has_work`.

        Where the device works by itself, plain decoding enqueues the next step before it waits for
        the ids of this one (speculation hides its wait behind the draft instead); then the events
        come one call later.
        """
        started = time.perf_counter()
        current, self._in_flight = self._in_flight, None
        if current is not None:
            following = self.scheduler.look_ahead(current.plan)
            if following is not None:
                self._in_flight = self._enqueue(following)
        else:
            current = self._enqueue(self.scheduler.schedule())
            if self.transfer.is_async and self.schedule.may_look_ahead and current.is_plain_decode:
                self._in_flight = current
                return []
        results = self.schedule.collect(current)
        self.scheduler.learn(
            current.plan,
            accepted=[result.num_accepted for result in results],
            seconds=time.perf_counter() - started,
        )
        events = self._commit(current, results)
        if self._in_flight is not None and not self.scheduler.running:
            self._in_flight = None  # everybody has ended: nobody wants these tokens
        if self.config.check_integrity:
            self.table.check()
        return events

    def _enqueue(self, plan: StepPlan) -> PendingStep:
        if not self.schedule.announces_itself:
            self.team.tell_step(plan)
        return self.schedule.enqueue(plan)

    def _run(self, states: Sequence[RequestState]) -> Iterator[RequestState]:
        """Step until all of ``states`` are finished; yields each as it finishes."""
        living = list(states)
        try:
            while living:
                finished = [state for state in living if state.phase is Phase.FINISHED]
                if not finished:
                    self.step()
                    continue
                living = [state for state in living if state.phase is not Phase.FINISHED]
                yield from finished
        finally:
            for state in living:
                self._finish(state, "abort")

    def _commit(self, pending: PendingStep, results: Sequence[WorkResult]) -> list[TokenEvent]:
        events = []
        start = 0
        for result, num_rows in zip(results, pending.rows_per_work, strict=True):
            work, state = result.work, result.work.state
            if state.phase is Phase.FINISHED:  # ended or aborted while this step was in flight
                start += num_rows
                continue
            self._capture(state, pending, start, result.num_committed)
            self._score_new(state, pending, start, result)
            start += num_rows
            if pending.is_speculative:
                state.steps.append(
                    SpecStep(
                        result.draft_ids,
                        result.num_accepted,
                        len(state.output_ids),
                        result.tree_parents,
                        pending.plan.num_draft_tokens if result.tree_parents else 0,
                    )
                )
            state.committed = work.start + result.num_committed
            if state.encode_only and state.committed == len(state.tokens):
                self._finish(state, "length")
            if not work.samples:
                continue
            state.phase = Phase.DECODE
            num_new = append_tokens(
                state,
                result.new_ids,
                eos_token_ids=self.eos_token_ids,
                tokenizer=self.tokenizer,
                max_model_len=self.config.max_model_len,
            )
            if state.finish_reason is not None:
                self._finish(state, state.finish_reason)
            events.append(
                TokenEvent(
                    state.request.request_id,
                    result.new_ids[:num_new],
                    min(result.num_accepted, num_new),
                    state.finish_reason,
                    state.steps[-1] if pending.is_speculative else None,
                )
            )
        return events

    def _capture(self, state: RequestState, pending: PendingStep, start: int, count: int) -> None:
        if state.captures_hidden:
            state.hidden.append(pending.hidden_ND[start : start + count].clone())
        if state.captures_draft:
            assert pending.draft_hidden_ND is not None
            state.draft_hidden.append(pending.draft_hidden_ND[start : start + count].clone())

    def _score_new(
        self, state: RequestState, pending: PendingStep, start: int, result: WorkResult
    ) -> None:
        """Keep the new tokens' log-probabilities, on the device: nobody waits for them here.

        The last committed rows are those that the new tokens were drawn from.
        """
        if not (state.request.sampling.logprobs and result.new_ids):
            return
        end = start + result.num_committed
        logits_MV = self.logits(pending.hidden_ND[end - len(result.new_ids) : end])
        ids_M1 = upload_ids(result.new_ids, self.target.device)[:, None]
        state.logprobs.append(logits_MV.float().log_softmax(-1).gather(1, ids_M1)[:, 0])

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        if state.phase is Phase.FINISHED:
            return
        state.finish_reason = reason
        self.scheduler.remove(state)
        del self._states[state.request.request_id]

    # -- helpers ----------------------------------------------------------------------------------

    def _encode(
        self,
        sequences: Sequence[Sequence[int]],
        max_batch_tokens: int,
        *,
        draft: bool,
        one_row: bool = False,
    ) -> Iterator[HiddenRows]:
        if self.has_work:
            raise ValueError("the engine is decoding: encode when no request is living")
        if draft and not isinstance(self.schedule, MtpSchedule):
            raise ValueError("forward_draft needs an engine with a draft head")
        states = self._add_all(
            [
                Request(str(index), tuple(ids), SamplingParams(max_tokens=1))
                for index, ids in enumerate(sequences)
            ],
            encode_only=True,
            captures_hidden=True,
            captures_draft=draft,
        )
        scheduler = self.scheduler
        saved = scheduler.max_batch_tokens, scheduler.max_rows_per_request
        scheduler.max_batch_tokens = max_batch_tokens
        scheduler.max_rows_per_request = 1 if one_row else 0
        try:
            for state in self._run(states):
                yield self.take_hidden(state, len(state.tokens))
        finally:
            scheduler.max_batch_tokens, scheduler.max_rows_per_request = saved

    def take_hidden(self, state: RequestState, length: int) -> HiddenRows:
        """The first ``length`` captured rows of a request; its state keeps none."""
        return state.take_hidden(length, width=self.target.width)

    def _generation(self, state: RequestState) -> Generation:
        assert state.finish_reason is not None
        return Generation(
            request_id=state.request.request_id,
            prompt_ids=state.request.prompt_ids,
            output_ids=tuple(state.output_ids),
            finish_reason=state.finish_reason,
            steps=tuple(state.steps),
            text=visible_text(self.tokenizer, state.output_ids, state.request.sampling.stop),
            logprobs=state.take_logprobs(),
        )


def _check_context(config: EngineConfig, *, target: Model, draft: Model | OnLeader | None) -> None:
    for role, model in (("target", target), ("draft", draft)):
        window = model.max_context if isinstance(model, Model) else None
        if window is not None and config.max_model_len > window:
            raise ValueError(
                f"runtime.max_model_len={config.max_model_len}: the {role} has "
                f"sliding_window={window}, and attention is to all tokens here, which is the same "
                f"up to that length only; use at most {window}, and prompts and samples that fit"
            )
