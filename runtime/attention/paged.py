"""The page layout of one batch as attention kernels want it: offsets, page ids, last page lengths.

Host arithmetic only (numpy, int32). ``kv_lens`` are exact and count the new rows; a request's pages
cover exactly ``kv_lens[b]`` slots.

Shape legend: B requests, P pages of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.kv_cache import SlotTable


@dataclass(frozen=True)
class PagedLayout:
    """Request ``b`` has query rows ``qo_indptr[b] .. qo_indptr[b+1] - 1`` of the batch and pages
    ``page_ids[kv_indptr[b] .. kv_indptr[b+1] - 1]``, the last of them filled up to
    ``last_page_lens[b]`` (1 … page size).
    """

    page_size: int
    qo_indptr_B1: np.ndarray
    kv_indptr_B1: np.ndarray
    page_ids_P: np.ndarray
    last_page_lens_B: np.ndarray

    @property
    def num_requests(self) -> int:
        return len(self.last_page_lens_B)

    @property
    def kv_lens_B(self) -> np.ndarray:
        pages_B = np.diff(self.kv_indptr_B1)
        return (pages_B - 1) * self.page_size + self.last_page_lens_B


def page_layout(
    table: SlotTable,
    *,
    table_rows: Sequence[int],
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
) -> PagedLayout:
    """Layout of requests that hold slots for ``kv_lens`` tokens; every length is at least 1."""
    page_size = table.page_size
    lens_B = np.asarray(kv_lens, dtype=np.int64)
    assert lens_B.min() > 0, f"a request without keys: kv_lens={tuple(kv_lens)}"
    pages_B = -(-lens_B // page_size)
    kv_indptr_B1 = _offsets(pages_B)
    # Page i of the batch is page (i - first page of its request) of its request.
    place_P = np.arange(kv_indptr_B1[-1]) - np.repeat(kv_indptr_B1[:-1], pages_B)
    rows_P = np.repeat(np.asarray(table_rows), pages_B)
    page_ids_P = table.host_slots_RT[rows_P, place_P * page_size] // page_size
    return PagedLayout(
        page_size=page_size,
        qo_indptr_B1=_offsets(np.asarray(q_lens)),
        kv_indptr_B1=kv_indptr_B1,
        page_ids_P=page_ids_P.astype(np.int32),
        last_page_lens_B=(lens_B - (pages_B - 1) * page_size).astype(np.int32),
    )


def slot_layout(
    table: SlotTable, *, table_rows: Sequence[int], num_rows: int, ends: Sequence[int], count: int
) -> PagedLayout:
    """The last ``count`` slots before ``ends[b]`` of each request, as pages of one slot each.

    ``num_rows`` query rows per request. A block of slots may start anywhere within a page; seen as
    pages of one slot it can be given to a kernel by itself.
    """
    positions_BJ = np.asarray(ends)[:, None] + np.arange(-count, 0)
    slots_BJ = table.host_slots_RT[np.asarray(table_rows)[:, None], positions_BJ]
    num_requests = len(slots_BJ)
    return PagedLayout(
        page_size=1,
        qo_indptr_B1=np.arange(num_requests + 1, dtype=np.int32) * num_rows,
        kv_indptr_B1=np.arange(num_requests + 1, dtype=np.int32) * count,
        page_ids_P=slots_BJ.ravel().astype(np.int32),
        last_page_lens_B=np.ones(num_requests, dtype=np.int32),
    )


def pad_layout(layout: PagedLayout, num_requests: int, *, q_len: int, page: int) -> PagedLayout:
    """``layout`` filled up to ``num_requests`` with dummy requests of ``q_len`` rows.

    A dummy has as many keys as rows, all of them in ``page`` (which no request owns), so that every
    row sees at least one key.
    """
    missing = num_requests - layout.num_requests
    assert missing >= 0, f"{layout.num_requests} requests do not fit into {num_requests}"
    if not missing:
        return layout
    pages = -(-q_len // layout.page_size)
    steps = np.arange(1, missing + 1, dtype=np.int32)
    return PagedLayout(
        page_size=layout.page_size,
        qo_indptr_B1=np.append(layout.qo_indptr_B1, layout.qo_indptr_B1[-1] + steps * q_len),
        kv_indptr_B1=np.append(layout.kv_indptr_B1, layout.kv_indptr_B1[-1] + steps * pages),
        page_ids_P=np.append(layout.page_ids_P, np.full(missing * pages, page, dtype=np.int32)),
        last_page_lens_B=np.append(
            layout.last_page_lens_B,
            np.full(missing, q_len - (pages - 1) * layout.page_size, dtype=np.int32),
        ),
    )


def _offsets(counts_B: np.ndarray) -> np.ndarray:
    return np.append(0, np.cumsum(counts_B)).astype(np.int32)
