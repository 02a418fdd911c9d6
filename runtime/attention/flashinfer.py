"""FlashInfer's paged attention on a GPU: prompts, decoding, chain verification, draft trees.

A forward is planned once on the host (``plan``: the page layout) and once per shape of heads, by
the first layer that runs (the kernel's own plan: how work is split). A target and a head of one
shape may run over one plan, one after the other.

K/V are scattered by slot before the kernel runs, as in every backend. For a captured graph
``graph_plan`` makes a plan whose wrapper reads its layout from fixed memory, and ``update``
changes what a replay attends to.

Shape legend: N rows, B requests, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.attention.base import AttentionBackend
from runtime.attention.flashinfer_tree import TreeAttention, TreePlan
from runtime.attention.flashinfer_wrappers import (
    Event,
    HeadShape,
    Kernel,
    LayoutBuffers,
    Wrapper,
    Wrappers,
)
from runtime.attention.flashinfer_xqa import XqaAttention, XqaPlan
from runtime.attention.paged import PagedLayout, page_layout
from runtime.batch import BatchMode, ForwardBatch
from runtime.kv_cache import KVPool, SlotTable


@dataclass(eq=False)
class FlashInferPlan:
    """One forward. ``wrappers`` is filled by the first layer of each model that runs over it.

    ``buffers`` are set where the forward is captured into a graph.
    """

    layout: PagedLayout
    is_decode: bool
    write_slots_N: torch.Tensor
    buffers: LayoutBuffers | None = None
    xqa: XqaPlan | None = None
    tree: TreePlan | None = None
    wrappers: dict[HeadShape, Wrapper] = field(default_factory=dict)


class FlashInferBackend(AttentionBackend):
    """``module`` is the imported package, ``new_event`` makes an event of the device's stream.

    ``kernel`` chooses FA2 or FA3 for several rows per request (``auto``: FlashInfer's own choice by
    device and dtype). ``use_xqa``: decoding and verification over pages of 16 to 128 slots go
    through the kernel that takes lengths from the device and has no plan.
    """

    plans_at_once = False  # a wrapper is planned for one batch at a time

    def __init__(
        self,
        module: Any,
        *,
        device: torch.device,
        new_event: Callable[[], Event],
        kernel: Kernel = "auto",
        use_xqa: bool = False,
    ) -> None:
        self._wrappers = Wrappers(module, device=device, kernel=kernel, new_event=new_event)
        self._tree = TreeAttention(self._wrappers)
        self._xqa = XqaAttention(module, device=device) if use_xqa else None

    def plan(self, batch: ForwardBatch, table: SlotTable) -> FlashInferPlan:
        if batch.attention_plan is not None:
            assert isinstance(batch.attention_plan, FlashInferPlan)
            return batch.attention_plan
        return self._new_plan(batch, table)

    def run(
        self,
        plan: FlashInferPlan,
        pool: KVPool,
        layer: int,
        q_NHC: torch.Tensor,
        k_NGC: torch.Tensor,
        v_NGC: torch.Tensor,
    ) -> torch.Tensor:
        pool.store(layer, plan.write_slots_N, k_NGC, v_NGC)
        keys, values = pool.k[layer], pool.v[layer]
        page_size = plan.layout.page_size
        if plan.xqa is not None:
            assert self._xqa is not None
            return self._xqa.run(plan.xqa, q_NHC, pool, layer, page_size)
        shape = HeadShape(q_NHC.shape[1], keys.shape[1], keys.shape[2], keys.dtype)
        if plan.tree is not None:
            return self._tree.run(plan.tree, shape, q_NHC, keys, values)
        if shape not in plan.wrappers:
            plan.wrappers[shape] = self._wrapper(plan, shape)
        wrapper = plan.wrappers[shape]
        assert wrapper.owner is plan, "the wrapper was planned for other rows since"
        paged = tuple(stored.unflatten(0, (-1, page_size)) for stored in (keys, values))
        out_NHC = torch.empty_like(q_NHC, memory_format=torch.contiguous_format)
        wrapper.kernel.run(q_NHC, paged, out=out_NHC)
        return out_NHC

    # -- graphs -----------------------------------------------------------------------------------

    def graph_plan(
        self, layout: PagedLayout, write_slots_N: torch.Tensor, *, q_len: int, max_pages: int
    ) -> FlashInferPlan:
        """A plan in fixed memory for ``layout.num_requests`` requests of ``q_len`` rows.

        ``max_pages`` bounds the pages of one request. The first forward, which must run before the
        capture, makes and plans the wrapper; ``write_slots_N`` is the caller's own fixed memory.
        """
        device = self._wrappers.device
        plan = FlashInferPlan(layout, is_decode=q_len == 1, write_slots_N=write_slots_N)
        if self._xqa is not None and self._xqa.takes((q_len,), layout.page_size):
            plan.xqa = self._xqa.plan(layout, q_len, max_pages=max_pages)
            return plan
        count = layout.num_requests
        plan.buffers = LayoutBuffers.allocate(count, count * max_pages, device)
        return plan

    def update(self, plan: FlashInferPlan, layout: PagedLayout) -> None:
        """Plan ``plan`` of a captured graph again, before its replay. Never waits for long."""
        plan.layout = layout
        if plan.xqa is not None:
            assert self._xqa is not None
            self._xqa.update(plan.xqa, layout)
        for shape, wrapper in plan.wrappers.items():
            self._wrappers.plan(wrapper, layout, shape, owner=plan, is_decode=plan.is_decode)

    # -- helpers ----------------------------------------------------------------------------------

    def _new_plan(self, batch: ForwardBatch, table: SlotTable) -> FlashInferPlan:
        rows = sum(batch.q_lens)
        assert rows == batch.write_slots_N.shape[0], (
            f"{rows} query rows planned, batch has {batch.write_slots_N.shape[0]}"
        )
        layout = page_layout(
            table, table_rows=batch.table_rows, q_lens=batch.q_lens, kv_lens=batch.kv_lens
        )
        plan = FlashInferPlan(
            layout,
            is_decode=batch.mode is BatchMode.DECODE and max(batch.q_lens) == 1,
            write_slots_N=batch.write_slots_N,
        )
        if batch.visible_BSJ is not None:
            plan.tree = self._tree.plan(batch, table)
        elif (
            self._xqa is not None
            and batch.mode is not BatchMode.PREFILL
            and self._xqa.takes(batch.q_lens, table.page_size)
        ):
            plan.xqa = self._xqa.plan(layout, batch.q_lens[0])
        return plan

    def _wrapper(self, plan: FlashInferPlan, shape: HeadShape) -> Wrapper:
        if plan.buffers is None:
            wrapper = self._wrappers.take(is_decode=plan.is_decode, shape=shape)
        else:
            wrapper = self._wrappers.make(
                is_decode=plan.is_decode, shape=shape, buffers=plan.buffers
            )
        self._wrappers.plan(wrapper, plan.layout, shape, owner=plan, is_decode=plan.is_decode)
        return wrapper
