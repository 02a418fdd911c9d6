"""A head that costs what the real one costs and drafts what it is told: always right or wrong.

With it the price of a speculative step is measured beforehand, independent of what a head accepts.

Shape legend: N rows, M selected rows, D the head's width, W draft vocabulary, C best columns, R
table rows, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from runtime.batch import ForwardBatch, upload_ids
from runtime.engine import Engine
from runtime.kv_cache import KVPool, SlotTable
from runtime.models.base import DraftModel
from runtime.models.heads.mtp import MtpHead

_BASE = 128  # digits below this are exact in every dtype
_EXTRA = 4  # position as three digits, table row as one


class ForcedDraft(DraftModel):
    """Runs ``head`` and then overrules its logits. The row's place travels behind its state.

    ``answers[request_id]`` are the tokens (prompt and output) the owner is expected to have. Row i
    at position p predicts token p + 2; ``is_right`` drafts that token (where the head has it in its
    draft vocabulary), else another one. At most 128 requests may decode together.
    """

    def __init__(
        self, head: MtpHead, answers: Mapping[str, Sequence[int]], *, is_right: bool
    ) -> None:
        self.device, self.dtype = head.device, head.dtype
        self.vocab_size, self.draft_vocab_size = head.vocab_size, head.draft_vocab_size
        self.draft_vocab_ids = head.draft_vocab_ids
        self.width, self.layer_ids = head.width + _EXTRA, head.layer_ids
        self.engine: Engine | None = None  # set once the engine exists
        self._head = head
        self._answers = answers
        self._is_right = is_right
        longest = max(len(answer) for answer in answers.values())
        self._tokens_RT = torch.zeros(_BASE, longest + 1, dtype=torch.int64, device=head.device)
        self._owners: dict[int, str] = {}

    def new_pool(self, num_slots: int) -> KVPool:
        return self._head.new_pool(num_slots)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, table: SlotTable, pool: KVPool) -> torch.Tensor:
        self._learn_owners()
        assert batch.hidden_ND is not None, "an MTP head needs batch.hidden_ND"
        if batch.hidden_ND.shape[1] != self._head.row_width:  # its own, not the target's
            own_ND = batch.hidden_ND[:, :-_EXTRA]
            state_ND = self._head.forward(replace(batch, hidden_ND=own_ND), table, pool)
        else:
            state_ND = self._head.forward(batch, table, pool)
        owners = [
            row
            for row, count in zip(batch.table_rows, batch.q_lens, strict=True)
            for _ in range(count)
        ]
        p_N = batch.positions_N
        digits = (
            p_N // _BASE**2,
            p_N // _BASE % _BASE,
            p_N % _BASE,
            upload_ids(owners, p_N.device),
        )
        return torch.cat([state_ND, torch.stack(digits, 1).to(self.dtype)], 1)

    @torch.inference_mode()
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        logits_MW = self._head.logits(hidden_MD[:, :-_EXTRA])
        column_M1 = self._forced(hidden_MD)[:, None]
        return logits_MW.scatter(1, column_M1, torch.finfo(self.dtype).max)

    @torch.inference_mode()
    def best_columns(self, hidden_MD: torch.Tensor, count: int) -> torch.Tensor:
        """What the head does to find its best columns is done, and costs what it costs."""
        self._head.best_columns(hidden_MD[:, :-_EXTRA].contiguous(), count)
        # Of wrong ones the right one is the last of all, out of reach of fewer than all columns.
        following_C = torch.arange(count, device=hidden_MD.device)
        return (self._forced(hidden_MD)[:, None] + following_C) % self.draft_vocab_size

    def _forced(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """The column that every row is to draft."""
        high_M, mid_M, low_M, row_M = hidden_MD[:, -_EXTRA:].long().unbind(1)
        wanted_M = ((high_M * _BASE + mid_M) * _BASE + low_M + 2).clamp_max(
            self._tokens_RT.shape[1] - 1
        )
        column_M = self._columns(self._tokens_RT[row_M, wanted_M])
        return column_M if self._is_right else (column_M + 1) % self.draft_vocab_size

    def _columns(self, token_M: torch.Tensor) -> torch.Tensor:
        """Columns of these tokens; the first one for a token that the draft cannot propose."""
        ids_W = self.draft_vocab_ids
        if ids_W is None:
            return token_M
        column_M = torch.searchsorted(ids_W, token_M).clamp_max(len(ids_W) - 1)
        return torch.where(ids_W.take(column_M) == token_M, column_M, 0)

    def _learn_owners(self) -> None:
        assert self.engine is not None, "set .engine before the first step"
        for state in self.engine.scheduler.running:
            request_id = state.request.request_id
            if self._owners.get(state.row) != request_id:
                answer = self._answers[request_id]
                self._tokens_RT[state.row, : len(answer)] = upload_ids(answer, self.device)
                self._owners[state.row] = request_id
