"""Paged K/V memory: page allocator, slot table, and per-model pools.

One :class:`SlotTable` is shared by target and draft; each owns a :class:`KVPool` indexed by the
same slots. Invariants: free + held pages = total; no page is held twice; pools start zeroed
(0 * NaN is NaN).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from runtime.huge_pages import advise_huge_pages


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


class KVPool:
    """K and V of one model by slot: ``k[layer]`` is ``[slots, G, C]``, zeroed.

    With ``has_values=False`` values are columns of the keys (a latent cache): ``v`` is ``k``.
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
    ) -> None:
        shape = (1 + has_values, num_layers, num_slots, num_kv_heads, head_dim)
        self._all = torch.zeros(shape, dtype=dtype, device=device)
        advise_huge_pages(self._all)
        parts = [list(part.unbind()) for part in self._all]
        self.k, self.v = parts[0], parts[-1]

    def store(
        self, layer: int, slots_N: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows' K and V of one layer; returns all K and V of that layer."""
        keys, values = self.k[layer], self.v[layer]
        keys.index_copy_(0, slots_N, k_NGC)
        values.index_copy_(0, slots_N, v_NGC)
        return keys, values

    def move(self, from_slots_M: torch.Tensor, to_slots_M: torch.Tensor) -> None:
        """Copy K and V of these slots, all layers; reads everything before it writes anything."""
        self._all.index_copy_(2, to_slots_M, self._all.index_select(2, from_slots_M))

    def num_bytes(self) -> int:
        return self._all.numel() * self._all.element_size()
