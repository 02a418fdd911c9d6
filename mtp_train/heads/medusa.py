"""The differentiable head of Medusa-1 (arXiv:2401.10774): the training twin of
``runtime.models.heads.medusa``.

Block ``k`` makes ``g + SiLU(W_k g + b_k)`` of the one state ``g``, which the target's frozen
``lm_head`` or the block's own reads; step ``k`` of the unroll is block ``k``. There is nothing
between the steps but that they start from the same row.

Shape legend: S packed rows, N query rows of one step, D model width, V vocabulary, B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from mtp_train.heads.base import TrainingHead
from mtp_train.packing import HeadBatch
from mtp_train.rows import take_rows
from runtime.head_spec import HeadSpec


class _Block(nn.Module):
    def __init__(self, spec: HeadSpec, dtype: torch.dtype) -> None:
        super().__init__()
        width = spec.hidden_size
        linear = nn.Linear(width, width, bias=spec.projection_bias, dtype=dtype)
        self.layers = nn.ModuleList([linear])

    def forward(self, g_ND: torch.Tensor) -> torch.Tensor:
        return g_ND + F.silu(self.layers[0](g_ND))


class MedusaHead(TrainingHead):
    """``batch.hidden_SD`` are the target's ``g``; its ids and the embedding are not read."""

    def __init__(self, spec: HeadSpec, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(spec)
        if spec.draft_vocab is not None:
            raise ValueError("head draft_vocab: a Medusa head is trained on the whole vocabulary")
        self.blocks = nn.ModuleList([_Block(spec, dtype) for _ in range(spec.num_blocks)])
        if spec.lm_head == "own":
            shape = (spec.hidden_size, spec.vocab_size)
            self.lm_heads = nn.ModuleList(
                [nn.Linear(*shape, bias=False, dtype=dtype) for _ in range(spec.num_blocks)]
            )

    def forward(
        self,
        batch: HeadBatch,
        embedding_VD: torch.Tensor,
        draft_lm_head_VD: torch.Tensor | None = None,
        *,
        with_lm_head: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """``len(batch.steps)`` states, at most one per block. ``with_lm_head`` adds copies of the
        B weights ``[V, D]`` of ``lm_head``s of the head's own, as
        :class:`mtp_train.heads.eagle3.Eagle3Head` does.
        """
        assert draft_lm_head_VD is None, "a Medusa head embeds no tokens"
        assert len(batch.steps) <= len(self.blocks), "one block per step"
        states: list[torch.Tensor] = []
        g_ND = batch.hidden_SD
        for number, step in enumerate(batch.steps):
            g_ND = take_rows(g_ND, step.parent_N if number else step.rows_N)
            states.append(self.blocks[number](g_ND))
        if not with_lm_head:
            return tuple(states)
        lm_heads = cast(Sequence[nn.Linear], self.lm_heads)
        return (*states, *(lm_head.weight.clone() for lm_head in lm_heads))
