"""Attention through ``scaled_dot_product_attention``: CPU and any GPU, and the oracle for other
backends.

Key/value heads are never repeated. One query row: the ``H/G`` query heads of a group become the
rows of one product over that group's keys. More rows: keys are viewed as ``[G, 1, kv, C]`` and
expanded with stride 0.

Shape legend: N rows, B requests, H query heads, G key/value heads, R = H/G, C head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from runtime.attention.base import AttentionBackend
from runtime.attention.masks import causal_mask
from runtime.batch import ForwardBatch
from runtime.kv_cache import KVPool, SlotTable


@dataclass(frozen=True)
class SdpaRequest:
    """One request of a batch: its rows, and where its keys are (a run of slots, or an index)."""

    row_start: int
    q_len: int
    kv_len: int
    slot_start: int | None
    slots_T: torch.Tensor | None


@dataclass
class SdpaPlan:
    """Host plan of one forward. ``masks`` is filled by the first layer and shared by the others."""

    requests: tuple[SdpaRequest, ...]
    write_slots_N: torch.Tensor
    write_start: int | None  # all rows of the batch go to one run of slots from here
    masks: dict[tuple[int, int], torch.Tensor]


class SdpaBackend(AttentionBackend):
    """See the module docstring. Stateless: one instance may serve several models."""

    def plan(self, batch: ForwardBatch, table: SlotTable) -> SdpaPlan:
        device = batch.write_slots_N.device
        requests = []
        start = 0
        for row, q_len, kv_len in zip(batch.table_rows, batch.q_lens, batch.kv_lens, strict=True):
            slot_start = table.contiguous_start(row, kv_len)
            slots = None
            if slot_start is None:
                slots = table.slots(row, 0, kv_len).to(device, non_blocking=True)
            requests.append(SdpaRequest(start, q_len, kv_len, slot_start, slots))
            start += q_len
        assert start == batch.write_slots_N.shape[0], (
            f"{start} query rows planned, batch has {batch.write_slots_N.shape[0]}"
        )
        write_start = None
        if len(requests) == 1 and requests[0].slot_start is not None:
            only = requests[0]
            write_start = requests[0].slot_start + only.kv_len - only.q_len
        return SdpaPlan(tuple(requests), batch.write_slots_N, write_start, {})

    def run(
        self,
        plan: SdpaPlan,
        pool: KVPool,
        layer: int,
        q_NHC: torch.Tensor,
        k_NGC: torch.Tensor,
        v_NGC: torch.Tensor,
    ) -> torch.Tensor:
        keys, values = pool.k[layer], pool.v[layer]
        if plan.write_start is not None:
            stop = plan.write_start + k_NGC.shape[0]
            keys[plan.write_start : stop] = k_NGC
            values[plan.write_start : stop] = v_NGC
        else:
            keys.index_copy_(0, plan.write_slots_N, k_NGC)
            values.index_copy_(0, plan.write_slots_N, v_NGC)
        out_NHC = torch.empty_like(q_NHC, memory_format=torch.contiguous_format)
        for request in plan.requests:
            rows = slice(request.row_start, request.row_start + request.q_len)
            if request.slot_start is not None:
                k_TGC = keys[request.slot_start : request.slot_start + request.kv_len]
                v_TGC = values[request.slot_start : request.slot_start + request.kv_len]
            else:
                assert request.slots_T is not None, "request has neither a run nor slots"
                k_TGC = keys.index_select(0, request.slots_T)
                v_TGC = values.index_select(0, request.slots_T)
            if request.q_len == 1:
                out_NHC[rows] = _attend_one_row(q_NHC[rows], k_TGC, v_TGC)
            else:
                _attend_rows(q_NHC[rows], k_TGC, v_TGC, plan.masks, out_NHC[rows])
        return out_NHC


def _attend_one_row(q_1HC: torch.Tensor, k_TGC: torch.Tensor, v_TGC: torch.Tensor) -> torch.Tensor:
    """One row sees every key: no mask, heads of a group are rows of one product."""
    _, num_heads, head_dim = q_1HC.shape
    num_kv_heads = k_TGC.shape[1]
    out_GRC = F.scaled_dot_product_attention(
        q_1HC.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim),
        k_TGC.transpose(0, 1)[None],
        v_TGC.transpose(0, 1)[None],
    )
    return out_GRC.reshape(1, num_heads, head_dim)


def _attend_rows(
    q_SHC: torch.Tensor,
    k_TGC: torch.Tensor,
    v_TGC: torch.Tensor,
    masks: dict[tuple[int, int], torch.Tensor],
    out_SHC: torch.Tensor,
) -> None:
    q_len, num_heads, head_dim = q_SHC.shape
    kv_len, num_kv_heads, _ = k_TGC.shape
    group = num_heads // num_kv_heads
    q_GRSC = q_SHC.view(q_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, group, kv_len, head_dim)
    k_GRTC = k_TGC.transpose(0, 1)[:, None].expand(shape)
    v_GRTC = v_TGC.transpose(0, 1)[:, None].expand(shape)
    if q_len == kv_len:
        out_GRSC = F.scaled_dot_product_attention(q_GRSC, k_GRTC, v_GRTC, is_causal=True)
    else:
        key = (q_len, kv_len)
        if key not in masks:
            masks[key] = causal_mask(q_len, kv_len, dtype=q_SHC.dtype, device=q_SHC.device)
        out_GRSC = F.scaled_dot_product_attention(q_GRSC, k_GRTC, v_GRTC, attn_mask=masks[key])
    out_SHC.view(q_len, num_kv_heads, group, head_dim).copy_(out_GRSC.permute(2, 0, 1, 3))
