"""Attention in blocks of query rows: one joint softmax over prefix and chain, in plain torch.

Scores exist for one block of query rows at a time and are recomputed in the backward pass, so
memory stays linear in the rows. Prefix and chain share one softmax, so there is no log-sum-exp to
merge and no gradient of one to lose. Any device, any float dtype.

Shape legend: S packed key rows, N query rows, n query rows of one block, L key rows of one block, H
query heads, G key/value heads, R = H/G, C head width, J chain length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mtp_train.attention.base import TrainingAttention
from mtp_train.attention.plan import AttentionPlan, ChainStep


class BlockwiseAttention(TrainingAttention):
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
        out: torch.Tensor = _Blockwise.apply(q_NHC, k_SGC, v_SGC, plan, rows, *keys, *values)
        return out


BLOCKWISE = BlockwiseAttention()


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


def _own(
    parts: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], block: slice
) -> torch.Tensor | None:
    """One block's own chain entries, ``[G, n, J, C]``; None without a chain."""
    if not parts:
        return None
    picked = [part[index[block]] for part, index in zip(parts, rows, strict=True)]
    return torch.stack(picked, 1).permute(2, 0, 1, 3)


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


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_NHC: torch.Tensor,
        k_SGC: torch.Tensor,
        v_SGC: torch.Tensor,
        plan: AttentionPlan,
        rows: tuple[torch.Tensor, ...],
        *chain: torch.Tensor,
    ) -> torch.Tensor:
        groups = k_SGC.shape[1]
        chain_k, chain_v = chain[: len(rows)], chain[len(rows) :]
        q_scaled = q_NHC * q_NHC.shape[-1] ** -0.5
        out = torch.empty_like(q_NHC)
        for b in plan.blocks:
            block = slice(b.q_start, b.q_end)
            n, length = b.q_end - b.q_start, b.k_end - b.k_start
            probs = _probabilities(
                _grouped(q_scaled[block], groups),
                k_SGC[b.k_start : b.k_end].transpose(0, 1),
                _own(chain_k, rows, block),
                plan.rows_N[block],
                b.k_start,
            )
            mixed = torch.bmm(probs[..., :length], v_SGC[b.k_start : b.k_end].transpose(0, 1))
            values = _own(chain_v, rows, block)
            if values is not None:
                own = probs[..., length:].view(groups, n, -1, len(rows))
                mixed = mixed + torch.matmul(own, values).view_as(mixed)
            out[block] = _ungrouped(mixed, n)
        ctx.save_for_backward(q_scaled, k_SGC, v_SGC, out, *rows, *chain)
        ctx.plan, ctx.num_steps = plan, len(rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_scaled, k_SGC, v_SGC, out, *rest = ctx.saved_tensors
        count = ctx.num_steps
        rows, chain_k, chain_v = rest[:count], rest[count : 2 * count], rest[2 * count :]
        groups, width = k_SGC.shape[1:]
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q_scaled, k_SGC, v_SGC))
        grad_ck, grad_cv = ([torch.zeros_like(x) for x in xs] for xs in (chain_k, chain_v))
        for b in ctx.plan.blocks:
            block, keys = slice(b.q_start, b.q_end), slice(b.k_start, b.k_end)
            n, length = b.q_end - b.q_start, b.k_end - b.k_start
            q, go = _grouped(q_scaled[block], groups), _grouped(grad_out[block], groups)
            k, v = k_SGC[keys].transpose(0, 1), v_SGC[keys].transpose(0, 1)
            chain = _own(chain_k, rows, block)
            probs = _probabilities(q, k, chain, ctx.plan.rows_N[block], b.k_start)
            # softmax backward: dS = P * (dP - sum(dO * O))
            wide = torch.promote_types(go.dtype, torch.float32)
            dot = (go.to(wide) * _grouped(out[block], groups).to(wide)).sum(-1, keepdim=True)
            dot = dot.to(go.dtype)
            d_scores = torch.bmm(go, v.transpose(1, 2)).sub_(dot).mul_(probs[..., :length])
            d_q = torch.bmm(d_scores, k)
            grad_k[keys] += torch.bmm(d_scores.transpose(1, 2), q).transpose(0, 1)
            grad_v[keys] += torch.bmm(probs[..., :length].transpose(1, 2), go).transpose(0, 1)
            values = _own(chain_v, rows, block)
            if chain is not None and values is not None:
                own = probs[..., length:].view(groups, n, -1, count)
                go_n, q_n = go.view(groups, n, -1, width), q.view(groups, n, -1, width)
                d_own = torch.matmul(go_n, values.transpose(2, 3))
                d_own = (d_own - dot.view(groups, n, -1, 1)) * own
                d_q = d_q + torch.matmul(d_own, chain).view_as(d_q)
                d_k = torch.matmul(d_own.transpose(2, 3), q_n).permute(2, 1, 0, 3)
                d_v = torch.matmul(own.transpose(2, 3), go_n).permute(2, 1, 0, 3)
                for number, index in enumerate(rows):
                    grad_ck[number][index[block]] = d_k[number]
                    grad_cv[number][index[block]] = d_v[number]
            grad_q[block] = _ungrouped(d_q, n)
        grad_q *= width**-0.5
        return grad_q, grad_k, grad_v, None, None, *grad_ck, *grad_cv
