"""Tree rows in both backends against a loop over rows that sees exactly what each row may see."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.attention.base import AttentionBackend
from runtime.attention.cpu import CpuBackend
from runtime.attention.merge import attend_in_full, attend_part, merge_parts
from runtime.attention.sdpa import SdpaBackend
from runtime.batch import build_tree_batch
from runtime.kv_cache import KVPool, SlotTable
from runtime.spec.tree_shape import visible_rows
from tests.unit.runtime.model_fixtures import (
    fused_kernels,
    make_table,
    relative_error,
    scatter_pages,
)

HEADS, KV_HEADS, WIDTH = 6, 2, 20


@pytest.fixture(scope="module", params=["sdpa", "fused"])
def backend(request) -> AttentionBackend:
    if request.param == "sdpa":
        return SdpaBackend()
    return CpuBackend(fused_kernels())


def random_tree(num_nodes: int, *, count: int, seed: int) -> torch.Tensor:
    """Parents' rows ``[count, num_nodes]``: any earlier row."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [int(torch.randint(0, row, (1,), generator=generator)) for row in range(1, num_nodes + 1)]
        for _ in range(count)
    ]
    return torch.tensor(rows)


def attend_slowly(
    q_HC: torch.Tensor, k_TGC: torch.Tensor, v_TGC: torch.Tensor, seen: list[int]
) -> torch.Tensor:
    width = q_HC.shape[1]
    out = torch.zeros(HEADS, width, dtype=torch.float64)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        keys, values = k_TGC[seen, group].double(), v_TGC[seen, group].double()
        out[head] = torch.softmax(keys @ q_HC[head].double() / math.sqrt(width), 0) @ values
    return out


def run_tree_rows(
    backend: AttentionBackend,
    table: SlotTable,
    prefix_lens: list[int],
    visible_BRR: torch.Tensor,
    *,
    num_new: int,
    dtype: torch.dtype = torch.float32,
    width: int = WIDTH,
    is_scattered: bool = False,
) -> float:
    """Largest relative error of the last ``num_new`` rows of each tree; the rest was there."""
    generator = torch.Generator().manual_seed(0)
    count, num_rows, _ = visible_BRR.shape
    table_rows = [table.acquire_row() for _ in prefix_lens]
    ends = [length + num_rows for length in prefix_lens]
    if is_scattered:
        scatter_pages(table, table_rows, max(ends))
    for row, end in zip(table_rows, ends, strict=True):
        table.reserve(row, end)
    pool = KVPool(
        num_layers=1,
        num_slots=4096,
        num_kv_heads=KV_HEADS,
        head_dim=width,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for stored in (pool.k[0], pool.v[0]):
        stored.copy_(torch.randn(stored.shape, generator=generator))
    batch = build_tree_batch(
        table=table,
        table_rows=table_rows,
        prefix_lens=prefix_lens,
        positions_BS=torch.zeros(count, num_new, dtype=torch.int64),
        input_ids_BS=torch.zeros(count, num_new, dtype=torch.int64),
        visible_BSJ=visible_BRR[:, num_rows - num_new :],
    )
    merged = torch.randn(count * num_new, HEADS + 2 * KV_HEADS, width, generator=generator).to(
        dtype
    )
    q, k, v = merged.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    out = backend.run(backend.plan(batch, table), pool, 0, q, k, v)
    assert out.dtype is dtype
    worst = 0.0
    for b, (row, end) in enumerate(zip(table_rows, ends, strict=True)):
        slots = table.slots(row, 0, end)
        keys, values = pool.k[0][slots], pool.v[0][slots]
        assert torch.equal(keys[end - num_new :], k[b * num_new : (b + 1) * num_new])
        for index in range(num_new):
            in_block = visible_BRR[b, num_rows - num_new + index].nonzero()[:, 0]
            seen = [*range(prefix_lens[b]), *(prefix_lens[b] + in_block).tolist()]
            want = attend_slowly(q[b * num_new + index], keys, values, seen)
            worst = max(worst, relative_error(out[b * num_new + index], want))
    return worst


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("prefix_lens", [[1], [63, 64, 65], [200, 1, 0]])
def test_tree_rows_see_the_prefix_and_their_ancestors(
    backend, prefix_lens, page_size, is_scattered
):
    table = make_table(page_size=page_size, num_pages=4096 // page_size)
    parents = random_tree(12, count=len(prefix_lens), seed=1)
    visible = visible_rows(parents, 12)
    error = run_tree_rows(
        backend, table, prefix_lens, visible, num_new=13, is_scattered=is_scattered
    )
    assert error < 2e-6


@pytest.mark.parametrize("num_new", [1, 4])
def test_later_levels_see_rows_of_earlier_ones(backend, num_new):
    visible = visible_rows(random_tree(9, count=2, seed=2), 9)
    assert run_tree_rows(backend, make_table(), [30, 5], visible, num_new=num_new) < 2e-6


def test_a_block_longer_than_a_tile_of_keys(backend):
    """Rows whose first blocks of keys are hidden altogether, without any prefix as well."""
    num_rows = 150
    visible = torch.zeros(2, num_rows, num_rows, dtype=torch.bool)
    visible[:, range(num_rows), range(num_rows)] = True
    visible[0, :, ::7] = True
    assert run_tree_rows(backend, make_table(), [0, 70], visible, num_new=num_rows) < 2e-6


@pytest.mark.parametrize("width", [WIDTH, 64])  # 64: whole matrix tiles
@pytest.mark.parametrize("num_nodes", [12, 40])
def test_bfloat16_is_rounded_once(backend, num_nodes, width):
    visible = visible_rows(random_tree(num_nodes, count=2, seed=3), num_nodes)
    error = run_tree_rows(
        backend,
        make_table(),
        [130, 17],
        visible,
        num_new=num_nodes + 1,
        dtype=torch.bfloat16,
        width=width,
    )
    assert error < 2e-2


def test_a_path_is_what_a_chain_sees(backend):
    """A tree without branches attends exactly as causal rows do."""
    parents = torch.arange(6)[None]
    assert torch.equal(visible_rows(parents, 6)[0], torch.ones(7, 7).tril().bool())


@pytest.mark.parametrize("attend", [attend_part, attend_in_full])
def test_parts_merge_into_the_whole_whatever_their_scale(attend):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64) * 8
    k, v = torch.randn(2, 2, 3, 40, 8, generator=generator, dtype=torch.float64).unbind()
    k[:, :, :9] *= 30  # one part outweighs the other by far, in some rows the other way round
    want = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v
    parts = [
        attend(q.float(), k[:, :, keys].float(), v[:, :, keys].float())
        for keys in (slice(0, 9), slice(9, 40))
    ]
    got = merge_parts(*parts[0], *parts[1])
    assert relative_error(got, want) < 1e-5
    assert torch.equal(got, merge_parts(*parts[1], *parts[0]))


def test_a_part_in_which_nothing_is_seen_adds_nothing():
    out, lse = torch.randn(4, 8), torch.randn(4)
    unseen = merge_parts(out, lse, torch.ones(4, 8), torch.full((4,), -math.inf))
    assert torch.equal(unseen, out)


@pytest.mark.parametrize("attend", [attend_part, attend_in_full])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_log_sum_exp_is_natural_and_of_scaled_scores(attend, is_masked):
    q, k, v = torch.randn(3, 1, 2, 7, 16).unbind()
    is_visible = torch.rand(7, 7) < 0.5
    is_visible.fill_diagonal_(True)
    scores = (q @ k.transpose(-1, -2) / 4).double()
    if is_masked:
        scores = scores.masked_fill(~is_visible, -math.inf)
    out, lse = attend(q, k, v, is_visible=is_visible if is_masked else None)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-5)
    assert torch.allclose(out.double(), scores.softmax(-1) @ v.double(), atol=1e-5)
