"""Ragged causal attention for training: a per-sample prefix plus each row's own recycled chain.

Recycled step k of row i sees what a step-wise decode with a K/V cache sees: the step-0 keys of
its sample at positions ``<= i`` and the keys of its own steps ``1..k``, nobody else's. Samples
never see each other. Scores exist for one block of query rows at a time and are recomputed in the
backward pass, so memory stays linear in the rows.

Shape legend: S packed key rows, N query rows, H query heads, G key/value heads, R = H/G, C head
width, J chain length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

QUERY_BLOCK = 64  # query rows whose scores are alive at once


@dataclass(frozen=True)
class QueryBlock:
    """Query rows ``q_start:q_end`` of one sample attend to key rows ``k_start:k_end``."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int


@dataclass(frozen=True)
class AttentionPlan:
    """Blocks (host) that cover every query row, and the packed row each query sits at."""

    blocks: tuple[QueryBlock, ...]
    rows_N: torch.Tensor  # int64, device


def cut_queries(
    rows_N: torch.Tensor, cu_seqlens: tuple[int, ...], *, block: int = QUERY_BLOCK
) -> tuple[QueryBlock, ...]:
    """Cut ascending query rows (int64, host) into blocks that never cross a sample border.

    ``cu_seqlens`` are the samples' borders in packed rows, starting with 0.
    """
    borders = torch.searchsorted(rows_N, torch.tensor(cu_seqlens)).tolist()
    blocks = []
    for start, begin, end in zip(cu_seqlens, borders, borders[1:], strict=False):
        for q_start in range(begin, end, block):
            q_end = min(q_start + block, end)
            last_row = int(rows_N[q_end - 1])
            blocks.append(QueryBlock(q_start, q_end, start, last_row + 1))
    return tuple(blocks)


def prefix_chain_attention(
    q_NHC: torch.Tensor,
    k_SGC: torch.Tensor,
    v_SGC: torch.Tensor,
    plan: AttentionPlan,
    *,
    chain_k_NJGC: torch.Tensor | None = None,
    chain_v_NJGC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention over prefix and chain; ``[N, H, C]`` in q's dtype, differentiable."""
    out: torch.Tensor = _PrefixChainAttention.apply(
        q_NHC, k_SGC, v_SGC, chain_k_NJGC, chain_v_NJGC, plan
    )
    return out


def _grouped(x_nHC: torch.Tensor, num_groups: int) -> torch.Tensor:
    """``[n, G*R, C] -> [G, n*R, C]``: the query heads of a group become rows of one product."""
    n, heads, width = x_nHC.shape
    return (
        x_nHC.view(n, num_groups, heads // num_groups, width)
        .permute(1, 0, 2, 3)
        .reshape(num_groups, -1, width)
    )


def _ungrouped(x_GrC: torch.Tensor, n: int) -> torch.Tensor:
    groups, _, width = x_GrC.shape
    return x_GrC.view(groups, n, -1, width).permute(1, 0, 2, 3).reshape(n, -1, width)


def _probabilities(
    q_GrC: torch.Tensor,
    k_GLC: torch.Tensor,
    chain_GnJC: torch.Tensor | None,
    rows_n: torch.Tensor,
    k_start: int,
) -> torch.Tensor:
    """Joint softmax ``[G, n*R, L + J]`` over prefix keys at rows ``<= row`` and the own chain."""
    groups, num_rows, width = q_GrC.shape
    n, length = rows_n.numel(), k_GLC.shape[1]
    scores = torch.bmm(q_GrC, k_GLC.transpose(1, 2))
    hidden_nL = torch.arange(k_start, k_start + length, device=rows_n.device) > rows_n[:, None]
    scores.view(groups, n, -1, length).masked_fill_(hidden_nL[:, None], float("-inf"))
    if chain_GnJC is not None:
        own = torch.matmul(q_GrC.view(groups, n, -1, width), chain_GnJC.transpose(2, 3))
        scores = torch.cat((scores, own.view(groups, num_rows, -1)), dim=-1)
    return torch.softmax(scores, dim=-1)


class _PrefixChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_NHC: torch.Tensor,
        k_SGC: torch.Tensor,
        v_SGC: torch.Tensor,
        chain_k: torch.Tensor | None,
        chain_v: torch.Tensor | None,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        groups = k_SGC.shape[1]
        q_scaled = q_NHC * q_NHC.shape[-1] ** -0.5
        out = torch.empty_like(q_NHC)
        for b in plan.blocks:
            n, length = b.q_end - b.q_start, b.k_end - b.k_start
            chain = None if chain_k is None else chain_k[b.q_start : b.q_end].permute(2, 0, 1, 3)
            probs = _probabilities(
                _grouped(q_scaled[b.q_start : b.q_end], groups),
                k_SGC[b.k_start : b.k_end].transpose(0, 1),
                chain,
                plan.rows_N[b.q_start : b.q_end],
                b.k_start,
            )
            mixed = torch.bmm(probs[..., :length], v_SGC[b.k_start : b.k_end].transpose(0, 1))
            if chain_v is not None:
                own = probs[..., length:].view(groups, n, -1, chain_v.shape[1])
                values = chain_v[b.q_start : b.q_end].permute(2, 0, 1, 3)
                mixed = mixed + torch.matmul(own, values).view_as(mixed)
            out[b.q_start : b.q_end] = _ungrouped(mixed, n)
        ctx.save_for_backward(q_scaled, k_SGC, v_SGC, chain_k, chain_v, out)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_scaled, k_SGC, v_SGC, chain_k, chain_v, out = ctx.saved_tensors
        groups, width = k_SGC.shape[1:]
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q_scaled, k_SGC, v_SGC))
        grad_ck = None if chain_k is None else torch.empty_like(chain_k)
        grad_cv = None if chain_v is None else torch.empty_like(chain_v)
        for b in ctx.plan.blocks:
            rows, keys = slice(b.q_start, b.q_end), slice(b.k_start, b.k_end)
            n, length = b.q_end - b.q_start, b.k_end - b.k_start
            q, go = _grouped(q_scaled[rows], groups), _grouped(grad_out[rows], groups)
            k, v = k_SGC[keys].transpose(0, 1), v_SGC[keys].transpose(0, 1)
            chain = None if chain_k is None else chain_k[rows].permute(2, 0, 1, 3)
            probs = _probabilities(q, k, chain, ctx.plan.rows_N[rows], b.k_start)
            # softmax backward: dS = P * (dP - sum(dO * O))
            dot = (go.float() * _grouped(out[rows], groups).float()).sum(-1, keepdim=True)
            dot = dot.to(go.dtype)
            d_scores = torch.bmm(go, v.transpose(1, 2)).sub_(dot).mul_(probs[..., :length])
            d_q = torch.bmm(d_scores, k)
            grad_k[keys] += torch.bmm(d_scores.transpose(1, 2), q).transpose(0, 1)
            grad_v[keys] += torch.bmm(probs[..., :length].transpose(1, 2), go).transpose(0, 1)
            if chain is not None and grad_ck is not None and grad_cv is not None:
                own = probs[..., length:].view(groups, n, -1, chain.shape[2])
                go_n, q_n = go.view(groups, n, -1, width), q.view(groups, n, -1, width)
                values = chain_v[rows].permute(2, 0, 1, 3)
                d_own = torch.matmul(go_n, values.transpose(2, 3))
                d_own = (d_own - dot.view(groups, n, -1, 1)) * own
                d_q = d_q + torch.matmul(d_own, chain).view_as(d_q)
                grad_ck[rows] = torch.matmul(d_own.transpose(2, 3), q_n).permute(1, 2, 0, 3)
                grad_cv[rows] = torch.matmul(own.transpose(2, 3), go_n).permute(1, 2, 0, 3)
            grad_q[rows] = _ungrouped(d_q, n)
        grad_q *= width**-0.5
        return grad_q, grad_k, grad_v, grad_ck, grad_cv, None
