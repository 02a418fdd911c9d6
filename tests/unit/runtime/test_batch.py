"""Positions and slots of a flattened batch, against the obvious loop."""

from __future__ import annotations

import pytest
import torch

from runtime.batch import BatchMode, build_batch
from tests.unit.runtime.model_fixtures import make_table, scatter_pages


@pytest.mark.parametrize("q_lens", [(1, 1, 1), (4, 4, 4), (5, 1, 3), (2,)])
def test_rows_sit_at_their_positions_and_slots(q_lens: tuple[int, ...]) -> None:
    table = make_table(page_size=4)
    rows = [table.acquire_row() for _ in range(3)][: len(q_lens)][::-1]
    scatter_pages(table, rows, 40)
    starts = [7, 0, 30][: len(q_lens)]
    count = sum(q_lens)
    batch = build_batch(
        BatchMode.PREFILL,
        table=table,
        table_rows=rows,
        starts=starts,
        q_lens=q_lens,
        input_ids_N=torch.arange(count),
        device=torch.device("cpu"),
    )
    positions, slots = [], []
    for row, start, q_len in zip(rows, starts, q_lens, strict=True):
        for position in range(start, start + q_len):
            positions.append(position)
            slots.append(int(table.slots(row, position, position + 1)))
    assert batch.positions_N.dtype is torch.int64
    assert batch.positions_N.tolist() == positions
    assert batch.write_slots_N.tolist() == slots
    assert batch.kv_lens == tuple(s + q for s, q in zip(starts, q_lens, strict=True))
