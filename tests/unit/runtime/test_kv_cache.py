"""Page accounting under random operations, and contiguity."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kv_cache import OutOfPagesError, PageAllocator, SlotTable


@settings(max_examples=150, deadline=None)
@given(
    page_size=st.sampled_from([1, 16]),
    operations=st.lists(
        st.tuples(st.sampled_from(["acquire", "grow", "release"]), st.integers(0, 200)),
        max_size=40,
    ),
)
def test_pages_are_conserved(page_size: int, operations: list[tuple[str, int]]) -> None:
    table = SlotTable(num_rows=6, max_len=256, page_size=page_size, num_pages=400 // page_size)
    lengths: dict[int, int] = {}
    for name, number in operations:
        rows = sorted(lengths)
        if name == "acquire" and len(lengths) < 6:
            lengths[table.acquire_row()] = 0
        elif name == "grow" and rows:
            row = rows[number % len(rows)]
            try:
                table.reserve(row, number)
                lengths[row] = max(lengths[row], number)
            except OutOfPagesError:
                pass
        elif name == "release" and rows:
            row = rows[number % len(rows)]
            table.release_row(row)
            del lengths[row]
        table.check()
        slots = [table.slots(row, 0, length) for row, length in lengths.items() if length]
        if slots:
            flat = torch.cat(slots)
            assert len(flat.unique()) == len(flat), "two tokens share a slot"
        for row, length in lengths.items():
            start = table.contiguous_start(row, length) if length else None
            if start is not None:
                assert torch.equal(table.slots(row, 0, length), torch.arange(start, start + length))


def test_failed_reservation_changes_nothing() -> None:
    table = SlotTable(num_rows=2, max_len=64, page_size=16, num_pages=3)
    row = table.acquire_row()
    table.reserve(row, 20)
    with pytest.raises(OutOfPagesError):
        table.reserve(row, 64)
    assert table.pages_missing(row, 32) == 0
    assert table.pages_missing(row, 33) == 1
    table.check()


def test_growing_requests_stay_contiguous_when_there_is_room() -> None:
    table = SlotTable(num_rows=4, max_len=256, page_size=16, num_pages=64)
    rows = [table.acquire_row() for _ in range(4)]
    for length in range(16, 128, 16):
        for row in rows:
            table.reserve(row, length)
    assert all(table.contiguous_start(row, 112) is not None for row in rows)


def test_freeing_a_page_twice_is_an_error() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages[:1])


def test_leaked_page_is_seen_by_the_integrity_check() -> None:
    table = SlotTable(num_rows=2, max_len=64, page_size=16, num_pages=8)
    row = table.acquire_row()
    table.reserve(row, 40)
    table._pages[row].pop()
    with pytest.raises(AssertionError, match="page leak"):
        table.check()
