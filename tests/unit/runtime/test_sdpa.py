"""Attention backends against a slow loop over rows, keys and heads in float64."""

from __future__ import annotations

import pytest
import torch

from runtime.attention.base import AttentionBackend
from runtime.attention.cpu import CpuBackend
from runtime.attention.masks import causal_mask
from runtime.attention.sdpa import SdpaBackend
from runtime.batch import BatchMode
from runtime.kv_cache import KVPool, SlotTable
from tests.unit.runtime.model_fixtures import (
    fused_kernels,
    make_batch,
    make_table,
    relative_error,
    scatter_pages,
)


@pytest.fixture(scope="module", params=["sdpa", "fused"])
def backend(request) -> AttentionBackend:
    if request.param == "sdpa":
        return SdpaBackend()
    return CpuBackend(fused_kernels())


def make_pool(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVPool:
    return KVPool(
        num_layers=1,
        num_slots=4096,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def attend_slowly(q_SHC: torch.Tensor, k_TGC: torch.Tensor, v_TGC: torch.Tensor) -> torch.Tensor:
    """Rows are the last ones of the sequence; float64."""
    q_len, num_heads, width = q_SHC.shape
    kv_len, num_kv_heads, _ = k_TGC.shape
    out = torch.zeros(q_len, num_heads, width, dtype=torch.float64)
    for row in range(q_len):
        visible = kv_len - q_len + row + 1
        for head in range(num_heads):
            group = head // (num_heads // num_kv_heads)
            keys = k_TGC[:visible, group].double()
            weights = torch.softmax(keys @ q_SHC[row, head].double() / width**0.5, 0)
            out[row, head] = weights @ v_TGC[:visible, group].double()
    return out


def run_and_compare(
    backend: AttentionBackend,
    table: SlotTable,
    *,
    starts: list[int],
    lens: list[int],
    heads: tuple[int, int],
    width: int,
    dtype: torch.dtype = torch.float32,
    is_scattered: bool = False,
) -> float:
    """Largest relative error over the requests. The prefix is written by a first call."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = heads
    rows = [table.acquire_row() for _ in starts]
    if is_scattered:
        scatter_pages(table, rows, max(s + n for s, n in zip(starts, lens, strict=True)))
    pool = make_pool(num_kv_heads, width, dtype)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        merged = torch.randn(count, num_heads + 2 * num_kv_heads, width, generator=generator).to(
            dtype
        )
        return merged.split((num_heads, num_kv_heads, num_kv_heads), dim=1)

    keys: list[list[torch.Tensor]] = [[] for _ in starts]
    values: list[list[torch.Tensor]] = [[] for _ in starts]
    queries: list[torch.Tensor] = []
    prefix = [(0, start) for start in starts]
    new = list(zip(starts, lens, strict=True))
    for step in (prefix, new):
        present = [b for b, (_, count) in enumerate(step) if count]
        if not present:
            continue
        batch = make_batch(
            table,
            [rows[b] for b in present],
            [[0] * step[b][1] for b in present],
            [step[b][0] for b in present],
            mode=BatchMode.PREFILL,
        )
        q, k, v = draw(sum(batch.q_lens))
        out = backend.run(backend.plan(batch, table), pool, 0, q, k, v)
        for b, k_part, v_part in zip(
            present, k.split(batch.q_lens), v.split(batch.q_lens), strict=True
        ):
            keys[b].append(k_part)
            values[b].append(v_part)
        queries = list(q.split(batch.q_lens))
    assert out.dtype is dtype
    errors = [
        relative_error(got, attend_slowly(query, torch.cat(k), torch.cat(v)))
        for got, query, k, v in zip(out.split(lens), queries, keys, values, strict=True)
    ]
    return max(errors)


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_mixed_rows_equal_the_slow_loop(backend, heads, page_size, is_scattered):
    table = make_table(page_size=page_size, num_pages=4096 // page_size)
    error = run_and_compare(
        backend,
        table,
        starts=[0, 70, 5, 63, 130, 2, 40],
        lens=[40, 1, 4, 2, 67, 1, 4],
        heads=heads,
        width=16,
        is_scattered=is_scattered,
    )
    assert error < 1e-5


@pytest.mark.parametrize("start", [0, 20])
def test_chunks_longer_than_a_block_of_rows(backend, start):
    error = run_and_compare(
        backend, make_table(), starts=[start], lens=[150], heads=(2, 1), width=8
    )
    assert error < 1e-5


@pytest.mark.parametrize("q_len", [1, 4])
def test_requests_of_unequal_length_decode_together(backend, q_len):
    error = run_and_compare(
        backend,
        make_table(),
        starts=[3, 80, 41, 64],
        lens=[q_len] * 4,
        heads=(4, 2),
        width=16,
    )
    assert error < 1e-5


@pytest.mark.parametrize("width", [8, 10, 64, 80])
def test_any_even_head_width(backend, width):
    error = run_and_compare(
        backend, make_table(), starts=[9, 64], lens=[3, 1], heads=(4, 2), width=width
    )
    assert error < 1e-5


def test_one_request_with_a_run_of_slots_writes_a_slice(backend):
    error = run_and_compare(backend, make_table(), starts=[20], lens=[12], heads=(4, 2), width=16)
    assert error < 1e-5


@pytest.mark.parametrize("width", [16, 64])
def test_bf16_error_is_rounding_of_the_result(backend, width):
    error = run_and_compare(
        backend,
        make_table(),
        starts=[0, 100, 90],
        lens=[90, 1, 4],
        heads=(6, 2),
        width=width,
        dtype=torch.bfloat16,
    )
    assert error < 2e-2


def test_equal_scores_of_large_size_do_not_overflow(backend):
    table = make_table()
    row = table.acquire_row()
    pool = make_pool(1, 16, torch.float32)
    batch = make_batch(table, [row], [[0] * 80], [0])
    q = torch.full((80, 2, 16), 100.0)
    k = torch.full((80, 1, 16), 100.0)
    v = torch.randn(80, 1, 16, generator=torch.Generator().manual_seed(1))
    out = backend.run(backend.plan(batch, table), pool, 0, q, k, v)
    means = v[:, 0].cumsum(0) / torch.arange(1, 81)[:, None]
    assert torch.allclose(out[:, 0], means, atol=1e-5)


def test_nan_in_one_request_stays_there(backend):
    table = make_table()
    rows = [table.acquire_row(), table.acquire_row()]
    pool = make_pool(2, 16, torch.float32)
    batch = make_batch(table, rows, [[0] * 5, [0] * 7], [0, 0])
    q, k, v = (torch.randn(12, n, 16) for n in (4, 2, 2))
    k[2] = float("nan")
    out = backend.run(backend.plan(batch, table), pool, 0, q, k, v)
    assert out[2:5].isnan().all()
    assert not out[:2].isnan().any()
    assert not out[5:].isnan().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_bad_value_at_slot_0_stays_with_the_request_that_holds_it(backend, q_len, value):
    table = make_table()
    rows = [table.acquire_row(), table.acquire_row(), table.acquire_row()]
    pool = make_pool(2, 16, torch.float32)
    starts = [40, 5, 20]
    batch = make_batch(table, rows, [[0] * q_len] * 3, starts)
    slots = [int(table.slots(row, 0, 1)) for row in rows]
    assert slots[0] == 0, "the first request must hold slot 0"
    pool.v[0][0] = value
    q, k, v = (torch.randn(3 * q_len, n, 16) for n in (4, 2, 2))
    out = backend.run(backend.plan(batch, table), pool, 0, q, k, v)
    assert not out[:q_len].isfinite().any()
    assert out[q_len:].isfinite().all()


def test_causal_mask_is_aligned_bottom_right():
    mask = causal_mask(2, 4, dtype=torch.float32, device=torch.device("cpu"))
    visible = [[True, True, True, False], [True, True, True, True]]
    assert (mask == 0).tolist() == visible
    assert mask[0, 3] == float("-inf")
