"""Paged K/V memory: page allocator, slot table, and per-model pools.

One :class:`SlotTable` is shared by target and draft; each owns a :class:`KVPool` indexed by the
same slots. Invariants: free + held pages = total; no page is held twice; pools start zeroed
(0 * NaN is NaN).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from runtime.huge_pages import advise_huge_pages

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


class OutOfPagesError(Exception):
    """No free pages: the scheduler preempts somebody."""


class PageAllocator:
    """Hands out pages; a request that grows gets the page after its last one where that is free.

    A request that starts is put into the middle of the largest gap, so that running requests keep
    growing in one run of slots and attention can read a slice instead of gathering.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._is_free = np.ones(num_pages, dtype=bool)
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Take ``count`` pages, following page ``after`` where possible (``None``: a new request).

        Raises :class:`OutOfPagesError` (and takes nothing) when fewer are free.
        """
        if count > self._num_free:
            raise OutOfPagesError(f"{count} pages wanted, {self._num_free} free")
        pages: list[int] = []
        wanted = after + 1 if after is not None else self._gap_start(count)
        while len(pages) < count:
            if wanted >= self.num_pages or not self._is_free[wanted]:
                wanted = self._gap_start(count - len(pages))
            self._is_free[wanted] = False
            pages.append(wanted)
            wanted += 1
        self._num_free -= count
        return pages

    def _gap_start(self, count: int) -> int:
        """Where to begin in the largest free gap: its middle, unless ``count`` needs more room.

        The gap at the very start of memory is entered at its start.
        """
        padded = np.concatenate(([False], self._is_free, [False]))
        edges = np.flatnonzero(padded[1:] != padded[:-1])
        starts, ends = edges[0::2], edges[1::2]
        largest = int(np.argmax(ends - starts))
        start, end = int(starts[largest]), int(ends[largest])
        if start == 0 or end - start <= count:
            return start
        return max(start, min(start + (end - start) // 2, end - count))

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert not self._is_free[page], f"page {page} freed twice"
            self._is_free[page] = True
            self._num_free += 1


class SlotTable:
    """Maps (table row, position) to a K/V slot; rows are given to running requests.

    ``slots_RT`` lives on the host (int64 ``[rows, max_model_len]``): lengths are exact on the host
    at the start of every step, so planning never reads the device.
    """

    def __init__(self, *, num_rows: int, max_len: int, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.max_len = max_len
        self.allocator = PageAllocator(num_pages)
        self.slots_RT = torch.zeros(num_rows, max_len + page_size, dtype=torch.int64)
        self.host_slots_RT = self.slots_RT.numpy()  # the same memory
        self._page_offsets = np.arange(page_size)
        self._pages: list[list[int]] = [[] for _ in range(num_rows)]
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._held_rows: set[int] = set()
        self._runs: list[int] = [0] * num_rows  # pages in the leading contiguous run

    def acquire_row(self) -> int:
        row = self._free_rows.pop()
        self._held_rows.add(row)
        return row

    def release_row(self, row: int) -> None:
        self.allocator.free(self._pages[row])
        self._pages[row] = []
        self._runs[row] = 0
        self._held_rows.remove(row)
        self._free_rows.append(row)

    def pages_missing(self, row: int, length: int) -> int:
        """Pages to add so that ``length`` tokens have slots."""
        return max(0, -(-length // self.page_size) - len(self._pages[row]))

    def reserve(self, row: int, length: int) -> None:
        """Give ``row`` slots for ``length`` tokens.

        Raises :class:`OutOfPagesError` (and changes nothing) when too few pages are free.
        """
        held = self._pages[row]
        if length <= len(held) * self.page_size:  # nearly every step: nothing to do
            return
        missing = self.pages_missing(row, length)
        pages = self.allocator.allocate(missing, after=held[-1] if held else None)
        start = len(held) * self.page_size
        slots = (np.asarray(pages)[:, None] * self.page_size + self._page_offsets).ravel()
        stop = min(start + slots.size, self.host_slots_RT.shape[1])
        self.host_slots_RT[row, start:stop] = slots[: stop - start]
        for page in pages:
            if self._runs[row] == len(held) and (not held or page == held[-1] + 1):
                self._runs[row] += 1
            held.append(page)

    def page_ids(self, row: int) -> np.ndarray:
        """The pages that ``row`` holds, in order (int64, host)."""
        count = len(self._pages[row])
        return self.host_slots_RT[row, : count * self.page_size : self.page_size] // self.page_size

    def adopt(self, row: int, pages: np.ndarray) -> None:
        """Hold exactly ``pages``, which another process allocated for its own ``row``.

        A table is either allocated from or told: the allocator here is not asked.
        """
        if np.array_equal(self.page_ids(row), pages):
            return
        slots = (pages[:, None] * self.page_size + self._page_offsets).ravel()
        stop = min(slots.size, self.host_slots_RT.shape[1])
        self.host_slots_RT[row, :stop] = slots[:stop]
        self._pages[row] = pages.tolist()
        breaks = np.flatnonzero(np.diff(pages) != 1)
        self._runs[row] = int(breaks[0]) + 1 if breaks.size else len(pages)

    def contiguous_start(self, row: int, length: int) -> int | None:
        """First slot if the first ``length`` tokens lie in one run of slots, else ``None``."""
        if self._runs[row] * self.page_size >= length:
            return self._pages[row][0] * self.page_size
        return None

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Slots of positions ``start..stop-1`` (int64, host)."""
        return self.slots_RT[row, start:stop]

    def check(self) -> None:
        """Integrity: free + held = total, no page held twice, free rows hold nothing."""
        held = [page for pages in self._pages for page in pages]
        assert len(held) == len(set(held)), "a page is held twice"
        assert len(held) + self.allocator.num_free == self.allocator.num_pages, (
            f"page leak: {len(held)} held + {self.allocator.num_free} free != "
            f"{self.allocator.num_pages}"
        )
        for row in self._free_rows:
            assert not self._pages[row], f"free row {row} holds pages"


class KvRows(Protocol):
    """All keys, or all values, of one layer, as attention reads them: ``[slots, G, C]``."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, rows: slice) -> torch.Tensor: ...

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Fp8Scales:
    """By layer, what stored fp8 keys and values are multiplied by; empty: one."""

    k: tuple[float, ...] = ()
    v: tuple[float, ...] = ()

    def of(self, layer: int) -> tuple[float, float]:
        """Of keys and of values."""
        return (self.k[layer], self.v[layer]) if self.k else (1.0, 1.0)

    def of_layers(self, layers: Sequence[int]) -> Fp8Scales:
        """Of a model that has these layers alone."""
        pairs = [self.of(layer) for layer in layers]
        return Fp8Scales(tuple(k for k, _ in pairs), tuple(v for _, v in pairs))


class _Fp8Rows:
    """fp8 rows in a tensor of bytes; what is read is in ``dtype``."""

    def __init__(self, bytes_SGC: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
        self._bytes_SGC, self._scale, self._dtype = bytes_SGC, scale, dtype

    @property
    def shape(self) -> torch.Size:
        return self._bytes_SGC.shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self._read(self._bytes_SGC[rows])

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        return self._read(self._bytes_SGC.index_select(dim, index))

    def encode(self, rows_NGC: torch.Tensor) -> torch.Tensor:
        """Bytes; what leaves the range of e4m3 becomes its largest value."""
        scaled = (rows_NGC.float() / self._scale).clamp_(-_LARGEST_FP8, _LARGEST_FP8)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def _read(self, bytes_NGC: torch.Tensor) -> torch.Tensor:
        stored = bytes_NGC.view(torch.float8_e4m3fn)
        return stored.float().mul_(self._scale).to(self._dtype)


class KVPool:
    """K and V of one model by slot: ``k[layer]`` is ``[slots, G, C]``, zeroed.

    With ``has_values=False`` values are columns of the keys (a latent cache): ``v`` is ``k``. With
    ``fp8`` a value takes one byte, ``k`` and ``v`` are bytes, and only :meth:`rows` and the writers
    know what they stand for; ``dtype`` is that of what they return.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        has_values: bool = True,
        fp8: Fp8Scales | None = None,
    ) -> None:
        shape = (1 + has_values, num_layers, num_slots, num_kv_heads, head_dim)
        stored = dtype if fp8 is None else torch.uint8
        self._all = torch.zeros(shape, dtype=stored, device=device)
        advise_huge_pages(self._all)
        parts = [list(part.unbind()) for part in self._all]
        self.k, self.v = parts[0], parts[-1]
        self._fp8_rows: list[tuple[_Fp8Rows, _Fp8Rows]] | None = None
        if fp8 is not None:
            assert has_values, "an fp8 cache holds keys and values"
            self._fp8_rows = [
                (
                    _Fp8Rows(self.k[layer], fp8.of(layer)[0], dtype),
                    _Fp8Rows(self.v[layer], fp8.of(layer)[1], dtype),
                )
                for layer in range(num_layers)
            ]

    def rows(self, layer: int) -> tuple[KvRows, KvRows]:
        """All K and V of that layer."""
        if self._fp8_rows is not None:
            return self._fp8_rows[layer]
        return self.k[layer], self.v[layer]

    def store(
        self, layer: int, slots_N: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor
    ) -> tuple[KvRows, KvRows]:
        """Write the rows' K and V of one layer; returns all K and V of that layer."""
        k_NGC, v_NGC = self._encode(layer, k_NGC, v_NGC)
        self.k[layer].index_copy_(0, slots_N, k_NGC)
        self.v[layer].index_copy_(0, slots_N, v_NGC)
        return self.rows(layer)

    def store_run(
        self, layer: int, start: int, k_NGC: torch.Tensor, v_NGC: torch.Tensor
    ) -> tuple[KvRows, KvRows]:
        """:meth:`store` into neighbouring slots."""
        k_NGC, v_NGC = self._encode(layer, k_NGC, v_NGC)
        stop = start + k_NGC.shape[0]
        self.k[layer][start:stop] = k_NGC
        self.v[layer][start:stop] = v_NGC
        return self.rows(layer)

    def _encode(
        self, layer: int, k_NGC: torch.Tensor, v_NGC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._fp8_rows is None:
            return k_NGC, v_NGC
        keys, values = self._fp8_rows[layer]
        return keys.encode(k_NGC), values.encode(v_NGC)

    def move(self, from_slots_M: torch.Tensor, to_slots_M: torch.Tensor) -> None:
        """Copy K and V of these slots, all layers; reads everything before it writes anything."""
        self._all.index_copy_(2, to_slots_M, self._all.index_select(2, from_slots_M))

    def num_bytes(self) -> int:
        return self._all.numel() * self._all.element_size()
