"""Attention through flash-type kernels: a causal part by the kernel, the chain merged into it.

A flash kernel returns its part's output and log-sum-exp, and its backward knows no gradient of the
log-sum-exp. It is folded in: the softmax over all keys is ``exp(score - joint_lse)``, and a flash
backward computes ``P = exp(score - lse)`` and ``dS = P * (dP - sum(dO * O))`` from whatever
``lse``, ``O`` and ``dO`` it is given. Given the *joint* log-sum-exp and the *joint* output, what it
returns is the exact gradient of its part of the joint softmax, the path through the log-sum-exp
included.

Shape legend: S packed key rows, N query rows, H query heads, G key/value heads, R = H/G, C head
width, J chain length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtp_train.attention.base import TrainingAttention
from mtp_train.attention.plan import AttentionPlan, ChainStep, picked


@dataclass(frozen=True)
class PrefixGradients:
    """Gradients of one prefix part, in the dtype of what they belong to."""

    q_NHC: torch.Tensor
    k_SGC: torch.Tensor
    v_SGC: torch.Tensor


class PrefixKernel(ABC):
    """Causal attention of the query rows to their sample's packed rows, without the chain."""

    @abstractmethod
    def forward(
        self, q_NHC: torch.Tensor, k_SGC: torch.Tensor, v_SGC: torch.Tensor, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``[N, H, C]`` and natural log-sum-exp of the scaled scores ``[N, H]`` (fp32, or
        q's dtype where that is wider).
        """

    @abstractmethod
    def backward(
        self,
        grad_NHC: torch.Tensor,
        q_NHC: torch.Tensor,
        k_SGC: torch.Tensor,
        v_SGC: torch.Tensor,
        plan: AttentionPlan,
        *,
        out_NHC: torch.Tensor,
        lse_NH: torch.Tensor,
    ) -> PrefixGradients:
        """Gradients with ``P = exp(score - lse)``; ``out`` and ``lse`` may be those of a softmax
        over more keys than the prefix.
        """


class FlashAttention(TrainingAttention):
    """Prefix by ``kernel``, chain merged by log-sum-exp."""

    def __init__(self, kernel: PrefixKernel) -> None:
        self._kernel = kernel

    def __call__(
        self,
        q_NHC: torch.Tensor,
        k_SGC: torch.Tensor,
        v_SGC: torch.Tensor,
        plan: AttentionPlan,
        chain: Sequence[ChainStep] = (),
    ) -> torch.Tensor:
        rows = tuple(step.rows_N for step in chain)
        keys, values = [s.k_MGC for s in chain], [s.v_MGC for s in chain]
        out: torch.Tensor = _Merged.apply(
            q_NHC, k_SGC, v_SGC, self._kernel, plan, rows, *keys, *values
        )
        return out


def _own_scores(q_NGRC: torch.Tensor, keys_NGJC: torch.Tensor, scale: float) -> torch.Tensor:
    wide = torch.promote_types(q_NGRC.dtype, torch.float32)
    return torch.matmul(q_NGRC, keys_NGJC.transpose(2, 3)).to(wide) * scale


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_NHC: torch.Tensor,
        k_SGC: torch.Tensor,
        v_SGC: torch.Tensor,
        kernel: PrefixKernel,
        plan: AttentionPlan,
        rows: tuple[torch.Tensor, ...],
        *chain: torch.Tensor,
    ) -> torch.Tensor:
        out, lse = kernel.forward(q_NHC, k_SGC, v_SGC, plan)
        if rows:
            num, heads, width = q_NHC.shape
            groups = k_SGC.shape[1]
            q = q_NHC.view(num, groups, -1, width)
            scores = _own_scores(q, picked(chain[: len(rows)], rows), width**-0.5)
            prefix_lse = lse.view(num, groups, -1, 1)
            joint = torch.logaddexp(prefix_lse, scores.logsumexp(-1, keepdim=True))
            mixed = (scores - joint).exp().to(q.dtype) @ picked(chain[len(rows) :], rows)
            share = (prefix_lse - joint).exp().to(q.dtype)
            out = (out.view_as(q) * share + mixed).view(num, heads, width)
            lse = joint.view(num, heads)
        ctx.save_for_backward(q_NHC, k_SGC, v_SGC, out, lse, *rows, *chain)
        ctx.kernel, ctx.plan, ctx.num_steps = kernel, plan, len(rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_NHC, k_SGC, v_SGC, out, lse, *rest = ctx.saved_tensors
        count = ctx.num_steps
        grad_out = grad_out.contiguous()
        part = ctx.kernel.backward(grad_out, q_NHC, k_SGC, v_SGC, ctx.plan, out_NHC=out, lse_NH=lse)
        if not count:
            return part.q_NHC, part.k_SGC, part.v_SGC, None, None, None
        rows, chain_k, chain_v = rest[:count], rest[count : 2 * count], rest[2 * count :]
        num, _, width = q_NHC.shape
        groups, scale = k_SGC.shape[1], width**-0.5
        q, go = (x.view(num, groups, -1, width) for x in (q_NHC, grad_out))
        keys, values = picked(chain_k, rows), picked(chain_v, rows)
        probs = (_own_scores(q, keys, scale) - lse.view(num, groups, -1, 1)).exp()
        dot = (go.to(probs.dtype) * out.view_as(go).to(probs.dtype)).sum(-1, keepdim=True)
        d_probs = torch.matmul(go, values.transpose(2, 3)).to(probs.dtype)
        d_scores = ((d_probs - dot) * probs * scale).to(q.dtype)
        grad_q = part.q_NHC + torch.matmul(d_scores, keys).view_as(q_NHC)
        d_k = torch.matmul(d_scores.transpose(2, 3), q)
        d_v = torch.matmul(probs.to(q.dtype).transpose(2, 3), go)
        grad_ck, grad_cv = (
            [
                torch.zeros_like(x).index_copy_(0, index, grad[:, :, number])
                for number, (x, index) in enumerate(zip(xs, rows, strict=True))
            ]
            for xs, grad in ((chain_k, d_k), (chain_v, d_v))
        )
        return grad_q, part.k_SGC, part.v_SGC, None, None, None, *grad_ck, *grad_cv
