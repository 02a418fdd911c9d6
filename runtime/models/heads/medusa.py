"""The head of Medusa-1 (Cai et al. 2024, arXiv:2401.10774): block ``k`` drafts token ``k + 1``
behind a row from ``x_k = g + SiLU(W_k g + b_k)``, through the target's frozen ``lm_head`` or, as
the published heads do, one of its own.

All K drafts come from one row of the target; nothing is fed back but the place in the chain. The
state of a row is ``[x_k | x_{k+1} | ...]``, what it drafts from in front, and a recycled row leaves
the one in front behind: its width says which block it drafts with, without asking the device. The
ids that it is given do not matter, and there are no K/V. Chains and trees so run a Medusa head as
any other.

Shape legend: N rows, M selected rows, D model width, B blocks, W draft vocabulary.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from runtime.batch import ForwardBatch
from runtime.kv_cache import KVPool, SlotTable
from runtime.linear import Linear, TensorSource
from runtime.models.heads.mtp import MtpHead
from runtime.screened_linear import ScreenedLinear


class MedusaHead(MtpHead):
    """``width`` is B * D; ``forward`` also takes rows of the target, ``[N, D]``.

    The blocks are one linear, cut by its inputs over ranks. ``lm_heads`` are the head's own, one
    per block, or none.
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

    def _take_lm_head(self, take: TensorSource) -> None:
        self.lm_heads: list[Linear] = []
        for name in self.spec.own_lm_heads:
            self._own_lm_head(take(name))
            self.lm_heads.append(self.lm_head)
        if not self.lm_heads:
            super()._take_lm_head(take)

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
        """Of rows of the target all blocks, ``[N, B * D]``, the first in front; of the head's own
        rows what lies behind the block in front.
        """
        assert batch.hidden_ND is not None, "a Medusa head needs batch.hidden_ND"
        rows = batch.hidden_ND.to(self.dtype)
        if rows.shape[1] != self.row_width:
            return rows[:, self.row_width :]
        blocks_NBD = self._project(rows)
        if self.projection_bias is not None:  # whole on every rank: added to the sum, once
            blocks_NBD.add_(self.projection_bias)
        count = self.spec.num_blocks
        states = rows[:, None] + F.silu(blocks_NBD.view(len(rows), count, -1))
        return states.flatten(1)

    def lm_head_of(self, hidden_MD: torch.Tensor) -> Linear:
        return self.lm_heads[self._block_of(hidden_MD)] if self.lm_heads else self.lm_head

    @functools.cached_property
    def _screens(self) -> list[ScreenedLinear | None]:
        is_whole = self.group.world_size == 1
        return [ScreenedLinear.of(own) if is_whole else None for own in self.lm_heads]

    def _screen_of(self, hidden_MD: torch.Tensor) -> ScreenedLinear | None:
        return self._screens[self._block_of(hidden_MD)] if self.lm_heads else self._screened

    def state_for_logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """The block in front, ``[M, D]``."""
        return hidden_MD[:, : self.row_width].contiguous()

    def _block_of(self, hidden_MD: torch.Tensor) -> int:
        return self.spec.num_blocks - hidden_MD.shape[1] // self.row_width
