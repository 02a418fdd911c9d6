"""Log-sum-exps and shares of a softmax, over logits of any float dtype, in fp32 where it counts.

Shape legend: A active rows, R rows of one chunk, D model width, V vocabulary.
"""

from __future__ import annotations

import torch

_FP32_BLOCK = 1 << 19  # elements that are widened at once


@torch.no_grad()
def target_log_normaliser(
    target_AD: torch.Tensor, lm_head_VD: torch.Tensor, *, row_chunk: int
) -> torch.Tensor:
    """fp32 ``[A]``: log-sum-exp of ``lm_head(target)`` over the whole vocabulary."""
    out = torch.empty(len(target_AD), dtype=torch.float32, device=target_AD.device)
    for start in range(0, len(target_AD), row_chunk):
        logits = target_AD[start : start + row_chunk] @ lm_head_VD.t()
        out[start : start + row_chunk] = log_sum_exp(logits)
    return out


def log_sum_exp(logits_RV: torch.Tensor) -> torch.Tensor:
    """fp32 ``[R]``, computed in fp32 a few rows at a time (bf16 would round the result by 2^-9 of
    its size, several per cent of a probability) so that the copy stays in the cache.
    """
    if logits_RV.dtype == torch.float32:
        return torch.logsumexp(logits_RV, -1)
    return torch.cat([torch.logsumexp(part.float(), -1) for part in _few_rows(logits_RV)])


def row_sums(values_RC: torch.Tensor) -> torch.Tensor:
    """fp32 ``[R]``, summed in fp32. A CPU's reductions from one dtype to another are eight times
    slower than widening a few rows at a time.
    """
    if values_RC.dtype == torch.float32 or not values_RC.is_cpu:
        return values_RC.sum(-1, dtype=torch.float32)
    return torch.cat([part.float().sum(-1) for part in _few_rows(values_RC)])


def _few_rows(values_RC: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pieces whose fp32 copies stay in the cache."""
    return values_RC.split(max(1, _FP32_BLOCK // values_RC.shape[-1]))


def log_normaliser(logits_RV: torch.Tensor, probs_RV: torch.Tensor) -> torch.Tensor:
    """fp32 log-sum-exp of logits whose softmax is known: two maxima instead of another exp pass."""
    return logits_RV.amax(-1).float() - probs_RV.amax(-1).float().log()


def share_of_softmax(logits: torch.Tensor, lse: torch.Tensor, *, out: torch.Tensor) -> None:
    """``exp(logits - lse)`` through a softmax, whose exponents stay in fp32 inside."""
    torch.softmax(logits, -1, out=out)
    share = (log_normaliser(logits, out) - lse).exp()
    out.mul_(share[:, None].to(out.dtype))
