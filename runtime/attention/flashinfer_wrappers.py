"""FlashInfer's wrappers, owned: made, planned and planned again without tripping over themselves.

A wrapper stages its plan in one pinned buffer and copies it to the device asynchronously. Writing
that buffer again while the copy is in flight corrupts the earlier plan, so every wrapper has an
event behind its last plan and waits for it before the next; wrappers take turns, so that the wait
is nearly always over.

What goes into a plan: lengths are exact (FA3 bakes the host's lengths in: a bound that is d too
long would let every row see d stale slots); offsets and last page lengths are *host* tensors, for
device ones cost a blocking copy; page ids are a device tensor; all int32; dtypes are always named.

Shape legend: B requests, N rows, P pages of a batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from runtime.attention.paged import PagedLayout
from runtime.batch import upload

Kernel = Literal["auto", "fa2", "fa3"]
_MAX_TURNS = 8  # wrappers of one kind; each holds 8 MB on either side
_WORKSPACE_BYTES = 128 * 1024 * 1024  # what FlashInfer recommends; one for all, used in turn


class Event(Protocol):
    """What is needed of ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the device has passed the place (true before the first ``record``)."""

    def record(self) -> None:
        """Mark this place in the device's stream."""

    def synchronize(self) -> None:
        """Wait on the host until the device has passed the place."""


@dataclass(frozen=True)
class HeadShape:
    """What a kernel's plan needs to know of the model that runs over the rows."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def uses_tensor_cores(self) -> bool:
        """For one row per request: FlashInfer's plain decode kernel has group sizes 1 to 3 and is
        the slower one from 4 on."""
        return self.num_heads // self.num_kv_heads > 3


@dataclass(frozen=True)
class LayoutBuffers:
    """Device memory that a captured wrapper reads its layout from, for B requests (all int32)."""

    qo_indptr_B1: torch.Tensor
    kv_indptr_B1: torch.Tensor
    page_ids_P: torch.Tensor
    last_page_lens_B: torch.Tensor

    @classmethod
    def allocate(cls, num_requests: int, max_pages: int, device: torch.device) -> LayoutBuffers:
        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return cls(
            zeros(num_requests + 1), zeros(num_requests + 1), zeros(max_pages), zeros(num_requests)
        )


@dataclass(frozen=True)
class MaskBuffers:
    """Device memory of packed masks: per request whole bytes, bit ``row * keys + key`` of them,
    lowest bit first; ``starts_B1`` are *byte* offsets (int32).
    """

    bytes_M: torch.Tensor
    starts_B1: torch.Tensor


@dataclass(eq=False)
class Wrapper:
    """One wrapper. ``owner`` is the plan it was last planned for."""

    kernel: Any
    copied: Event
    owner: object = None


class Wrappers:
    """Makes and plans wrappers of ``module`` (the FlashInfer package) on ``device``."""

    def __init__(
        self,
        module: Any,
        *,
        device: torch.device,
        kernel: Kernel,
        new_event: Callable[[], Event],
    ) -> None:
        self.module = module
        self.device = device
        self._kernel = kernel
        self._new_event = new_event
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._turns: dict[tuple[bool, HeadShape], deque[Wrapper]] = {}

    def take(self, *, is_decode: bool, shape: HeadShape) -> Wrapper:
        """The wrapper whose turn it is; what it was planned for before is over.

        A new one joins where all are still staging a plan: the draft's steps are planned one after
        the other before the device has begun.
        """
        waiting = self._turns.setdefault((is_decode, shape), deque())
        is_free = bool(waiting) and waiting[0].copied.query()
        if not is_free and len(waiting) < _MAX_TURNS:
            waiting.appendleft(self.make(is_decode=is_decode, shape=shape))
        wrapper = waiting.popleft()
        waiting.append(wrapper)
        return wrapper

    def make(
        self,
        *,
        is_decode: bool,
        shape: HeadShape,
        buffers: LayoutBuffers | None = None,
        mask: MaskBuffers | None = None,
    ) -> Wrapper:
        """A new wrapper; with ``buffers`` for good over that many requests, as graphs need it."""
        if is_decode:
            kernel = self.module.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=buffers is not None,
                use_tensor_cores=shape.uses_tensor_cores,
                paged_kv_indptr_buffer=buffers and buffers.kv_indptr_B1,
                paged_kv_indices_buffer=buffers and buffers.page_ids_P,
                paged_kv_last_page_len_buffer=buffers and buffers.last_page_lens_B,
            )
        else:
            kernel = self.module.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=buffers is not None,
                qo_indptr_buf=buffers and buffers.qo_indptr_B1,
                paged_kv_indptr_buf=buffers and buffers.kv_indptr_B1,
                paged_kv_indices_buf=buffers and buffers.page_ids_P,
                paged_kv_last_page_len_buf=buffers and buffers.last_page_lens_B,
                custom_mask_buf=mask and mask.bytes_M,
                mask_indptr_buf=mask and mask.starts_B1,
                backend="fa2" if mask is not None else self._kernel,  # FA3 knows no masks
            )
        return Wrapper(kernel, self._new_event())

    def plan(
        self,
        wrapper: Wrapper,
        layout: PagedLayout,
        shape: HeadShape,
        *,
        owner: object,
        is_decode: bool,
        causal: bool = True,
        mask_bytes_M: torch.Tensor | None = None,
    ) -> None:
        """Plan ``wrapper`` for ``layout``. ``causal`` is bottom-right aligned in FlashInfer too."""
        wrapper.copied.synchronize()
        page_ids_P = upload(torch.from_numpy(layout.page_ids_P), self.device)
        kv_indptr_B1 = _host(layout.kv_indptr_B1, self.device)
        last_page_lens_B = _host(layout.last_page_lens_B, self.device)
        settings: dict[str, Any] = {
            "sm_scale": 1.0 / math.sqrt(shape.head_dim),
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
            "o_data_type": shape.dtype,
        }
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, layout.page_size)
        if is_decode:
            wrapper.kernel.plan(kv_indptr_B1, page_ids_P, last_page_lens_B, *heads, **settings)
        else:
            wrapper.kernel.plan(
                _host(layout.qo_indptr_B1, self.device),
                kv_indptr_B1,
                page_ids_P,
                last_page_lens_B,
                *heads,
                causal=causal,
                packed_custom_mask=mask_bytes_M,
                **settings,
            )
        wrapper.copied.record()
        wrapper.owner = owner


def _host(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host tensor that can be copied to ``device`` without waiting.

    Freshly allocated each time: torch keeps pinned memory until the copies out of it are done.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()
