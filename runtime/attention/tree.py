"""Attention of tree rows with torch operators: prefix, block, merge.

Rows of a tree see the whole prefix and, of the block of rows behind it, only their ancestors. The
mask covers that block alone; the prefix is attended to without one, whatever its length.

Shape legend: N rows, B requests, S rows of a request, J block rows (new ones last), T keys, H query
heads, G key/value heads, R = H/G, C head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.attention.merge import attend_part, merge_parts
from runtime.batch import ForwardBatch, upload
from runtime.kv_cache import KVPool, KvRows, SlotTable


@dataclass(frozen=True)
class Prefix:
    """Where the prefix of one request is: a run of slots, or an index."""

    length: int
    slot_start: int | None
    slots_T: torch.Tensor | None


@dataclass(frozen=True)
class TreePlan:
    """Host plan of one forward over tree rows."""

    prefixes: tuple[Prefix, ...]
    block_slots_BJ: torch.Tensor  # flattened
    write_slots_N: torch.Tensor
    visible_B1S1J: torch.Tensor


def plan_tree(batch: ForwardBatch, table: SlotTable) -> TreePlan:
    """Plan ``batch``, whose ``visible_BSJ`` is set."""
    visible_BSJ = batch.visible_BSJ
    assert visible_BSJ is not None, "not a tree batch"
    count, num_rows, block_len = visible_BSJ.shape
    assert batch.q_lens == (num_rows,) * count, "every request has the mask's number of rows"
    device = batch.write_slots_N.device
    prefixes, block_slots = [], []
    for row, kv_len in zip(batch.table_rows, batch.kv_lens, strict=True):
        length = kv_len - block_len
        slot_start = table.contiguous_start(row, length) if length else 0
        slots = None if slot_start is not None else upload(table.slots(row, 0, length), device)
        prefixes.append(Prefix(length, slot_start, slots))
        block_slots.append(table.slots(row, length, kv_len))
    return TreePlan(
        prefixes=tuple(prefixes),
        block_slots_BJ=upload(torch.cat(block_slots), device),
        write_slots_N=batch.write_slots_N,
        visible_B1S1J=visible_BSJ[:, None, :, None],
    )


def run_tree(
    plan: TreePlan,
    pool: KVPool,
    layer: int,
    q_NHC: torch.Tensor,
    k_NGC: torch.Tensor,
    v_NGC: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Store the rows' K/V and attend; ``[N, H, C]``. ``scale`` of scores: 1/sqrt(C) if ``None``."""
    keys, values = pool.store(layer, plan.write_slots_N, k_NGC, v_NGC)
    count, _, num_rows, _, block_len = plan.visible_B1S1J.shape
    _, num_heads, width = q_NHC.shape
    num_kv_heads = keys.shape[1]
    repeat = num_heads // num_kv_heads
    shape = (count, num_rows, num_kv_heads, repeat, width)
    visible = plan.visible_B1S1J.expand(-1, -1, -1, repeat, -1).reshape(count, 1, -1, block_len)
    q = q_NHC.reshape(shape).transpose(1, 2).reshape(count, num_kv_heads, -1, width)

    block_k, block_v = (
        stored.index_select(0, plan.block_slots_BJ)
        .view(count, -1, num_kv_heads, width)
        .transpose(1, 2)
        for stored in (keys, values)
    )
    out, lse = attend_part(q, block_k, block_v, is_visible=visible, scale=scale)
    parts = []
    for index, prefix in enumerate(plan.prefixes):
        if not prefix.length:
            parts.append(out[index : index + 1])
            continue
        own = slice(index, index + 1)
        k, v = (_prefix_rows(stored, prefix).transpose(0, 1)[None] for stored in (keys, values))
        parts.append(merge_parts(*attend_part(q[own], k, v, scale=scale), out[own], lse[own]))
    merged = parts[0] if count == 1 else torch.cat(parts)
    return (
        merged.reshape(count, num_kv_heads, num_rows, -1, width)
        .transpose(1, 2)
        .reshape(count * num_rows, num_heads, width)
    )


def _prefix_rows(stored: KvRows, prefix: Prefix) -> torch.Tensor:
    if prefix.slot_start is not None:
        return stored[prefix.slot_start : prefix.slot_start + prefix.length]
    assert prefix.slots_T is not None, "prefix has neither a run nor slots"
    return stored.index_select(0, prefix.slots_T)
