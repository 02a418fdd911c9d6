"""Tree rows through FlashInfer: unmasked prefix, small masked block, merge by log-sum-exp.

A mask over the whole sequence costs time with every token of context. Here it covers the block of
tree rows alone: ``J`` keys, given to the kernel as pages of one slot, wherever the block begins.

A packed mask needs offsets in *bytes*; FlashInfer's ``plan`` copies offsets in elements beside a
mask that is given packed, which is right for one request only. So the mask's buffers are our own
(the constructor takes them) and the offsets are put right after each ``plan``.

Shape legend: N rows, B requests, S rows of a request, J keys of its block, M bytes of a request's
mask, H query heads, C head width.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from runtime.attention.flashinfer_wrappers import (
    HeadShape,
    LayoutBuffers,
    MaskBuffers,
    Wrapper,
    Wrappers,
)
from runtime.attention.paged import PagedLayout, page_layout, slot_layout
from runtime.batch import ForwardBatch
from runtime.kv_cache import SlotTable

_MAX_BLOCKS = 32  # wrappers with mask buffers that are kept; each holds 8 MB of device memory


@dataclass(eq=False)
class TreePlan:
    """One forward over tree rows: the layouts of prefix and block, and the packed mask."""

    prefix: PagedLayout
    block: PagedLayout
    num_rows: int
    block_len: int
    mask_BM: torch.Tensor
    wrappers: dict[HeadShape, tuple[Wrapper, Wrapper]] = field(default_factory=dict)


class TreeAttention:
    """Plans and runs tree batches (those with ``visible_BSJ``)."""

    def __init__(self, wrappers: Wrappers) -> None:
        self._wrappers = wrappers
        self._blocks: OrderedDict[tuple[int, int, int, HeadShape], tuple[Wrapper, MaskBuffers]]
        self._blocks = OrderedDict()

    def plan(self, batch: ForwardBatch, table: SlotTable) -> TreePlan:
        """Host layouts; packs the mask on its device. Never waits."""
        visible_BSJ = batch.visible_BSJ
        assert visible_BSJ is not None, "not a tree batch"
        count, num_rows, block_len = visible_BSJ.shape
        assert batch.q_lens == (num_rows,) * count, "every request has the mask's number of rows"
        prefix_lens = [kv_len - block_len for kv_len in batch.kv_lens]
        return TreePlan(
            prefix=page_layout(
                table, table_rows=batch.table_rows, q_lens=batch.q_lens, kv_lens=prefix_lens
            ),
            block=slot_layout(
                table,
                table_rows=batch.table_rows,
                num_rows=num_rows,
                ends=batch.kv_lens,
                count=block_len,
            ),
            num_rows=num_rows,
            block_len=block_len,
            mask_BM=pack_mask(visible_BSJ),
        )

    def run(
        self,
        plan: TreePlan,
        shape: HeadShape,
        q_NHC: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Attend over stored K/V ``[slots, G, C]`` (the new rows' included); ``[N, H, C]``."""
        if shape not in plan.wrappers:
            plan.wrappers[shape] = self._plan_wrappers(plan, shape)
        prefix, block = plan.wrappers[shape]
        for wrapper in (prefix, block):
            assert wrapper.owner is plan, "the wrapper was planned for other rows since"
        page_size = plan.prefix.page_size
        paged = tuple(stored.unflatten(0, (-1, page_size)) for stored in (keys, values))
        single = tuple(stored[:, None] for stored in (keys, values))
        out_a, lse_a = prefix.kernel.run(q_NHC, paged, return_lse=True)
        out_b, lse_b = block.kernel.run(q_NHC, single, return_lse=True)
        merged, _ = self._wrappers.module.merge_state(out_a, lse_a, out_b, lse_b)
        return merged

    def _plan_wrappers(self, plan: TreePlan, shape: HeadShape) -> tuple[Wrapper, Wrapper]:
        prefix = self._wrappers.take(is_decode=False, shape=shape)
        self._wrappers.plan(prefix, plan.prefix, shape, owner=plan, is_decode=False, causal=False)
        block, mask = self._block_wrapper(plan, shape)
        self._wrappers.plan(
            block,
            plan.block,
            shape,
            owner=plan,
            is_decode=False,
            causal=False,
            mask_bytes_M=plan.mask_BM.reshape(-1),
        )
        mask.starts_B1.copy_(_byte_starts(plan.mask_BM), non_blocking=True)
        return prefix, block

    def _block_wrapper(self, plan: TreePlan, shape: HeadShape) -> tuple[Wrapper, MaskBuffers]:
        """A wrapper with mask buffers serves one number of requests, rows and keys only."""
        count = plan.block.num_requests
        key = (count, plan.num_rows, plan.block_len, shape)
        if key not in self._blocks:
            if len(self._blocks) >= _MAX_BLOCKS:
                self._blocks.popitem(last=False)
            self._blocks[key] = self._new_block_wrapper(plan, shape)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _new_block_wrapper(self, plan: TreePlan, shape: HeadShape) -> tuple[Wrapper, MaskBuffers]:
        device, count = self._wrappers.device, plan.block.num_requests
        mask = MaskBuffers(
            bytes_M=torch.zeros(plan.mask_BM.numel(), dtype=torch.uint8, device=device),
            starts_B1=torch.zeros(count + 1, dtype=torch.int32, device=device),
        )
        buffers = LayoutBuffers.allocate(count, count * plan.block_len, device)
        wrapper = self._wrappers.make(is_decode=False, shape=shape, buffers=buffers, mask=mask)
        return wrapper, mask


def pack_mask(visible_BSJ: torch.Tensor) -> torch.Tensor:
    """Bool ``[B, S, J]`` as bytes ``[B, M]``: bit ``s * J + j`` of a request, lowest bit first.

    Every request begins at a whole byte. Runs where the mask is and never waits.
    """
    flat = visible_BSJ.flatten(1)
    flat = F.pad(flat, (0, -flat.shape[1] % 8))
    weights = 2 ** torch.arange(8, device=flat.device)
    return (flat.unflatten(1, (-1, 8)) * weights).sum(-1).to(torch.uint8)


def _byte_starts(mask_BM: torch.Tensor) -> torch.Tensor:
    count, num_bytes = mask_BM.shape
    return torch.arange(count + 1, dtype=torch.int32, device=mask_BM.device) * num_bytes
