"""Attention in parts: each part returns its log-sum-exp, and parts merge into the whole.

Softmax over the union of two key sets is the average of the two softmax results, weighted by the
exponentials of their log-sum-exps. LSE is the *natural* logarithm here (FlashInfer's is base 2).

Shape legend: B batch, G heads, S rows, T keys, C head width.
"""

from __future__ import annotations

import torch


def attend_part(
    q_BGSC: torch.Tensor,
    k_BGTC: torch.Tensor,
    v_BGTC: torch.Tensor,
    *,
    is_visible: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one part of the keys: output in q's dtype and float32 LSE ``[B, G, S]``.

    ``is_visible`` (bool, broadcast to ``[B, G, S, T]``; every row sees at least one key) is for
    small parts; without it the part is unmasked. ``scale`` of scores: 1/sqrt(C) if ``None``. On a
    GPU scores are held in full.
    """
    if q_BGSC.device.type == "cpu":
        mask = None
        if is_visible is not None:
            mask = q_BGSC.new_zeros(is_visible.shape).masked_fill_(~is_visible, float("-inf"))
        # torch's own fused kernel; only this operator hands out the LSE that it computes anyway.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BGSC, k_BGTC, v_BGTC, attn_mask=mask, scale=scale
        )
        return out, lse
    return attend_in_full(q_BGSC, k_BGTC, v_BGTC, is_visible=is_visible, scale=scale)


def attend_in_full(
    q_BGSC: torch.Tensor,
    k_BGTC: torch.Tensor,
    v_BGTC: torch.Tensor,
    *,
    is_visible: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`attend_part`, with float32 scores held in full; any device."""
    scores = torch.matmul(q_BGSC.float(), k_BGTC.float().transpose(-1, -2))
    scores *= q_BGSC.shape[-1] ** -0.5 if scale is None else scale
    if is_visible is not None:
        scores = scores.masked_fill(~is_visible, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp_()
    return torch.matmul(weights, v_BGTC.float()).to(q_BGSC.dtype), lse


def merge_parts(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    """The output over the union of two disjoint key sets; ``out [..., C]``, ``lse [...]``.

    Weights and sum are float32, rounded once to ``out_a``'s dtype. An LSE may be ``-inf`` (no key
    was seen) in one of the two.
    """
    highest = torch.maximum(lse_a, lse_b)
    weight_a = (lse_a - highest).exp_()[..., None]
    weight_b = (lse_b - highest).exp_()[..., None]
    merged = out_a.float() * weight_a + out_b.float() * weight_b
    return (merged / (weight_a + weight_b)).to(out_a.dtype)
