"""The loss of a head with an ``lm_head`` of its own: soft cross-entropy over its draft vocabulary.

``sum_a w_a * sum_{v in W} p_a(v) * -log q_a(v)``, where ``p`` is the target's distribution over its
*whole* vocabulary and ``q`` the head's over the W ids that it can draft. A row so counts with the
mass that the target puts on the list: where the target goes elsewhere nothing can be drafted, and
nothing is learnt. (EAGLE-3's own code counts a row whole where the target's arg-max is in the list,
and not at all elsewhere.) There is no loss on the states: the head's are its own.

As in :mod:`mtp_train.losses`, logits exist for a chunk of rows at a time, and the same pass leaves
both gradients behind, that of the states and that of the head's ``lm_head``, which is summed in
fp32 over the chunks: ``row_chunk * W`` and ``W * D`` elements, never ``A * W``.

Shape legend: A active rows, R rows of one chunk, D model width, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtp_train.config import LossConfig
from mtp_train.losses import LossParts
from mtp_train.losses.objective import ActivePairs
from mtp_train.losses.softmax import log_sum_exp
from mtp_train.packing import HeadBatch


@dataclass(frozen=True)
class DraftTarget:
    """What is drafted from: the target's ``lm_head`` rows of the draft vocabulary, ``[W, D]``;
    ``is_whole`` where that is the whole vocabulary.
    """

    weight_WD: torch.Tensor
    is_whole: bool

    @classmethod
    def of(cls, lm_head_VD: torch.Tensor, ids_W: torch.Tensor | None) -> DraftTarget:
        """Rows of ``ids_W`` are copied; ``None``: all of them, shared."""
        if ids_W is None:
            return cls(lm_head_VD, True)
        return cls(lm_head_VD[ids_W.to(lm_head_VD.device)], False)


def draft_head_loss(
    states: Sequence[torch.Tensor],
    batch: HeadBatch,
    lm_head_WD: torch.Tensor,
    target: DraftTarget,
    *,
    config: LossConfig,
) -> LossParts:
    """Loss sums of one packed batch; ``lm_head_WD`` is the head's own and gets a gradient."""
    pairs = ActivePairs.of(states, batch, step_decay=config.step_decay)
    loss = draft_cross_entropy_sum(
        pairs.state_AD,
        pairs.target_AD,
        pairs.weight_A,
        lm_head_WD,
        target,
        row_chunk=config.row_chunk,
        target_lse_A=pairs.target_lse_A,
    )
    none = torch.zeros((), device=loss.device)
    return LossParts(config.logit_weight * loss, none, loss.detach())


def draft_cross_entropy_sum(
    state_AD: torch.Tensor,
    target_AD: torch.Tensor,
    weight_A: torch.Tensor,
    lm_head_WD: torch.Tensor,
    target: DraftTarget,
    *,
    row_chunk: int,
    target_lse_A: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum above, fp32 scalar; gradients flow to ``state_AD`` and ``lm_head_WD``.

    ``target_AD`` are the target's ``g``; ``target_lse_A`` (fp32, over the whole vocabulary) is
    required unless the draft vocabulary is whole. Raises ``ValueError`` without it.
    """
    if target_lse_A is None and not target.is_whole:
        raise ValueError("draft vocabulary: target_lse_A is required (the target's mass on it)")
    loss: torch.Tensor = _DraftCrossEntropy.apply(
        state_AD,
        target_AD.detach(),
        weight_A,
        lm_head_WD,
        target.weight_WD.detach(),
        None if target.is_whole else target_lse_A,
        row_chunk,
    )
    return loss


class _DraftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        state: torch.Tensor,
        target: torch.Tensor,
        weight_A: torch.Tensor,
        lm_head: torch.Tensor,
        target_head: torch.Tensor,
        target_lse: torch.Tensor | None,
        row_chunk: int,
    ) -> torch.Tensor:
        grad_state = torch.empty_like(state)
        grad_head = torch.zeros(lm_head.shape, dtype=torch.float32, device=lm_head.device)
        loss = torch.zeros((), dtype=torch.float32, device=state.device)
        for start in range(0, len(state), row_chunk):
            rows = slice(start, start + row_chunk)
            h, g = state[rows].to(lm_head.dtype), target[rows].to(target_head.dtype)
            target_logits = g @ target_head.t()
            mass_R = torch.ones(len(h), device=h.device)
            if target_lse is not None:
                mass_R = (log_sum_exp(target_logits) - target_lse[rows]).exp().clamp_(max=1.0)
            p = torch.softmax(target_logits, -1)
            logits = h @ lm_head.t()
            lse = log_sum_exp(logits)
            q = torch.softmax(logits, -1)
            total = p.sum(-1, dtype=torch.float32)  # 1 up to rounding, as in losses
            loss_R = mass_R * (total * lse - (p * logits).sum(-1, dtype=torch.float32))
            scale_R = mass_R * weight_A[rows]
            loss += (loss_R * weight_A[rows]).sum()
            d_logits = q.sub_(p).mul_(scale_R[:, None].to(q.dtype))
            grad_state[rows] = d_logits @ lm_head
            grad_head += d_logits.t() @ h
        ctx.save_for_backward(grad_state, grad_head.to(lm_head.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_state, grad_head = ctx.saved_tensors
        own = (grad_state * grad_loss).to(grad_state.dtype)
        return own, None, None, (grad_head * grad_loss).to(grad_head.dtype), None, None, None
