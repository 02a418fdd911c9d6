"""Batches that the FlashInfer backend has to get right, compared with independent references.

Every case is a function of a backend that returns the largest relative error; a backend with a
fault must not pass all of them (``tests/parity/test_flashinfer_mutants.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.attention.flashinfer import FlashInferBackend
from runtime.attention.sdpa import SdpaBackend
from runtime.batch import BatchMode, ForwardBatch
from runtime.kv_cache import KVPool
from tests.unit.runtime.flashinfer_emulator import EmulatedStream, emulate
from tests.unit.runtime.flashinfer_signatures import recorded
from tests.unit.runtime.model_fixtures import (
    make_batch,
    make_table,
    relative_error,
    scatter_pages,
)

CPU = torch.device("cpu")
Case = Callable[..., float]  # backend, setting
STARTS = [3, 80, 41, 16, 15]  # last pages nearly full, just begun and in between


def make_backend(
    version: str, *, stream: EmulatedStream | None = None, auto: str = "fa3", **settings: Any
) -> FlashInferBackend:
    stream = stream or EmulatedStream()
    module = emulate(recorded(version), stream, auto=auto)
    return FlashInferBackend(module, device=CPU, new_event=stream.new_event, **settings)


@dataclass(frozen=True)
class Setting:
    """Where and over which heads the cases run."""

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    heads: int = 6
    kv_heads: int = 2
    width: int = 16


class Stage:
    """A table with scattered pages and two pools, filled alike with K/V that nobody may see."""

    def __init__(self, setting: Setting = Setting(), *, page_size: int = 16, seed: int = 0) -> None:
        self.setting = setting
        self.generator = torch.Generator().manual_seed(seed)
        self.table = make_table(page_size=page_size, num_pages=4096 // page_size)
        self.rows = [self.table.acquire_row() for _ in STARTS]
        scatter_pages(self.table, self.rows, 128)
        self.pools = [self._pool(), self._pool()]
        for ours, theirs in zip(*(pool.k + pool.v for pool in self.pools), strict=True):
            ours.copy_(torch.randn(ours.shape, generator=self.generator))
            theirs.copy_(ours)

    def _pool(self) -> KVPool:
        return KVPool(
            num_layers=2,
            num_slots=4096,
            num_kv_heads=self.setting.kv_heads,
            head_dim=self.setting.width,
            dtype=self.setting.dtype,
            device=self.setting.device,
        )

    def batch(self, lens: list[int], starts: list[int], mode: BatchMode) -> ForwardBatch:
        chunks = [[0] * length for length in lens]
        batch = make_batch(self.table, self.rows[: len(lens)], chunks, starts, mode=mode)
        moved = {
            name: value.to(self.setting.device)
            for name, value in vars(batch).items()
            if torch.is_tensor(value)
        }
        return replace(batch, **moved)

    def draw(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads, width = self.setting.heads, self.setting.kv_heads, self.setting.width
        merged = torch.randn(num_rows, heads + 2 * kv_heads, width, generator=self.generator)
        merged = merged.to(self.setting.device, self.setting.dtype)
        return merged.split((heads, kv_heads, kv_heads), dim=1)

    def compare(self, backend: FlashInferBackend, batch: ForwardBatch) -> float:
        """Both layers of one forward against SDPA; output and stored K/V."""
        oracle = SdpaBackend()
        plan, wanted_plan = backend.plan(batch, self.table), oracle.plan(batch, self.table)
        errors = []
        for layer in range(2):
            q, k, v = self.draw(sum(batch.q_lens))
            got = backend.run(plan, self.pools[0], layer, q, k, v)
            wanted = oracle.run(wanted_plan, self.pools[1], layer, q, k, v)
            errors.append(relative_error(got, wanted))
            assert torch.equal(self.pools[0].k[layer], self.pools[1].k[layer])
            assert torch.equal(self.pools[0].v[layer], self.pools[1].v[layer])
        return max(errors)


def mixed_rows(backend: FlashInferBackend, setting: Setting = Setting()) -> float:
    stage = Stage(setting)
    batch = stage.batch([1, 7, 1, 20, 2], STARTS, BatchMode.PREFILL)
    return stage.compare(backend, batch)


def pages_of_one_slot(backend: FlashInferBackend, setting: Setting = Setting()) -> float:
    stage = Stage(setting, page_size=1)
    return stage.compare(backend, stage.batch([4] * 5, STARTS, BatchMode.VERIFY))


def decode_steps(backend: FlashInferBackend, setting: Setting = Setting()) -> float:
    """Consecutive steps: every plan must be made afresh."""
    stage = Stage(setting)
    errors = []
    for step in range(3):
        starts = [start + step for start in STARTS]
        errors.append(stage.compare(backend, stage.batch([1] * 5, starts, BatchMode.DECODE)))
    return max(errors)


def verify_steps(backend: FlashInferBackend, setting: Setting = Setting()) -> float:
    """Two steps with equal rows; the second begins where the first one's drafts were accepted."""
    stage = Stage(setting)
    errors = []
    for emitted in ([0] * 5, [1, 4, 2, 3, 1]):
        starts = [start + count for start, count in zip(STARTS, emitted, strict=True)]
        errors.append(stage.compare(backend, stage.batch([4] * 5, starts, BatchMode.VERIFY)))
    return max(errors)


def verify_after_a_swap(backend: FlashInferBackend, setting: Setting = Setting()) -> float:
    """Equal rows, lengths and positions, but other requests and so other pages."""
    stage = Stage(setting)
    errors = []
    for _ in range(2):
        errors.append(stage.compare(backend, stage.batch([2] * 5, [40] * 5, BatchMode.VERIFY)))
        stage.rows.reverse()
    return max(errors)


def tree_rows(backend: FlashInferBackend, setting: Setting = Setting()) -> float:
    """A tree of nine rows, and then the five new rows of a block of seven."""
    stage = Stage(setting)
    errors = []
    for num_rows, block_len in ((9, 9), (5, 7), (5, 7)):
        visible = torch.rand(5, num_rows, block_len, generator=stage.generator) < 0.4
        own = torch.arange(num_rows)
        visible[:, own, own + block_len - num_rows] = True
        errors.append(_compare_tree(stage, backend, visible.to(setting.device)))
    return max(errors)


def _compare_tree(stage: Stage, backend: FlashInferBackend, visible_BSJ: torch.Tensor) -> float:
    count, num_rows, block_len = visible_BSJ.shape
    starts = [start + block_len - num_rows for start in STARTS]
    plain = stage.batch([num_rows] * count, starts, BatchMode.VERIFY)
    batch = replace(plain, visible_BSJ=visible_BSJ)
    pool, heads, repeat = (
        stage.pools[0],
        stage.setting.heads,
        stage.setting.heads // stage.setting.kv_heads,
    )
    q, k, v = stage.draw(count * num_rows)
    got = backend.run(backend.plan(batch, stage.table), pool, 0, q, k, v)
    wanted = []
    for b, (row, kv_len) in enumerate(zip(batch.table_rows, batch.kv_lens, strict=True)):
        slots = stage.table.slots(row, 0, kv_len).to(visible_BSJ.device)
        keys, values = (t[0][slots].double() for t in (pool.k, pool.v))
        seen = visible_BSJ.new_ones(num_rows, kv_len)
        seen[:, kv_len - block_len :] = visible_BSJ[b]
        for row_in_block in range(num_rows):
            for head in range(heads):
                group = head // repeat
                query = q[b * num_rows + row_in_block, head].double()
                visible = seen[row_in_block]
                weights = torch.softmax(keys[visible, group] @ query / query.shape[0] ** 0.5, 0)
                wanted.append(weights @ values[visible, group])
    return relative_error(got, torch.stack(wanted).view(got.shape))


CASES: tuple[Case, ...] = (
    mixed_rows,
    pages_of_one_slot,
    decode_steps,
    verify_steps,
    verify_after_a_swap,
    tree_rows,
)
