"""Decoding and chain verification through FlashInfer's XQA kernel, which has no host plan.

It reads block tables and lengths from the device, so nothing about a batch is baked in on the host.
Several rows per request need a bit mask over the draft block: row ``i`` sees block rows ``0 .. i``.

Shape legend: B requests, Q rows of each request, N = B * Q rows, H query heads, C head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runtime.attention.paged import PagedLayout
from runtime.batch import upload
from runtime.kv_cache import KVPool

PAGE_SIZES = (16, 32, 64, 128)
_WORKSPACE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class XqaPlan:
    """Device tensors of one forward: ``block_tables`` int32 ``[B, pages]``, ``kv_lens_B`` int32."""

    q_len: int
    block_tables: torch.Tensor
    kv_lens_B: torch.Tensor
    mask: torch.Tensor | None  # uint16 [B, Q, words]

    @property
    def max_pages(self) -> int:
        return self.block_tables.shape[1]


class XqaAttention:
    """Owns the zeroed workspace that the kernel's semaphores live in."""

    def __init__(self, module: Any, *, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    @staticmethod
    def takes(q_lens: tuple[int, ...], page_size: int) -> bool:
        """Whether the kernel can serve these rows: as many for each request, known page sizes."""
        return page_size in PAGE_SIZES and min(q_lens) == max(q_lens) <= 32

    def plan(self, layout: PagedLayout, q_len: int, *, max_pages: int = 0) -> XqaPlan:
        """``max_pages`` fixes the width of the block tables (0: what the batch needs)."""
        tables = block_tables(layout, max_pages or int(np.diff(layout.kv_indptr_B1).max()))
        mask = causal_block_mask(layout.num_requests, q_len) if q_len > 1 else None
        return XqaPlan(
            q_len=q_len,
            block_tables=upload(torch.from_numpy(tables), self._device),
            kv_lens_B=upload(torch.from_numpy(layout.kv_lens_B.astype(np.int32)), self._device),
            mask=None if mask is None else upload(mask, self._device),
        )

    def update(self, plan: XqaPlan, layout: PagedLayout) -> None:
        """Put another layout of as many requests into ``plan``'s own memory."""
        fresh = self.plan(layout, 1, max_pages=plan.max_pages)
        plan.block_tables.copy_(fresh.block_tables, non_blocking=True)
        plan.kv_lens_B.copy_(fresh.kv_lens_B, non_blocking=True)

    def run(
        self, plan: XqaPlan, q_NHC: torch.Tensor, pool: KVPool, layer: int, page_size: int
    ) -> torch.Tensor:
        """Attend over stored K/V, the new rows' included; ``[N, H, C]``."""
        paged = tuple(t[layer].unflatten(0, (-1, page_size)) for t in (pool.k, pool.v))
        out = self._module.decode.trtllm_batch_decode_with_kv_cache(
            q_NHC.contiguous(),
            paged,
            self._workspace,
            plan.block_tables,
            plan.kv_lens_B.view(torch.uint32),
            plan.max_pages * page_size,
            bmm1_scale=1.0 / math.sqrt(q_NHC.shape[-1]),
            bmm2_scale=1.0,
            kv_layout="NHD",
            backend="xqa",
            q_len_per_req=plan.q_len,
            mask=plan.mask,
        )
        return out.view(q_NHC.shape)


def block_tables(layout: PagedLayout, max_pages: int) -> np.ndarray:
    """int32 ``[B, max_pages]``; places past a request's pages repeat its first page."""
    starts_B, pages_B = layout.kv_indptr_B1[:-1], np.diff(layout.kv_indptr_B1)
    assert pages_B.max() <= max_pages, f"{pages_B.max()} pages, room for {max_pages}"
    steps = np.arange(max_pages)
    is_own = steps < pages_B[:, None]
    return layout.page_ids_P[starts_B[:, None] + np.where(is_own, steps, 0)]


def causal_block_mask(num_requests: int, q_len: int) -> torch.Tensor:
    """uint16 ``[B, q_len, words]``: row ``i`` has bits ``0 .. i``; rows are 32-bit aligned."""
    words = -(-q_len // 32) * 2
    row_bits = [(1 << (row + 1)) - 1 for row in range(q_len)]
    rows = [[bits >> (16 * word) & 0xFFFF for word in range(words)] for bits in row_bits]
    mask = torch.tensor(rows, dtype=torch.int32).to(torch.uint16)
    return mask.expand(num_requests, q_len, words).contiguous()
