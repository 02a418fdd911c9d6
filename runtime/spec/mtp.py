"""Linear MTP-K speculation with one shared head: no wait between proposal and extension.

Let L be the committed length: target K/V of tokens ``0..L-1`` are final and ``t_L`` is sampled but
not processed. Draft row i pairs ``g_i`` with ``t_{i+1}`` and lives at slot i, so the draft has L
final rows too; its row L-1 consumed ``t_L`` and left the relay state: a hidden state, and what
``t_{L+1}`` is drafted from: logits where drafts are sampled, the best columns where they are not.

    propose   d1 from the relay; draft row L: (relay hidden, d1) -> d2; row L+1 -> d3 ...
    target    rows L..L+K   over [t_L, d1 .. dK]
    verify    e = 1..K+1 tokens emitted, the last is the target's own
    extend    draft rows L..L+K over [d1 .. dK, *] with the new token at row e-1, hidden = the
              target's own; row e-1 is the next relay state; rows after it are stale and
              overwritten next time

With K = 1 (the single-token schedule) there is no draft row between proposal and target: batch
information is made once for the 2 B rows of both models, and the device never waits for the host.

Shape legend: B requests, K drafts, N rows, D model width, V vocabulary, W draft vocabulary (V
without a list of ids), X what drafts are drawn from (W logits, or the best columns), R table rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from runtime.batch import BatchMode, ForwardBatch, build_batch, cut_in_halves, upload_ids
from runtime.config import DraftMode, VerifyMode
from runtime.draft_vocab import spread_probs, to_target_ids
from runtime.models.base import DraftModel
from runtime.sampling import SamplingTensors
from runtime.scheduler import StepPlan, Work
from runtime.spec.base import PendingStep, PlainSchedule, Runner, WorkResult, chain_results
from runtime.spec.draw import draw_draft
from runtime.transfer import HostTransfer
from runtime.verify import Verified, verify_chain


class MtpSchedule(PlainSchedule):
    """Target and head advance in lock step; relay state is kept per table row."""

    def __init__(
        self,
        target: Runner,
        draft: Runner,
        *,
        num_rows: int,
        transfer: HostTransfer,
        verify: VerifyMode,
        draft_mode: DraftMode,
        num_choices: int | None = None,
        in_halves: bool = False,
    ) -> None:
        """``num_choices``: best columns that a proposal draws from, 0: whole logits (default: one,
        or logits where drafts are sampled). ``in_halves``: verification and extension run over two
        halves of the requests that take turns (:mod:`runtime.halves`).
        """
        super().__init__(target, num_rows=num_rows, transfer=transfer)
        assert isinstance(draft.model, DraftModel)
        self.draft = draft
        self.head: DraftModel = draft.model
        self.verify = verify
        self.draft_mode = draft_mode
        self.in_halves = in_halves
        if num_choices is None:
            num_choices = 1 if draft_mode == "argmax" else 0
        self.num_choices = num_choices
        head, device = self.head, self.device
        self.hidden_RD = torch.zeros(num_rows, head.width, dtype=head.dtype, device=device)
        self.drawn_from_RX = torch.zeros(
            num_rows,
            num_choices or head.draft_vocab_size,
            dtype=torch.int64 if num_choices else head.dtype,
            device=device,
        )

    def enqueue(self, plan: StepPlan) -> PendingStep:
        if not plan.is_decode_only or plan.num_draft_tokens == 0:
            return self._enqueue_plain(plan)
        return self._enqueue_speculative(plan)

    def collect(self, pending: PendingStep) -> list[WorkResult]:
        if not pending.is_speculative:
            return super().collect(pending)
        return chain_results(pending.plan, *self.transfer.wait(pending.handle))

    def _enqueue_speculative(self, plan: StepPlan) -> PendingStep:
        works, k = plan.works, plan.num_draft_tokens
        rows_B = upload_ids([work.state.row for work in works], self.device)
        starts = [work.start for work in works]
        sampling = self.sampling(works)
        draft_ids_BK, draft_probs_BKV = self.propose(works, rows_B, k, sampling)
        self.transfer.mark("propose")

        last_ids_B1 = self.last_ids_R.index_select(0, rows_B)[:, None]
        ids_BK1 = torch.cat([last_ids_B1, draft_ids_BK], 1)
        batch = build_batch(
            BatchMode.VERIFY,
            table=self.table,
            table_rows=[work.state.row for work in works],
            starts=starts,
            q_lens=[k + 1] * len(works),
            input_ids_N=ids_BK1.reshape(-1),
            device=self.device,
        )
        if self.in_halves:
            batch = cut_in_halves(batch)
        hidden_ND = self.target.forward(batch)
        logits_NV = self.target.model.logits(hidden_ND)
        self.transfer.mark("target")
        verified = verify_chain(
            self.verify,
            logits_NV.view(len(works), k + 1, -1),
            draft_ids_BK,
            sampling,
            upload_ids([start + 1 for start in starts], self.device),
            draft_probs_BKV=draft_probs_BKV,
            accept=self.target.model.ops.accept_chain,
        )
        self.agree(verified.last_ids_B, verified.num_emitted_B)
        self.last_ids_R.index_copy_(0, rows_B, verified.last_ids_B)
        handle = self.transfer.enqueue(verified.ids_BK1, verified.num_emitted_B, draft_ids_BK)
        self.transfer.mark("copy")

        draft_hidden_ND = self._extend_verified(batch, rows_B, ids_BK1, verified, hidden_ND)
        self.transfer.mark("extend")
        return PendingStep(plan, handle, hidden_ND, draft_hidden_ND, batch.q_lens, True)

    def _extend_verified(
        self,
        batch: ForwardBatch,
        rows_B: torch.Tensor,
        ids_BK1: torch.Tensor,
        verified: Verified,
        hidden_ND: torch.Tensor,
    ) -> torch.Tensor:
        """The head over all of the target's rows, accepted or not; nothing asks which they are."""
        shifted = self.target.model.ops.shift_inputs(
            ids_BK1, verified.last_ids_B, verified.num_emitted_B
        )
        draft_hidden_ND = self.run_draft(batch, shifted.ids_N, hidden_ND)
        self._set_relay(rows_B, draft_hidden_ND.index_select(0, shifted.end_rows_B))
        return draft_hidden_ND

    def propose(
        self, works: Sequence[Work], rows_B: torch.Tensor, k: int, sampling: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K drafted ids ``[B, K]``; for sampled drafts also their q, ``[B, K, V]``."""
        hidden_BD = self.hidden_RD.index_select(0, rows_B)
        drawn_from_BX = self.drawn_from_RX.index_select(0, rows_B)
        table_rows = [work.state.row for work in works]
        starts = [work.start for work in works]
        if self.draft.draft_loop is not None and self.draft_mode == "argmax":
            draft_ids_BK = self.draft.draft_loop.propose(
                hidden_BD, drawn_from_BX, table_rows=table_rows, starts=starts, k=k
            )
            if draft_ids_BK is not None:
                return draft_ids_BK, None
        drafts: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        for step in range(k):
            if step:
                batch = build_batch(
                    BatchMode.DECODE,
                    table=self.table,
                    table_rows=table_rows,
                    starts=[start + step - 1 for start in starts],
                    q_lens=[1] * len(works),
                    input_ids_N=drafts[-1],
                    device=self.device,
                    hidden_ND=hidden_BD,
                )
                hidden_BD = self.draft.forward(batch)
                drawn_from_BX = self.look(hidden_BD)
            if self.num_choices:
                columns_B = drawn_from_BX[:, 0]
            else:
                positions = [start + 1 + step for start in starts]
                columns_B, probs_BW = draw_draft(
                    drawn_from_BX, sampling, positions, self.draft_mode
                )
                if probs_BW is not None:
                    probs.append(self._to_target_probs(probs_BW))
            drafts.append(self._to_target_ids(columns_B))
            self.agree(drafts[-1])
        return torch.stack(drafts, 1), torch.stack(probs, 1) if probs else None

    def look(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """What drafts are drawn from, ``[M, X]``, of states that the head returned."""
        if self.num_choices:
            return self.head.best_columns(hidden_MD, self.num_choices)
        return self.head.logits(hidden_MD)

    def run_draft(
        self, batch: ForwardBatch, shifted_ids_N: torch.Tensor, hidden_ND: torch.Tensor
    ) -> torch.Tensor:
        """The head over the target's own batch: ids are shifted by one, hidden states are not."""
        return self.draft.forward(replace(batch, input_ids_N=shifted_ids_N, hidden_ND=hidden_ND))

    def _extend_draft(
        self,
        works: Sequence[Work],
        batch: ForwardBatch,
        hidden_ND: torch.Tensor,
        last_rows: Sequence[int],
        new_ids_M: torch.Tensor,
    ) -> torch.Tensor | None:
        shifted: list[int] = []
        for work in works:
            start = work.start + 1
            known = work.state.tokens[start : start + work.num_rows]
            shifted.extend(known + [0] * (work.num_rows - len(known)))
        shifted_N = upload_ids(shifted, self.device)
        if last_rows:
            last_rows_M = upload_ids(last_rows, self.device)
            shifted_N.index_copy_(0, last_rows_M, new_ids_M)
        draft_hidden_ND = self.run_draft(batch, shifted_N, hidden_ND)
        if last_rows:
            relay_rows = [work.state.row for work in works if work.samples]
            self._set_relay(
                upload_ids(relay_rows, self.device), draft_hidden_ND.index_select(0, last_rows_M)
            )
        self.transfer.mark("extend")
        return draft_hidden_ND

    def _set_relay(self, rows_B: torch.Tensor, hidden_BD: torch.Tensor) -> None:
        self.hidden_RD.index_copy_(0, rows_B, hidden_BD)
        self.drawn_from_RX.index_copy_(0, rows_B, self.look(hidden_BD))

    def _to_target_ids(self, columns_B: torch.Tensor) -> torch.Tensor:
        return to_target_ids(columns_B, self.head.draft_vocab_ids)

    def _to_target_probs(self, probs_BW: torch.Tensor) -> torch.Tensor:
        return spread_probs(probs_BW, self.head.draft_vocab_ids, vocab_size=self.head.vocab_size)
