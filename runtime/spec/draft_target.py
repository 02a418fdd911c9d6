"""Draft-target speculation: a whole small model of the same vocabulary drafts for the target.

Let L be the committed length: target K/V of tokens ``0..L-1`` are final and ``t_L`` is sampled but
not processed. Draft ids are not shifted: draft row i takes ``t_i`` and lives at slot i. The draft
has processed ``t_L`` as well, so its cache runs one slot *ahead* of the target's; that row left
the relay state, the logits for ``t_{L+1}``.

    propose   d1 = draw(carried logits); draft row L+1: d1 -> d2; row L+2: d2 -> d3 ...
              (the batch of the target is put together while the first of these rows runs)
    target    rows L..L+K   over [t_L, d1 .. dK]
    verify    e = 1..K+1 tokens emitted, the last is the target's own; L' = L + e
    wait      for the ids: the only wait
    extend    draft rows L'-1, L' over [t_L'-1, t_L'], at exact host lengths; the last row is the
              next relay state. The host schedules the next batch while this runs

``t_L'`` is new to the draft. ``t_L'-1`` is new only when all K drafts were accepted, for nobody has
run ``dK``; otherwise its row is computed again. So always two rows, and K+2 slots from L on.

A small model gains nothing from being spread over ranks: it lives on the leader of the target's
group alone. The others have neither its weights nor its K/V and never wait: they are told what is
scheduled, get the drafted ids and, where the leader has verified, each request's last id.

Shape legend: B requests, K drafts, N rows, M sampled rows, D width and V vocabulary of the draft, R
table rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from runtime.batch import BatchMode, ForwardBatch, build_batch, upload_ids
from runtime.config import DraftMode, VerifyMode
from runtime.parallel import ProcessGroup
from runtime.request import Phase
from runtime.sampling import SamplingTensors
from runtime.scheduler import StepPlan, Work
from runtime.spec.base import PendingStep, PlainSchedule, Runner, WorkResult, chain_results
from runtime.spec.draw import draw_draft
from runtime.transfer import HostTransfer
from runtime.verify import verify_chain


@dataclass(frozen=True)
class DraftRows:
    """Rows of one request in a draft run: ``count`` of them from position ``start`` on."""

    table_row: int
    start: int
    count: int


@dataclass(frozen=True)
class OnLeader:
    """Stands for the draft model on every rank but the leader, which has it."""


class DraftTargetSchedule(PlainSchedule):
    """Target and draft advance in lock step over the same slots; carried logits per table row."""

    may_look_ahead = False  # the host has its own overlap: it plans while the draft extends
    draft_ahead = 1
    announces_itself = True

    def __init__(
        self,
        target: Runner,
        draft: Runner | None,
        *,
        group: ProcessGroup,
        announce: Callable[[StepPlan], None],
        num_rows: int,
        transfer: HostTransfer,
        verify: VerifyMode,
        draft_mode: DraftMode,
    ) -> None:
        """``draft`` is the leader's; ``None`` on every other rank of ``group``.

        ``announce`` tells the other ranks what has been scheduled. The leader calls it once per
        step, in a speculative one while the first draft run works. Raises ``ValueError`` when the
        two models do not share a vocabulary, or the draft is spread over ranks.
        """
        super().__init__(target, num_rows=num_rows, transfer=transfer)
        assert (draft is not None) == group.is_leader, "the draft lives on the leader, only there"
        self.group = group
        self.announce = announce
        self.verify = verify
        self.draft_mode = draft_mode
        self.draft = draft
        if draft is not None:
            check_same_vocabulary(target.model.vocab_size, draft.model.vocab_size)
            if draft.model.group.world_size > 1:
                raise ValueError(
                    f"draft model: its weights are spread over {draft.model.group.world_size} "
                    "ranks; it runs on the leader alone, load it without a group"
                )
            self.logits_RV = torch.zeros(
                num_rows, draft.model.vocab_size, dtype=draft.model.dtype, device=self.device
            )

    def enqueue(self, plan: StepPlan) -> PendingStep:
        if not plan.is_decode_only or plan.num_draft_tokens == 0:
            if self.group.is_leader:
                self.announce(plan)
            return self._enqueue_plain(plan)
        return self._enqueue_speculative(plan)

    def collect(self, pending: PendingStep) -> list[WorkResult]:
        """Wait for the ids; after a speculative step, enqueue the draft's two rows behind it."""
        if not pending.is_speculative:
            return super().collect(pending)
        results = chain_results(pending.plan, *self.transfer.wait(pending.handle))
        self.extend_two_rows(results)
        return results

    def _enqueue_speculative(self, plan: StepPlan) -> PendingStep:
        works, k = plan.works, plan.num_draft_tokens
        rows_B = upload_ids([work.state.row for work in works], self.device)
        sampling = self.sampling(works)
        ids_BK1 = torch.empty(len(works), k + 1, dtype=torch.int64, device=self.device)
        ids_BK1[:, 0] = self.last_ids_R.index_select(0, rows_B)
        draft_probs_BKV = None
        if self.group.is_leader:
            batch, draft_probs_BKV = self._draft_on_leader(plan, rows_B, sampling, ids_BK1)
        else:
            batch = self._verification_batch(works, ids_BK1)
        self.group.broadcast(ids_BK1)
        self.transfer.mark("propose")

        hidden_ND = self.target.forward(batch)
        logits_NV = self.target.model.logits(hidden_ND)
        self.transfer.mark("target")
        handle = None
        last_ids_B = torch.empty_like(rows_B)
        if self.group.is_leader:
            verified = verify_chain(
                self.verify,
                logits_NV.view(len(works), k + 1, -1),
                ids_BK1[:, 1:],
                sampling,
                upload_ids([work.start + 1 for work in works], self.device),
                draft_probs_BKV=draft_probs_BKV,
                accept=self.target.model.ops.accept_chain,
            )
            last_ids_B = verified.last_ids_B
            handle = self.transfer.enqueue(verified.ids_BK1, verified.num_emitted_B, ids_BK1[:, 1:])
            self.transfer.mark("copy")
        self.last_ids_R.index_copy_(0, rows_B, self.group.broadcast(last_ids_B))
        return PendingStep(plan, handle, hidden_ND, None, batch.q_lens, True)

    def _draft_on_leader(
        self,
        plan: StepPlan,
        rows_B: torch.Tensor,
        sampling: SamplingTensors,
        ids_BK1: torch.Tensor,
    ) -> tuple[ForwardBatch, torch.Tensor | None]:
        """Write K drafts behind the last ids; the target's batch, and q ``[B, K, V]`` where drafts
        are sampled. The batch is built and announced while the first draft run works.
        """
        proposing = self.propose(plan.works, rows_B, plan.num_draft_tokens, sampling)
        drawn = list(islice(proposing, 2))  # the second token has enqueued the first draft run
        self.announce(plan)
        batch = self._verification_batch(plan.works, ids_BK1)
        drawn.extend(proposing)
        for column, (draft_ids_B, _) in enumerate(drawn, start=1):
            ids_BK1[:, column] = draft_ids_B
        probs = [probs_BV for _, probs_BV in drawn if probs_BV is not None]
        return batch, torch.stack(probs, 1) if probs else None

    def propose(
        self, works: Sequence[Work], rows_B: torch.Tensor, k: int, sampling: SamplingTensors
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """K times a drafted token per request, int64 ``[B]``; for sampled drafts also its q, ``[B,
        V]``. The first is drawn from the carried logits; asking for another enqueues a draft run.
        """
        assert self.draft is not None, "only the leader drafts"
        logits_BV = self.logits_RV.index_select(0, rows_B)
        for step in range(k):
            positions = [work.start + 1 + step for work in works]
            ids_B, probs_BV = draw_draft(logits_BV, sampling, positions, self.draft_mode)
            self.transfer.mark("draw")
            yield ids_B, probs_BV
            if step + 1 < k:
                rows = [
                    DraftRows(work.state.row, position, 1)
                    for work, position in zip(works, positions, strict=True)
                ]
                logits_BV = self.draft.model.logits(self.run_draft(BatchMode.DECODE, rows, ids_B))
                self.transfer.mark("draft")

    def extend_two_rows(self, results: Sequence[WorkResult]) -> None:
        """Run the draft over the last two tokens of each request and carry its logits over.

        Ids and lengths are exact on the host by now. Never waits. Whoever was aborted during the
        step owns no slots any more and is left out.
        """
        rows: list[DraftRows] = []
        ids: list[int] = []
        for result in results:
            state = result.work.state
            if state.phase is Phase.FINISHED:
                continue
            ids.extend((state.tokens[-1], *result.new_ids)[-2:])
            rows.append(DraftRows(state.row, result.work.start + result.num_committed - 1, 2))
        if not rows:
            return
        hidden_ND = self.run_draft(BatchMode.VERIFY, rows, upload_ids(ids, self.device))
        self._carry_over([row.table_row for row in rows], hidden_ND[1::2])
        self.transfer.mark("extend")

    def _extend_draft(
        self,
        works: Sequence[Work],
        batch: ForwardBatch,
        hidden_ND: torch.Tensor,
        last_rows: Sequence[int],
        new_ids_M: torch.Tensor,
    ) -> torch.Tensor | None:
        """After a plain step: the draft over the target's rows and each new token behind them.

        A decoding request's own row is in the draft's cache already, so only its new token is run.
        """
        if self.draft is None:
            return None
        rows: list[DraftRows] = []
        ids: list[int] = []
        relay_rows: list[int] = []
        new_at: list[int] = []
        for work in works:
            state = work.state
            if state.encode_only:
                continue
            ahead = self.draft_ahead if state.phase is Phase.DECODE else 0
            known = state.tokens[work.start + ahead : work.start + work.num_rows]
            rows.append(DraftRows(state.row, work.start + ahead, len(known) + int(work.samples)))
            ids.extend(known)
            if work.samples:
                relay_rows.append(state.row)
                new_at.append(len(ids))
                ids.append(0)  # replaced on the device
        if not rows:
            return None
        ids_N = upload_ids(ids, self.device)
        new_at_M = upload_ids(new_at, self.device)
        ids_N.index_copy_(0, new_at_M, new_ids_M)
        draft_hidden_ND = self.run_draft(batch.mode, rows, ids_N)
        if relay_rows:
            self._carry_over(relay_rows, draft_hidden_ND.index_select(0, new_at_M))
        self.transfer.mark("extend")
        return None

    def run_draft(
        self, mode: BatchMode, rows: Sequence[DraftRows], ids_N: torch.Tensor
    ) -> torch.Tensor:
        """The draft's hidden states ``[N, D]`` of these rows; their K/V are stored."""
        assert self.draft is not None, "only the leader drafts"
        return self.draft.forward(
            build_batch(
                mode,
                table=self.table,
                table_rows=[row.table_row for row in rows],
                starts=[row.start for row in rows],
                q_lens=[row.count for row in rows],
                input_ids_N=ids_N,
                device=self.device,
            )
        )

    def _verification_batch(self, works: Sequence[Work], ids_BK1: torch.Tensor) -> ForwardBatch:
        """The target's rows L..L+K. Their ids are written into ``ids_BK1`` once they are drawn."""
        batch = build_batch(
            BatchMode.VERIFY,
            table=self.table,
            table_rows=[work.state.row for work in works],
            starts=[work.start for work in works],
            q_lens=[ids_BK1.shape[1]] * len(works),
            input_ids_N=ids_BK1.view(-1),
            device=self.device,
        )
        self.transfer.mark("batch")
        return batch

    def _carry_over(self, table_rows: Sequence[int], hidden_MD: torch.Tensor) -> None:
        """Keep the logits of these rows until the next proposal draws from them."""
        assert self.draft is not None, "only the leader drafts"
        rows_M = upload_ids(table_rows, self.device)
        self.logits_RV.index_copy_(0, rows_M, self.draft.model.logits(hidden_MD))


def check_same_vocabulary(target_size: int, draft_size: int) -> None:
    """Raise ``ValueError`` when token ids cannot mean the same to both models."""
    if target_size != draft_size:
        raise ValueError(
            f"draft model: its vocabulary has {draft_size} tokens, the target's {target_size}; a "
            "draft model is given the target's token ids, so that both need the same vocabulary"
        )
