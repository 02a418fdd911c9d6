"""Flash-type kernels behind :class:`PrefixKernel`: torch's own for CPUs, and for NVIDIA devices.

Both want dense query rows, so a sample's queries are laid out from its first one to its last; rows
in between that nobody asked for are zero, and so is what comes back for them.

Shape legend: S packed key rows, N query rows, P laid-out query rows, H query heads, G key/value
heads, C head width.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from mtp_train.attention.flash import PrefixGradients, PrefixKernel
from mtp_train.attention.plan import AttentionPlan, QueryBlock, sample_spans


class CpuFlashKernel(PrefixKernel):
    """``_scaled_dot_product_flash_attention_for_cpu``, sample by sample, in any float dtype.

    Its causal mask starts at the first key, so keys before the first query are a part of their own;
    the parts are merged like a chain is.
    """

    def forward(
        self, q_NHC: torch.Tensor, k_SGC: torch.Tensor, v_SGC: torch.Tensor, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(q_NHC.dtype, torch.float32)
        out = torch.empty_like(q_NHC)
        lse_NH = q_NHC.new_empty(q_NHC.shape[:2], dtype=wide)
        for span in sample_spans(plan.blocks):
            own, local = _rows_of(span, plan)
            q = _laid_out(q_NHC[own], local, _width(span))
            mixed, lse = None, None
            for keys, is_causal in _parts(span):
                part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    _batched(q),
                    _batched(_repeated(k_SGC[keys], q)),
                    _batched(_repeated(v_SGC[keys], q)),
                    0.0,
                    is_causal,
                )
                part, part_lse = part[0].transpose(0, 1), part_lse[0].t().to(wide)
                if mixed is None or lse is None:
                    mixed, lse = part, part_lse
                    continue
                joint = torch.logaddexp(lse, part_lse)
                shares = ((x - joint).exp()[..., None].to(part.dtype) for x in (lse, part_lse))
                mixed = sum((x * s for x, s in zip((mixed, part), shares, strict=True)))
                lse = joint
            assert mixed is not None, "a span has keys"
            assert lse is not None, "a span has keys"
            out[own], lse_NH[own] = mixed[local], lse[local]
        return out, lse_NH

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
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q_NHC, k_SGC, v_SGC))
        for span in sample_spans(plan.blocks):
            own, local = _rows_of(span, plan)
            width = _width(span)
            q, out, grad = (_laid_out(x[own], local, width) for x in (q_NHC, out_NHC, grad_NHC))
            lse = _laid_out(lse_NH[own], local, width)
            for keys, is_causal in _parts(span):
                d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    _batched(grad),
                    _batched(q),
                    _batched(_repeated(k_SGC[keys], q)),
                    _batched(_repeated(v_SGC[keys], q)),
                    _batched(out),
                    lse.t()[None],
                    0.0,
                    is_causal,
                )
                grad_q[own] += d_q[0].transpose(0, 1)[local]
                for total, part in ((grad_k, d_k), (grad_v, d_v)):
                    rows = part[0].transpose(0, 1)
                    shape = (len(rows), k_SGC.shape[1], -1, rows.shape[-1])
                    total[keys] += rows.reshape(shape).sum(2)
        return PrefixGradients(grad_q, grad_k, grad_v)


@dataclass(frozen=True)
class _Layout:
    """Queries of all samples, dense and one behind the other, as a variable-length kernel reads
    them: sample by sample the last query sits at the last key.
    """

    places_N: torch.Tensor  # int64: where each query row is laid out
    borders_q: torch.Tensor  # int32 [samples + 1]
    borders_k: torch.Tensor
    first_key: int
    num_rows: int
    longest_q: int
    longest_k: int


class CudaFlashKernel(PrefixKernel):
    """FlashAttention over variable lengths as torch ships it (``_flash_attention_forward`` and
    ``_backward``), in bfloat16 or float16. Grouped heads are the kernel's own.

    ``operators`` has both functions under their names in ``torch.ops.aten``.
    """

    def __init__(self, operators: Any = None) -> None:
        self._operators = torch.ops.aten if operators is None else operators

    def forward(
        self, q_NHC: torch.Tensor, k_SGC: torch.Tensor, v_SGC: torch.Tensor, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout = _lay_out(plan, len(k_SGC))
        q_PHC = _laid_out(q_NHC, layout.places_N, layout.num_rows)
        out, lse_HP = self._operators._flash_attention_forward(
            q_PHC,
            k_SGC[layout.first_key :],
            v_SGC[layout.first_key :],
            layout.borders_q,
            layout.borders_k,
            layout.longest_q,
            layout.longest_k,
            0.0,
            True,
            False,
        )[:2]
        return out[layout.places_N], lse_HP.t()[layout.places_N]

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
        layout = _lay_out(plan, len(k_SGC))
        q, out, grad, lse = (
            _laid_out(x, layout.places_N, layout.num_rows)
            for x in (q_NHC, out_NHC, grad_NHC, lse_NH)
        )
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        d_q, d_k, d_v = self._operators._flash_attention_backward(
            grad,
            q,
            k_SGC[layout.first_key :],
            v_SGC[layout.first_key :],
            out,
            lse.t().contiguous(),
            layout.borders_q,
            layout.borders_k,
            layout.longest_q,
            layout.longest_k,
            0.0,
            True,
            no_dropout,
            no_dropout,
        )
        unseen = k_SGC.new_zeros(layout.first_key, *k_SGC.shape[1:])
        return PrefixGradients(
            d_q[layout.places_N], torch.cat((unseen, d_k)), torch.cat((unseen, d_v))
        )


def _lay_out(plan: AttentionPlan, num_keys: int) -> _Layout:
    """A span's keys go on to the next span's, its queries from the first one asked for as far."""
    spans = sample_spans(plan.blocks)
    ends = [span.k_start for span in spans[1:]] + [num_keys]
    lens_q = [end - span.first_row for span, end in zip(spans, ends, strict=True)]
    lens_k = [end - span.k_start for span, end in zip(spans, ends, strict=True)]
    borders_q = list(itertools.accumulate(lens_q, initial=0))
    borders_k = list(itertools.accumulate(lens_k, initial=0))
    shifts = [start - span.first_row for span, start in zip(spans, borders_q, strict=False)]
    counts = torch.tensor([span.q_end - span.q_start for span in spans])
    device = plan.rows_N.device
    return _Layout(
        places_N=plan.rows_N + torch.tensor(shifts).repeat_interleave(counts).to(device),
        borders_q=torch.tensor(borders_q, dtype=torch.int32, device=device),
        borders_k=torch.tensor(borders_k, dtype=torch.int32, device=device),
        first_key=spans[0].k_start,
        num_rows=borders_q[-1],
        longest_q=max(lens_q),
        longest_k=max(lens_k),
    )


def _rows_of(span: QueryBlock, plan: AttentionPlan) -> tuple[slice, torch.Tensor]:
    """Where one span's queries are in the batch, and where they go when they are laid out."""
    own = slice(span.q_start, span.q_end)
    return own, plan.rows_N[own] - span.first_row


def _width(span: QueryBlock) -> int:
    return span.k_end - span.first_row


def _parts(span: QueryBlock) -> list[tuple[slice, bool]]:
    """Keys before the first query, seen by all; and the square behind, with the causal mask."""
    before, square = slice(span.k_start, span.first_row), slice(span.first_row, span.k_end)
    return [(before, False)] * (span.first_row > span.k_start) + [(square, True)]


def _laid_out(x: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
    if len(x) == num_rows:
        return x.contiguous()
    return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, places, x)


def _batched(x_PHC: torch.Tensor) -> torch.Tensor:
    """``[P, H, C] -> [1, H, P, C]``."""
    return x_PHC.transpose(0, 1)[None]


def _repeated(x_LGC: torch.Tensor, q_PHC: torch.Tensor) -> torch.Tensor:
    """One key/value head per query head: the CPU kernel knows no groups."""
    return x_LGC.repeat_interleave(q_PHC.shape[1] // x_LGC.shape[1], dim=1)
