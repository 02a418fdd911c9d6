"""Who runs next: admission, chunked prefill, page reservation, preemption by recompute.

Decode rows come first; prompts fill what is left of ``max_batch_tokens``. A batch without prompt
rows is *decode-only*, and only such batches speculate. Every decoding request owns slots for its
K+1 rows before the step starts; when pages run out, the youngest request (the last to arrive) is
recomputed later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.kv_cache import OutOfPagesError, SlotTable
from runtime.request import Phase, RequestState
from runtime.spec.choose import LengthChooser, Load


@dataclass(frozen=True)
class Work:
    """``num_rows`` rows of one request from position ``start`` on (speculation adds K).

    ``samples``: after these rows every known token has been processed, so the next one is drawn.
    """

    state: RequestState
    start: int
    num_rows: int
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    """One step. ``num_draft_tokens`` is K clipped so that no row passes ``max_model_len``."""

    works: tuple[Work, ...]
    is_decode_only: bool
    num_draft_tokens: int


def decode_load(works: Sequence[Work]) -> Load:
    """What a decode-only step over ``works`` runs over."""
    return Load(len(works), sum(work.start + 1 for work in works))


class Scheduler:
    """Owns the waiting queue, the running list and the slot table's rows."""

    def __init__(
        self,
        table: SlotTable,
        *,
        max_running: int,
        max_batch_tokens: int,
        max_model_len: int,
        num_draft_tokens: int,
        draft_ahead: int = 0,
        num_extra_slots: int = 0,
        chooser: LengthChooser | None = None,
    ) -> None:
        self.table = table
        self.max_running = max_running
        self.max_batch_tokens = max_batch_tokens
        self.max_model_len = max_model_len
        self.num_draft_tokens = num_draft_tokens
        self.draft_ahead = draft_ahead  # slots by which the draft's cache is longer
        self.num_extra_slots = num_extra_slots  # that a step writes behind its K + 1 positions
        self.max_rows_per_request = 0  # 0: a prompt may fill a batch
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.num_preemptions = 0
        self.chooser = chooser  # none: always as many drafts as fit

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, state: RequestState) -> None:
        self.waiting.append(state)

    def remove(self, state: RequestState) -> None:
        """Give everything of a finished or aborted request back."""
        if state.row >= 0:
            self.table.release_row(state.row)
            self.running.remove(state)
            state.row = -1
        else:
            self.waiting.remove(state)
        state.phase = Phase.FINISHED

    def schedule(self) -> StepPlan:
        """The next step. Call only while :attr:`has_work`."""
        self._reserve_decoding()
        self._admit()
        budget = self.max_batch_tokens
        works = []
        decoding = [state for state in self.running if state.phase is Phase.DECODE]
        for state in decoding:
            works.append(Work(state, state.committed, 1, samples=True))
        budget -= len(decoding)
        for state in self.running:
            if state.phase is Phase.PREFILL and budget > 0:
                count = min(budget, len(state.tokens) - state.committed)
                if self.max_rows_per_request:
                    count = min(count, self.max_rows_per_request)
                is_last = state.committed + count == len(state.tokens)
                samples = is_last and not state.encode_only
                works.append(Work(state, state.committed, count, samples))
                budget -= count
        assert works, "nothing can run although requests are waiting"
        is_decode_only = len(works) == len(decoding)
        return StepPlan(
            works=tuple(works),
            is_decode_only=is_decode_only,
            num_draft_tokens=self._draft_length(works) if is_decode_only else 0,
        )

    def learn(self, plan: StepPlan, *, accepted: Sequence[int], seconds: float) -> None:
        """Tell the chooser of draft lengths, where there is one, what this step took and gave."""
        if self.chooser is not None and plan.is_decode_only:
            load = decode_load(plan.works)
            self.chooser.observe(plan.num_draft_tokens, load, seconds=seconds, accepted=accepted)

    def look_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The plain decode step after ``plan``, whose tokens the host has not seen yet.

        ``None`` where the next step is not certain to have the same requests: somebody waits, a
        length limit is reached, or pages run out. (A request that turns out to have ended is
        dropped later.)
        """
        if self.waiting or not plan.is_decode_only:
            return None
        works = []
        for work in plan.works:
            state, start = work.state, work.start + 1
            if state.phase is Phase.FINISHED:
                continue
            num_tokens = start + 1  # with the token in flight
            if (
                num_tokens - state.num_prompt >= state.request.sampling.max_tokens
                or num_tokens >= self.max_model_len
            ):
                return None
            try:
                self.table.reserve(state.row, num_tokens)
            except OutOfPagesError:
                return None
            works.append(Work(state, start, 1, samples=True))
        if not works or self._draft_length(works):
            return None
        return StepPlan(tuple(works), is_decode_only=True, num_draft_tokens=0)

    def _clip(self, committed: int) -> int:
        """K so that every row, ``committed + K + draft_ahead`` at most, is in the table."""
        longest = self.max_model_len - 1 - self.draft_ahead - committed
        return max(0, min(self.num_draft_tokens, longest))

    def _rows_reserved(self, state: RequestState) -> int:
        """Length that must have slots: all known tokens and, once decoding, K rows more (one more
        for a draft that runs ahead; behind them what else the schedule writes).
        """
        if state.encode_only:
            return len(state.tokens)
        num_rows = len(state.tokens) + self.num_draft_tokens + self.draft_ahead
        return min(num_rows, self.max_model_len) + self.num_extra_slots

    def _reserve_decoding(self) -> None:
        for state in list(self.running):
            while state.row >= 0:
                try:
                    self.table.reserve(state.row, self._rows_reserved(state))
                    break
                except OutOfPagesError:
                    self._preempt(max(self.running, key=lambda other: other.arrival))

    def _preempt(self, victim: RequestState) -> None:
        assert len(self.running) > 1 or victim.phase is not Phase.DECODE, (
            "one request alone must always fit"
        )
        self.table.release_row(victim.row)
        self.running.remove(victim)
        victim.reset_for_recompute()
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _admit(self) -> None:
        """Admit in order of arrival.

        One spare page per running request keeps fresh admissions from being preempted on the very
        next step.
        """
        allocator = self.table.allocator
        while self.waiting and len(self.running) < self.max_running:
            state = self.waiting[0]
            needed = -(-self._rows_reserved(state) // self.table.page_size)
            spare = len(self.running)
            if needed + spare > allocator.num_free:
                break
            self.waiting.popleft()
            state.row = self.table.acquire_row()
            self.table.reserve(state.row, self._rows_reserved(state))
            state.phase = Phase.PREFILL
            self.running.append(state)

    def _draft_length(self, works: Sequence[Work]) -> int:
        """K of a decode-only step: what was chosen, as far as the longest request has room."""
        k = self._clip(max(work.start for work in works))
        if self.chooser is None:
            return k
        return min(k, self.chooser.choose(decode_load(works)))
