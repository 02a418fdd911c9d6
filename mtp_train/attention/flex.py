"""Attention through torch's flex attention: documents and causality as a mask of blocks, the chain
merged into it.

Flex attention returns the log-sum-exp of its part and knows its gradient, so that the merge with
the chain is plain arithmetic that autograd goes through. On a GPU it is compiled, and only tiles of
queries and keys are visited that the block mask lists; it computes float32 as well. On a CPU it
runs un-compiled over dense scores, and has no backward: that of :class:`_OnCpu` is written from the
same mask, so that the result can be compared with the other backends'. Slow there, and quadratic in
memory.

Shape legend: S packed key rows, N query rows, H query heads, G key/value heads, R = H/G, C head
width, J chain length, T tiles of query rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from mtp_train.attention.base import TrainingAttention
from mtp_train.attention.plan import AttentionPlan, ChainStep, picked, sample_spans

TILE = 128  # rows of queries and of keys that are visited together or not at all

Flex = Callable[..., Any]


class FlexAttention(TrainingAttention):
    """``flex``: the function, compiled on a GPU; ``None`` takes the un-compiled one of a CPU."""

    def __init__(self, flex: Flex | None) -> None:
        self._flex = flex

    @classmethod
    def on(cls, device: torch.device) -> FlexAttention:
        """Compiled at its first call on a GPU, once for all lengths."""
        if device.type == "cpu":
            return cls(None)
        return cls(torch.compile(flex_attention, dynamic=True))

    def __call__(
        self,
        q_NHC: torch.Tensor,
        k_SGC: torch.Tensor,
        v_SGC: torch.Tensor,
        plan: AttentionPlan,
        chain: Sequence[ChainStep] = (),
    ) -> torch.Tensor:
        mask = block_mask(plan, num_keys=len(k_SGC))
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHC, k_SGC, v_SGC))
        if self._flex is None:
            out, lse = _OnCpu.apply(q, k, v, mask)
        else:
            out, lse = _attend(self._flex, q, k, v, mask)
        out_NHC, lse_NH = out[0].transpose(0, 1), lse[0].t()
        return _merge(out_NHC, lse_NH, q_NHC, chain) if chain else out_NHC.to(q_NHC.dtype)


def _attend(
    flex: Flex, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask
) -> tuple[torch.Tensor, torch.Tensor]:
    out, aux = flex(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def _merge(
    out_NHC: torch.Tensor, lse_NH: torch.Tensor, q_NHC: torch.Tensor, chain: Sequence[ChainStep]
) -> torch.Tensor:
    """One softmax over prefix and chain, from the prefix's output and log-sum-exp."""
    num, heads, width = q_NHC.shape
    rows = [step.rows_N for step in chain]
    keys_NGJC = picked([step.k_MGC for step in chain], rows)
    values_NGJC = picked([step.v_MGC for step in chain], rows)
    q_NGRC = q_NHC.view(num, keys_NGJC.shape[1], -1, width)
    wide = torch.promote_types(q_NHC.dtype, torch.float32)
    scores = torch.matmul(q_NGRC, keys_NGJC.transpose(2, 3)).to(wide) * width**-0.5
    prefix_lse = lse_NH.reshape(*q_NGRC.shape[:3], 1).to(wide)
    joint = torch.logaddexp(prefix_lse, scores.logsumexp(-1, keepdim=True))
    mixed = (scores - joint).exp().to(q_NHC.dtype) @ values_NGJC
    share = (prefix_lse - joint).exp().to(q_NHC.dtype)
    return (out_NHC.reshape(q_NGRC.shape) * share + mixed).view(num, heads, width)


def block_mask(plan: AttentionPlan, *, num_keys: int) -> BlockMask:
    """A query sees its own sample's rows up to its own.

    Which tiles that is follows on the host from the plan's blocks: the keys of a tile of queries
    run from the first one's sample to the last one's row. No mask over all pairs is made.
    """
    device, spans = plan.rows_N.device, sample_spans(plan.blocks)
    num_queries = spans[-1].q_end
    counts = torch.tensor([span.q_end - span.q_start for span in spans])
    starts_N = torch.tensor([span.k_start for span in spans]).repeat_interleave(counts)
    first_T = starts_N[::TILE] // TILE
    bounds = [(min(start + TILE, num_queries) - 1) for start in range(0, num_queries, TILE)]
    last_T = _last_rows(plan)[bounds] // TILE
    counts_T = last_T - first_T + 1
    width = -(-num_keys // TILE)
    indices = torch.arange(width).expand(len(first_T), -1) + first_T[:, None]
    indices = torch.where(torch.arange(width) < counts_T[:, None], indices, 0)
    starts_on_device, rows = starts_N.to(device), plan.rows_N

    def sees(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= starts_on_device[query]) & (key <= rows[query])

    return BlockMask.from_kv_blocks(
        counts_T.to(device, torch.int32)[None, None],
        indices.to(device, torch.int32)[None, None].contiguous(),
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(num_queries, num_keys),
    )


def _last_rows(plan: AttentionPlan) -> torch.Tensor:
    """An upper bound of every query's packed row that is exact at the end of a block, on the host
    (the rows themselves are on the device).
    """
    counts = torch.tensor([block.q_end - block.q_start for block in plan.blocks])
    ends = torch.tensor([block.k_end - 1 for block in plan.blocks])
    return ends.repeat_interleave(counts)


class _OnCpu(torch.autograd.Function):
    """Flex attention un-compiled, and the backward that it has not on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _attend(flex_attention, q.detach(), k.detach(), v.detach(), mask)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask = mask
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        groups, scale = k.shape[1], q.shape[-1] ** -0.5
        queries, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        hidden = ~ctx.mask.mask_mod(0, 0, queries, keys)
        # heads of one group together: [G, R, N, C] against [G, 1, S, C]
        q_g, out_g, go = (x[0].unflatten(0, (groups, -1)) for x in (q, out, grad_out))
        lse_g, g_lse = (x[0].unflatten(0, (groups, -1))[..., None] for x in (lse, grad_lse))
        k_g, v_g = k[0][:, None], v[0][:, None]
        probs = (q_g @ k_g.mT * scale - lse_g).masked_fill(hidden, float("-inf")).exp()
        dot = (go * out_g).sum(-1, keepdim=True)
        d_scores = probs * (go @ v_g.mT - dot + g_lse) * scale
        d_q = (d_scores @ k_g).flatten(0, 1)[None]
        d_k = (d_scores.mT @ q_g).sum(1)[None]
        d_v = (probs.mT @ go).sum(1)[None]
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None
