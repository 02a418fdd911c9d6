"""Attention through ``scaled_dot_product_attention``: CPU and any GPU, oracle of other backends.

Key/value heads are never repeated: either the ``R = H/G`` query heads of a group become rows of one
product over that group's keys, or keys are viewed as ``[G, 1, T, C]`` and expanded with stride 0.

Three ways, chosen per request on the host: several requests with equally few rows (decoding,
verification) are gathered into one padded call; a lone single row needs no mask; many rows
(prompt chunks) run request by request, on a CPU in blocks of rows, because its kernel computes
hidden keys too. Rows of a draft tree are the matter of ``tree.py``.

Shape legend: N rows, B requests, S rows of a request, T keys, H query heads, G key/value heads,
R = H/G, C head width.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from runtime.attention.base import AttentionBackend
from runtime.attention.masks import causal_mask, padded_causal_mask
from runtime.attention.tree import TreePlan, plan_tree, run_tree
from runtime.batch import ForwardBatch, upload
from runtime.kv_cache import KVPool, KvRows, SlotTable

_MAX_GROUPED_ROWS = 16  # rows per request up to which requests are gathered into one call
_CPU_ROW_BLOCK = 128


@dataclass(frozen=True)
class RequestRows:
    """One request: its rows, and where its keys are (a run of slots, or an index)."""

    row_start: int
    q_len: int
    kv_len: int
    slot_start: int | None
    slots_T: torch.Tensor | None


@dataclass(frozen=True)
class RequestGroup:
    """Requests with equally many rows, padded to the longest.

    Padding is masked, but the kernel still multiplies it by zero, and ``0 * NaN`` is NaN: it
    repeats the request's own first slot, so that nobody reads anything of another request.
    """

    q_len: int
    kv_lens: tuple[int, ...]
    rows_BS: torch.Tensor | None  # flattened; None: the group is the whole batch, in order
    slots_BT: torch.Tensor  # flattened


@dataclass(frozen=True)
class SdpaPlan:
    """Host plan of one forward. ``masks`` is filled by the first layer and shared by the others."""

    requests: tuple[RequestRows, ...]
    groups: tuple[RequestGroup, ...]
    write_slots_N: torch.Tensor
    write_start: int | None  # all rows of the batch go to one run of slots from here
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)


class SdpaBackend(AttentionBackend):
    """See the module docstring. Holds shapes only: one instance may serve several models."""

    has_latent = True

    def plan(self, batch: ForwardBatch, table: SlotTable) -> SdpaPlan | TreePlan:
        if batch.visible_BSJ is not None:
            return plan_tree(batch, table)
        starts = [0]
        for q_len in batch.q_lens:
            starts.append(starts[-1] + q_len)
        assert starts[-1] == batch.write_slots_N.shape[0], (
            f"{starts[-1]} query rows planned, batch has {batch.write_slots_N.shape[0]}"
        )
        by_rows: dict[int, list[int]] = defaultdict(list)
        for index, q_len in enumerate(batch.q_lens):
            by_rows[q_len].append(index)
        requests: list[RequestRows] = []
        groups: list[RequestGroup] = []
        for q_len, members in by_rows.items():
            if q_len <= _MAX_GROUPED_ROWS and len(members) > 1:
                groups.append(_plan_group(batch, table, members, starts))
            else:
                requests.extend(_plan_request(batch, table, b, starts[b]) for b in members)
        write_start = None
        if len(batch.q_lens) == 1 and requests[0].slot_start is not None:
            only = requests[0]
            write_start = requests[0].slot_start + only.kv_len - only.q_len
        return SdpaPlan(tuple(requests), tuple(groups), batch.write_slots_N, write_start)

    def run(
        self,
        plan: SdpaPlan | TreePlan,
        pool: KVPool,
        layer: int,
        q_NHC: torch.Tensor,
        k_NGC: torch.Tensor,
        v_NGC: torch.Tensor,
    ) -> torch.Tensor:
        return self._run(plan, pool, layer, q_NHC, k_NGC, v_NGC, scale=None)

    def run_latent(
        self,
        plan: SdpaPlan | TreePlan,
        pool: KVPool,
        layer: int,
        q_NHC: torch.Tensor,
        latent_N1C: torch.Tensor,
        *,
        scale: float,
    ) -> torch.Tensor:
        return self._run(plan, pool, layer, q_NHC, latent_N1C, latent_N1C, scale=scale)

    def _run(
        self,
        plan: SdpaPlan | TreePlan,
        pool: KVPool,
        layer: int,
        q_NHC: torch.Tensor,
        k_NGC: torch.Tensor,
        v_NGC: torch.Tensor,
        *,
        scale: float | None,
    ) -> torch.Tensor:
        if isinstance(plan, TreePlan):
            return run_tree(plan, pool, layer, q_NHC, k_NGC, v_NGC, scale=scale)
        if plan.write_start is not None:
            keys, values = pool.store_run(layer, plan.write_start, k_NGC, v_NGC)
        else:
            keys, values = pool.store(layer, plan.write_slots_N, k_NGC, v_NGC)
        out_NHC = q_NHC.new_empty(q_NHC.shape)
        for group in plan.groups:
            q_rows = q_NHC if group.rows_BS is None else q_NHC.index_select(0, group.rows_BS)
            attended = _attend_group(group, q_rows, keys, values, plan.masks, scale)
            if group.rows_BS is None:
                return attended
            out_NHC.index_copy_(0, group.rows_BS, attended)
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
                out_NHC[rows] = _attend_one_row(q_NHC[rows], k_TGC, v_TGC, scale)
            else:
                _attend_rows(q_NHC[rows], k_TGC, v_TGC, plan.masks, out_NHC[rows], scale)
        return out_NHC


def _plan_request(batch: ForwardBatch, table: SlotTable, index: int, row_start: int) -> RequestRows:
    row, kv_len = batch.table_rows[index], batch.kv_lens[index]
    slot_start = table.contiguous_start(row, kv_len)
    slots = None
    if slot_start is None:
        slots = upload(table.slots(row, 0, kv_len), batch.write_slots_N.device)
    return RequestRows(row_start, batch.q_lens[index], kv_len, slot_start, slots)


def _plan_group(
    batch: ForwardBatch, table: SlotTable, members: list[int], starts: list[int]
) -> RequestGroup:
    device = batch.write_slots_N.device
    q_len = batch.q_lens[members[0]]
    kv_lens = tuple(batch.kv_lens[b] for b in members)
    lens_B = torch.tensor(kv_lens)
    slots_BT = table.slots_RT[[batch.table_rows[b] for b in members], : max(kv_lens)]
    is_padding_BT = torch.arange(max(kv_lens)) >= lens_B[:, None]
    slots_BT = torch.where(is_padding_BT, slots_BT[:, :1], slots_BT)
    rows_BS = None
    if len(members) < len(batch.q_lens):
        first_rows = torch.tensor([starts[b] for b in members])
        rows_BS = upload((first_rows[:, None] + torch.arange(q_len)).flatten(), device)
    return RequestGroup(q_len, kv_lens, rows_BS, upload(slots_BT.flatten(), device))


def _attend_group(
    group: RequestGroup,
    q_NHC: torch.Tensor,
    keys: KvRows,
    values: KvRows,
    masks: dict[tuple[int, ...], torch.Tensor],
    scale: float | None,
) -> torch.Tensor:
    """Heads of a key/value head become rows: ``[B, G, S * R, C]`` over ``[B, G, T, C]``."""
    count, q_len, kv_len = len(group.kv_lens), group.q_len, max(group.kv_lens)
    _, num_heads, head_dim = q_NHC.shape
    num_kv_heads = keys.shape[1]
    repeat = num_heads // num_kv_heads
    key = (repeat, q_len, *group.kv_lens)
    if key not in masks:
        mask_BST = padded_causal_mask(q_len, group.kv_lens, dtype=q_NHC.dtype, device=q_NHC.device)
        masks[key] = (
            mask_BST[:, None, :, None]
            .expand(count, 1, q_len, repeat, kv_len)
            .reshape(count, 1, q_len * repeat, kv_len)
        )
    shape = (count, q_len, num_kv_heads, repeat, head_dim)
    q = q_NHC.reshape(shape).transpose(1, 2).reshape(count, num_kv_heads, -1, head_dim)
    k, v = (
        pool.index_select(0, group.slots_BT)
        .view(count, kv_len, num_kv_heads, head_dim)
        .transpose(1, 2)
        for pool in (keys, values)
    )
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[key], scale=scale)
    return (
        out.reshape(count, num_kv_heads, q_len, repeat, head_dim)
        .transpose(1, 2)
        .reshape(count * q_len, num_heads, head_dim)
    )


def _attend_one_row(
    q_1HC: torch.Tensor, k_TGC: torch.Tensor, v_TGC: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """One row sees every key: no mask, heads of a group are rows of one product."""
    _, num_heads, head_dim = q_1HC.shape
    num_kv_heads = k_TGC.shape[1]
    out_GRC = F.scaled_dot_product_attention(
        q_1HC.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim),
        k_TGC.transpose(0, 1)[None],
        v_TGC.transpose(0, 1)[None],
        scale=scale,
    )
    return out_GRC.reshape(1, num_heads, head_dim)


def _attend_rows(
    q_SHC: torch.Tensor,
    k_TGC: torch.Tensor,
    v_TGC: torch.Tensor,
    masks: dict[tuple[int, ...], torch.Tensor],
    out_SHC: torch.Tensor,
    scale: float | None,
) -> None:
    q_len, num_heads, head_dim = q_SHC.shape
    kv_len, num_kv_heads, _ = k_TGC.shape
    repeat = num_heads // num_kv_heads
    shape = (num_kv_heads, repeat, kv_len, head_dim)
    k_GRTC = k_TGC.transpose(0, 1)[:, None].expand(shape)
    v_GRTC = v_TGC.transpose(0, 1)[:, None].expand(shape)
    block = _CPU_ROW_BLOCK if q_SHC.device.type == "cpu" else q_len
    for start in range(0, q_len, block):
        stop = min(start + block, q_len)
        visible = kv_len - q_len + stop  # keys that the last row of the block sees
        q_GRSC = q_SHC[start:stop].unflatten(1, (num_kv_heads, repeat)).permute(1, 2, 0, 3)
        k, v = k_GRTC[:, :, :visible], v_GRTC[:, :, :visible]
        if stop - start == visible:
            out = F.scaled_dot_product_attention(q_GRSC, k, v, is_causal=True, scale=scale)
        else:
            key = (stop - start, visible)
            if key not in masks:
                masks[key] = causal_mask(*key, dtype=q_SHC.dtype, device=q_SHC.device)[None, None]
            out = F.scaled_dot_product_attention(q_GRSC, k, v, attn_mask=masks[key], scale=scale)
        out_SHC[start:stop] = out.permute(2, 0, 1, 3).reshape(stop - start, num_heads, head_dim)
