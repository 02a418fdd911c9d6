"""`verify_4`: the target over the four rows that verify three drafts, against one row of decoding.

Forward and logits, batch 1. `ratio` is the time of four rows over that of one: what verification
costs before anything is accepted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.batch import BatchMode, build_batch
from runtime.kv_cache import SlotTable
from runtime.models.loader import Target
from tests.bench.harness import BenchResult, interleave

CONTEXT = 256
STEPS = 40


def run(target: Target, *, rows: int) -> BenchResult:
    """Steps per second with ``rows`` rows (ours) and with one (peer), behind 256 tokens."""
    model = target.model
    table = SlotTable(num_rows=1, max_len=CONTEXT + rows, page_size=16, num_pages=CONTEXT // 16 + 1)
    table.reserve(table.acquire_row(), CONTEXT + rows)
    pool = model.new_pool(table.allocator.num_pages * table.page_size)
    for stored in (*pool.k, *pool.v):
        stored.normal_()

    def steps_of(count: int, mode: BatchMode) -> Callable[[], None]:
        def run_steps() -> None:
            for _ in range(STEPS):
                batch = build_batch(
                    mode,
                    table=table,
                    table_rows=[0],
                    starts=[CONTEXT],
                    q_lens=[count],
                    input_ids_N=torch.arange(count),
                    device=model.device,
                )
                model.logits(model.forward(batch, table, pool))

        return run_steps

    timing = interleave(
        steps_of(rows, BatchMode.VERIFY),
        steps_of(1, BatchMode.DECODE),
        lambda: 1.0,
        units=STEPS,
        rounds=15,
    )
    name = f"verify_{rows}"
    return BenchResult(
        name=name,
        ours=STEPS / timing.ours_s,
        peer=STEPS / timing.peer_s,
        ratio=timing.ours_s / timing.peer_s,
        limit=None,
        share_of_limit=None,
        unit="steps/s",
        command=f"make bench BENCH={name}",
        note=f"time of {rows} rows over that of one, {CONTEXT} tokens before them",
    )
