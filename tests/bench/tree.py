"""`tree_<backend>_<context>`: attention of a verification pass over a draft tree, all layers of
SmolLM2-135M, batch 1: prefix without a mask + masked block (ours) against one mask over the whole
sequence (peer), through the same kernels.

Building the masks is part of either side. Both sides must agree before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from runtime.attention.base import AttentionBackend
from runtime.attention.cpu import CpuBackend
from runtime.attention.sdpa import SdpaBackend
from runtime.batch import ForwardBatch, build_tree_batch
from runtime.kv_cache import SlotTable
from runtime.models.loader import Target
from runtime.spec.tree_shape import fixed_tree, visible_rows
from tests.bench.harness import BenchResult, interleave

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
BACKENDS = ("sdpa", "fused")
NUM_NODES, DEPTH, RATES = 32, 5, (0.5, 0.15, 0.08, 0.05)


class Workload:
    """One request of ``context`` tokens behind which the rows of a tree lie, per layer q, k, v."""

    def __init__(self, target: Target, context: int) -> None:
        config, dtype = target.config, target.model.dtype
        self.num_layers = config.num_layers
        shape = fixed_tree(NUM_NODES, depth=DEPTH, rates=RATES)
        self.visible_BRR = visible_rows(torch.tensor([shape.parents]), DEPTH)
        num_rows = NUM_NODES + 1
        length = context + num_rows
        pages = -(-length // 16)
        self.table = SlotTable(num_rows=1, max_len=length, page_size=16, num_pages=pages)
        self.table.reserve(self.table.acquire_row(), length)
        self.context = context
        self.pool = target.model.new_pool(pages * 16)
        for stored in (*self.pool.k, *self.pool.v):
            stored.normal_()
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        merged = torch.randn(num_rows, sum(heads), config.head_dim).to(dtype)
        self.q, self.k, self.v = merged.split(heads, dim=1)

    def batch(self, *, prefix_len: int, visible_BSJ: torch.Tensor) -> ForwardBatch:
        zeros = torch.zeros(1, NUM_NODES + 1, dtype=torch.int64)
        return build_tree_batch(
            table=self.table,
            table_rows=[0],
            prefix_lens=[prefix_len],
            positions_BS=zeros,
            input_ids_BS=zeros,
            visible_BSJ=visible_BSJ,
        )

    def full_mask(self) -> torch.Tensor:
        seen = torch.ones(1, NUM_NODES + 1, self.context, dtype=torch.bool)
        return torch.cat([seen, self.visible_BRR], 2)

    def attend(self, backend: AttentionBackend, *, is_full: bool) -> torch.Tensor:
        """One forward's attention; with ``is_full`` the block is the whole sequence."""
        if is_full:
            batch = self.batch(prefix_len=0, visible_BSJ=self.full_mask())
        else:
            batch = self.batch(prefix_len=self.context, visible_BSJ=self.visible_BRR)
        plan = backend.plan(batch, self.table)
        for layer in range(self.num_layers):
            out = backend.run(plan, self.pool, layer, self.q, self.k, self.v)
        return out

    def attend_masked(self) -> torch.Tensor:
        """torch's fused attention under a mask over everything, heads of a group as rows."""
        num_rows, num_heads, width = self.q.shape
        num_kv_heads = self.k.shape[1]
        repeat = num_heads // num_kv_heads
        mask = self.full_mask()[0, :, None].expand(-1, repeat, -1).flatten(0, 1)
        length = self.context + num_rows
        slots = slice(self.context, length)  # of a request alone in memory
        shape = (num_rows, num_kv_heads, repeat, width)
        q = self.q.reshape(shape).transpose(0, 1).reshape(1, num_kv_heads, -1, width)
        for layer in range(self.num_layers):
            keys, values = self.pool.k[layer], self.pool.v[layer]
            keys[slots], values[slots] = self.k, self.v
            k, v = (stored[:length].transpose(0, 1)[None] for stored in (keys, values))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (
            out.reshape(num_kv_heads, num_rows, repeat, width)
            .transpose(0, 1)
            .reshape(num_rows, num_heads, width)
        )


def run(target: Target, *, backend: str, context: int) -> BenchResult:
    """Verification passes per second (attention only)."""
    work = Workload(target, context)
    attention: AttentionBackend = SdpaBackend()
    peer: Callable[[], torch.Tensor] = work.attend_masked
    if backend == "fused":
        attention = target.model.backend
        assert isinstance(attention, CpuBackend), "the fused kernels are not in use here"

        def peer() -> torch.Tensor:
            return work.attend(attention, is_full=True)

    with torch.inference_mode():
        ours, theirs = work.attend(attention, is_full=False), peer()
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error < (2e-2 if target.model.dtype is torch.bfloat16 else 1e-5), error
        timing = interleave(
            lambda: work.attend(attention, is_full=False),
            peer,
            lambda: 1.0,
            units=1.0,
            rounds=9,
        )
    name = f"tree_{backend}_{context}"
    return BenchResult(
        name=name,
        ours=1 / timing.ours_s,
        peer=1 / timing.peer_s,
        ratio=timing.peer_s / timing.ours_s,
        limit=None,
        share_of_limit=None,
        unit="passes/s",
        command=f"make bench BENCH={name}",
        note=f"{NUM_NODES} nodes; {timing.ours_s * 1e3:.2f} against {timing.peer_s * 1e3:.2f} ms",
    )
