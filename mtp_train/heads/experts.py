"""A differentiable mixture of experts: the training twin of ``runtime.moe``.

Gradients reach the router through the weights of the chosen experts. The choice itself has none,
and nothing is added to the loss to keep experts evenly used: a layer that was trained with its
target starts balanced, and DeepSeek-V3's bias of the choice (arXiv:2412.19437, 2.1.2) is kept as it
is, in fp32.

Shape legend: N rows, D model width, X experts, E experts chosen per row, Q groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mtp_train.heads.parts import GatedMlp
from mtp_train.rows import take_rows
from runtime.head_spec import HeadSpec
from runtime.layer_parts import ExpertSpec


class _Gate(nn.Module):
    """The router. Its bias is a buffer that nothing trains, and stays fp32 wherever it goes."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, spec: ExpertSpec, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._spec = spec
        self.weight = nn.Parameter(torch.zeros(spec.num_experts, width, dtype=dtype))
        if spec.has_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(spec.num_experts))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        kept = self.e_score_correction_bias if self._spec.has_bias else None
        moved: Any = super()._apply(fn, recurse)
        if kept is not None:  # rounded to bf16 it would choose other experts
            self.e_score_correction_bias = kept.to(self.weight.device)
        return moved

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (int64) and fp32 weights of the chosen experts, ``[N, E]`` each."""
        spec = self._spec
        dtype = torch.float32 if spec.is_float32 else self.weight.dtype
        logits_NX = F.linear(x_ND.to(dtype), self.weight.to(dtype)).float()
        scores_NX = logits_NX.softmax(-1) if spec.scores == "softmax" else logits_NX.sigmoid()
        ids_NE = self._choose(scores_NX.detach())
        weights_NE = scores_NX.gather(1, ids_NE)
        if spec.normalises:
            weights_NE = weights_NE / weights_NE.sum(-1, keepdim=True).clamp_min(1e-20)
        return ids_NE, weights_NE * spec.scaling

    def _choose(self, scores_NX: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        if spec.has_bias:
            scores_NX = scores_NX + self.e_score_correction_bias
        if spec.num_kept_groups < spec.num_groups:
            by_group_NQX = scores_NX.unflatten(1, (spec.num_groups, -1))
            best_NQ = by_group_NQX.topk(1 if spec.group_score == "best" else 2).values.sum(-1)
            kept_NK = best_NQ.topk(spec.num_kept_groups).indices
            is_kept_NQ = torch.zeros_like(best_NQ, dtype=torch.bool).scatter(1, kept_NK, True)
            is_kept_NX = is_kept_NQ.repeat_interleave(by_group_NQX.shape[2], dim=1)
            scores_NX = scores_NX.masked_fill(~is_kept_NX, float("-inf"))
        return scores_NX.topk(spec.num_chosen).indices


class ExpertMlp(nn.Module):
    """``sum of weight * expert(x)`` over the chosen experts, and the shared experts' output.

    Every expert is called, with no rows where nobody chose it: each parameter has a gradient in
    every step, and ranks that gather parameters (ZeRO 3) do so in the same order.
    """

    def __init__(self, spec: HeadSpec, dtype: torch.dtype) -> None:
        super().__init__()
        experts, width = spec.experts, spec.hidden_size
        assert experts is not None, "a head without experts"
        self._num_chosen = experts.num_chosen

        def mlp(inner: int) -> GatedMlp:
            return GatedMlp(width, inner, bias=False, dtype=dtype)

        self.gate = _Gate(experts, width, dtype)
        self.experts = nn.ModuleList([mlp(experts.inner) for _ in range(experts.num_experts)])
        if experts.num_shared:
            self.shared_experts = mlp(experts.num_shared * experts.inner)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        ids_NE, weights_NE = self.gate(x_ND)
        order = ids_NE.flatten().argsort(stable=True)
        inputs = x_ND.index_select(0, order // self._num_chosen)
        parts = inputs.split(_counts(ids_NE, len(self.experts)))
        outputs = torch.cat([own(rows) for own, rows in zip(self.experts, parts, strict=True)])
        outputs_NED = take_rows(outputs, order.argsort()).unflatten(0, ids_NE.shape)
        sum_ND = (outputs_NED.float() * weights_NE[..., None]).sum(1).to(x_ND.dtype)
        return sum_ND + self.shared_experts(x_ND) if hasattr(self, "shared_experts") else sum_ND


def _counts(ids_NE: torch.Tensor, num_experts: int) -> list[int]:
    """Rows of each expert, on the host; spread evenly on a ``meta`` device, which knows no ids."""
    if ids_NE.is_meta:
        bounds = [ids_NE.numel() * i // num_experts for i in range(num_experts + 1)]
        return [stop - start for start, stop in pairwise(bounds)]
    counts: list[int] = ids_NE.flatten().bincount(minlength=num_experts).tolist()
    return counts
