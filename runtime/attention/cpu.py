"""Paged attention on the CPU through the fused kernel: keys are read where they lie, by slot.

One call per layer stores the new K/V and attends for every request of the batch, whatever its rows.
Rows of a draft tree differ in their block of tree rows alone: its mask is read there, the prefix
has none, and the softmax, which runs over keys block by block, merges the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime.attention.base import AttentionBackend
from runtime.batch import ForwardBatch
from runtime.cpu_kernels import CpuKernels
from runtime.kv_cache import KVPool, SlotTable
from runtime.ops import RotaryAngles

if TYPE_CHECKING:
    from runtime.layers import DecoderBlock


@dataclass(frozen=True)
class CpuPlan:
    """``requests_B6`` points into ``slots_RT``, the table's own memory, and into ``visible_BSJ``:
    valid for this forward.
    """

    requests_B6: torch.Tensor
    write_slots_N: torch.Tensor
    slots_RT: torch.Tensor
    visible_BSJ: torch.Tensor | None


class CpuBackend(AttentionBackend):
    """Float32 and bfloat16. ``SdpaBackend`` is its oracle and its fallback."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def plan(self, batch: ForwardBatch, table: SlotTable) -> CpuPlan:
        slots_RT = table.slots_RT
        base, row_bytes = slots_RT.data_ptr(), slots_RT.stride(0) * slots_RT.element_size()
        visible_BSJ, block_len, mask, mask_bytes = batch.visible_BSJ, 0, 0, 0
        if visible_BSJ is not None:
            visible_BSJ = visible_BSJ.contiguous()
            block_len, mask = visible_BSJ.shape[2], visible_BSJ.data_ptr()
            mask_bytes = visible_BSJ[0].numel()  # one byte per bool
        described = []
        start = 0
        for row, q_len, kv_len in zip(batch.table_rows, batch.q_lens, batch.kv_lens, strict=True):
            described.append((start, q_len, kv_len, base + row * row_bytes, block_len, mask))
            start += q_len
            mask += mask_bytes
        assert start == batch.write_slots_N.shape[0], (
            f"{start} query rows planned, batch has {batch.write_slots_N.shape[0]}"
        )
        return CpuPlan(
            torch.tensor(described, dtype=torch.int64),
            batch.write_slots_N.contiguous(),
            slots_RT,
            visible_BSJ,
        )

    def run(
        self,
        plan: CpuPlan,
        pool: KVPool,
        layer: int,
        q_NHC: torch.Tensor,
        k_NGC: torch.Tensor,
        v_NGC: torch.Tensor,
    ) -> torch.Tensor:
        return self._kernels.attend(
            q_NHC,
            k_NGC,
            v_NGC,
            write_slots_N=plan.write_slots_N,
            pool_k=pool.k[layer],
            pool_v=pool.v[layer],
            requests_B6=plan.requests_B6,
        )

    def run_blocks(
        self,
        blocks: Sequence[DecoderBlock],
        x_ND: torch.Tensor,
        angles: RotaryAngles,
        plan: CpuPlan,
        pool: KVPool,
        first_layer: int,
    ) -> bool:
        """One call for all layers, where the blocks' linears are panels and lie on one process."""
        fused = [block.fused for block in blocks if block.fused is not None]
        if len(fused) != len(blocks):
            return False
        self._kernels.run_blocks(
            [block.pointers for block in fused],
            x_ND,
            angles,
            inner=fused[0].inner,
            num_heads=blocks[0].shape.num_heads,
            pool_k=pool.k[first_layer:],
            pool_v=pool.v[first_layer:],
            write_slots_N=plan.write_slots_N,
            requests_B6=plan.requests_B6,
        )
        return True
