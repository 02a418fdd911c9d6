"""The head of Medusa-1 (Cai et al. 2024, arXiv:2401.10774) over the target's frozen ``lm_head``:
block ``k`` drafts token ``k + 1`` behind a row from ``x_k = g + SiLU(W_k g + b_k)``.

All K drafts come from one row of the target; nothing is fed back but the place in the chain. The
state of a row is ``[x_k | x_{k+1} | ...]``, what it drafts from first, and a recycled row moves on
to the next block: the ids that it is given do not matter, and there are no K/V. Chains and trees so
run a Medusa head as any other.

Shape legend: N rows, M selected rows, D model width, B blocks.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from runtime.batch import ForwardBatch
from runtime.kv_cache import KVPool, SlotTable
from runtime.layers import TensorSource
from runtime.models.heads.mtp import MtpHead


class MedusaHead(MtpHead):
    """``width`` is B * D; ``forward`` also takes rows of the target, ``[N, D]``.

    The blocks are one linear, cut by its inputs over ranks.
    """

    def _take_inputs(self, take: TensorSource) -> None:
        count = self.spec.num_blocks
        self.width = count * self.spec.hidden_size
        self.max_draft_tokens = count
        names = [f"blocks.{index}.layers.0" for index in range(count)]
        self._take_projection(torch.cat([take(f"{name}.weight") for name in names]))
        self.projection_bias = None
        if self.spec.projection_bias:
            self.projection_bias = torch.cat([take(f"{name}.bias") for name in names])

    @property
    def row_width(self) -> int:
        return self.spec.hidden_size

    def new_pool(self, num_slots: int) -> KVPool:
        """Of no layers."""
        return KVPool(
            num_layers=0,
            num_slots=num_slots,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, table: SlotTable, pool: KVPool) -> torch.Tensor:
        """``[N, B * D]``: of rows of the target all blocks, the first in front; of the head's own
        rows the same with the next block in front.
        """
        assert batch.hidden_ND is not None, "a Medusa head needs batch.hidden_ND"
        rows = batch.hidden_ND.to(self.dtype)
        if rows.shape[1] != self.row_width:
            return rows.roll(-self.row_width, dims=1)
        blocks_NBD = self._project(rows)
        if self.projection_bias is not None:  # whole on every rank: added to the sum, once
            blocks_NBD.add_(self.projection_bias)
        count = self.spec.num_blocks
        states = rows[:, None] + F.silu(blocks_NBD.view(len(rows), count, -1))
        return states.flatten(1)

    def state_for_logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """The block in front, ``[M, D]``."""
        return hidden_MD[:, : self.row_width].contiguous()
