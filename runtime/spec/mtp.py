"""Linear MTP-K speculation with one shared head: no wait between proposal and extension.

Let L be the committed length: target K/V of tokens ``0..L-1`` are final and ``t_L`` is sampled but
not processed. Draft row i pairs ``g_i`` with ``t_{i+1}`` and lives at slot i, so the draft has L
final rows too; its row L-1 consumed ``t_L`` and left the relay state: logits for ``t_{L+1}`` and a
hidden state.

    propose   d1 = draw(relay logits); draft row L: (relay hidden, d1) -> d2; row L+1 -> d3 ...
    target    rows L..L+K   over [t_L, d1 .. dK]
    verify    e = 1..K+1 tokens emitted, the last is the target's own
    extend    draft rows L..L+K over [d1 .. dK, *] with the new token at row e-1, hidden = the
              target's own; row e-1 is the next relay state; rows after it are stale and
              overwritten next time

Shape legend: B requests, K drafts, N rows, D model width, V draft vocabulary, R table rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import BatchMode, ForwardBatch, build_batch, upload_ids
from runtime.config import DraftMode, VerifyMode
from runtime.models.base import DraftModel
from runtime.sampling import (
    SamplingTensors,
    Stream,
    argmax,
    inverse_cdf,
    philox_uniform,
    token_probs,
)
from runtime.scheduler import StepPlan, Work
from runtime.spec.base import PendingStep, PlainSchedule, Runner, WorkResult
from runtime.transfer import HostTransfer
from runtime.verify import verify_chain


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
    ) -> None:
        super().__init__(target, num_rows=num_rows, transfer=transfer)
        assert isinstance(draft.model, DraftModel)
        self.draft = draft
        self.head: DraftModel = draft.model
        self.verify = verify
        self.draft_mode = draft_mode
        head, device = self.head, self.device
        self.hidden_RD = torch.zeros(num_rows, head.width, dtype=head.dtype, device=device)
        self.logits_RV = torch.zeros(
            num_rows, head.draft_vocab_size, dtype=head.dtype, device=device
        )

    def enqueue(self, plan: StepPlan) -> PendingStep:
        if not plan.is_decode_only or plan.num_draft_tokens == 0:
            return self._enqueue_plain(plan)
        return self._enqueue_speculative(plan)

    def collect(self, pending: PendingStep) -> list[WorkResult]:
        if not pending.is_speculative:
            return super().collect(pending)
        ids_BK1, num_emitted_B, draft_ids_BK = self.transfer.wait(pending.handle)
        return [
            WorkResult(work, tuple(ids[:count]), count, count - 1, tuple(drafts))
            for work, ids, count, drafts in zip(
                pending.plan.works, ids_BK1, num_emitted_B, draft_ids_BK, strict=True
            )
        ]

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
        )
        self.last_ids_R.index_copy_(0, rows_B, verified.last_ids_B)
        handle = self.transfer.enqueue(verified.ids_BK1, verified.num_emitted_B, draft_ids_BK)
        self.transfer.mark("copy")

        end_B1 = (verified.num_emitted_B - 1)[:, None]
        shifted_BK1 = torch.cat([draft_ids_BK, draft_ids_BK[:, -1:]], 1)
        shifted_BK1 = shifted_BK1.scatter(1, end_B1, verified.last_ids_B[:, None])
        draft_hidden_ND = self.run_draft(batch, shifted_BK1.reshape(-1), hidden_ND)
        width = draft_hidden_ND.shape[-1]
        relay_BD = draft_hidden_ND.view(len(works), k + 1, width).gather(
            1, end_B1[:, :, None].expand(-1, 1, width)
        )[:, 0]
        self._set_relay(rows_B, relay_BD)
        self.transfer.mark("extend")
        return PendingStep(plan, handle, hidden_ND, draft_hidden_ND, batch.q_lens, True)

    def propose(
        self, works: Sequence[Work], rows_B: torch.Tensor, k: int, sampling: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K drafted ids ``[B, K]``; for sampled drafts also their q, ``[B, K, V]``."""
        if self.draft.draft_loop is not None and self.draft_mode == "argmax":
            draft_ids_BK = self.draft.draft_loop.propose(
                self.hidden_RD.index_select(0, rows_B),
                self.logits_RV.index_select(0, rows_B),
                table_rows=[work.state.row for work in works],
                starts=[work.start for work in works],
                k=k,
            )
            if draft_ids_BK is not None:
                return draft_ids_BK, None
        hidden_BD = self.hidden_RD.index_select(0, rows_B)
        logits_BV = self.logits_RV.index_select(0, rows_B)
        starts = [work.start for work in works]
        drafts: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        for step in range(k):
            if step:
                batch = build_batch(
                    BatchMode.DECODE,
                    table=self.table,
                    table_rows=[work.state.row for work in works],
                    starts=[start + step - 1 for start in starts],
                    q_lens=[1] * len(works),
                    input_ids_N=drafts[-1],
                    device=self.device,
                    hidden_ND=hidden_BD,
                )
                hidden_BD = self.draft.forward(batch)
                logits_BV = self.head.logits(hidden_BD)
            if self.draft_mode == "argmax":
                drafts.append(self._to_target_ids(argmax(logits_BV)))
                continue
            probs_BV = token_probs(self._to_target_logits(logits_BV), sampling)
            positions_B = upload_ids([start + 1 + step for start in starts], self.device)
            uniform_B = philox_uniform(sampling.seed_M, positions_B, Stream.DRAFT)
            drafts.append(inverse_cdf(probs_BV, uniform_B))
            probs.append(probs_BV)
        return torch.stack(drafts, 1), torch.stack(probs, 1) if probs else None

    def run_draft(
        self, batch: ForwardBatch, shifted_ids_N: torch.Tensor, hidden_ND: torch.Tensor
    ) -> torch.Tensor:
        """The head over the target's own batch: ids are shifted by one, hidden states are not."""
        return self.draft.forward(
            ForwardBatch(
                mode=batch.mode,
                input_ids_N=shifted_ids_N,
                positions_N=batch.positions_N,
                write_slots_N=batch.write_slots_N,
                q_lens=batch.q_lens,
                kv_lens=batch.kv_lens,
                table_rows=batch.table_rows,
                hidden_ND=hidden_ND,
            )
        )

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
        self.logits_RV.index_copy_(0, rows_B, self.head.logits(hidden_BD))

    def _to_target_ids(self, draft_ids_B: torch.Tensor) -> torch.Tensor:
        ids_V = self.head.draft_vocab_ids
        return draft_ids_B if ids_V is None else ids_V.take(draft_ids_B)

    def _to_target_logits(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Draft logits over the target's vocabulary; tokens the draft cannot propose get -inf."""
        ids_V = self.head.draft_vocab_ids
        if ids_V is None:
            return logits_BV
        shape = (logits_BV.shape[0], self.head.vocab_size)
        full_BV = torch.full(shape, -torch.inf, dtype=logits_BV.dtype, device=logits_BV.device)
        return full_BV.index_copy_(1, ids_V, logits_BV)
