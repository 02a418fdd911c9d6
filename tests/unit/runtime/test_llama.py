"""Our forward against transformers, fp32 <= 1e-4 relative, on every way rows reach the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.batch import BatchMode
from runtime.models.loader import Target, load_target
from tests.unit.runtime.model_fixtures import (
    LLAMA3_ROPE,
    YARN_ROPE,
    kernel_cache,
    make_batch,
    make_table,
    random_ids,
    relative_error,
    save_llama,
    scatter_pages,
)

CPU = torch.device("cpu")
VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "yarn_rope": {"rope_parameters": YARN_ROPE},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide_heads": {"head_dim": 16},
}


KERNELS = [pytest.param(False, id="torch"), pytest.param(True, id="fused")]


def load(path: Path, dtype: torch.dtype = torch.float32, *, use_kernels: bool = False) -> Target:
    return load_target(
        path,
        dtype=dtype,
        device=CPU,
        use_kernels=use_kernels,
        cache_dir=kernel_cache() if use_kernels else path.parent / "cache",
    )


def reference(model: torch.nn.Module, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' post-final-norm hidden states and logits of one sequence."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.hidden_states[-1][0], out.logits[0]


@pytest.fixture(scope="module", params=KERNELS)
def gqa(tmp_path_factory, request):
    path = tmp_path_factory.mktemp("gqa") / "model"
    model = save_llama(path)
    return model, load(path, use_kernels=request.param).model


@pytest.mark.parametrize("use_kernels", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_equal_transformers(variant, use_kernels, tmp_path):
    hf = save_llama(tmp_path / "model", **VARIANTS[variant])
    model = load(tmp_path / "model", use_kernels=use_kernels).model
    ids = random_ids(70, seed=1)
    hidden, logits = reference(hf, ids)
    table = make_table()
    row, pool = table.acquire_row(), model.new_pool(256 * 16)
    got = model.forward(make_batch(table, [row], [ids[:40]], [0]), table, pool)
    assert relative_error(got, hidden[:40]) < 1e-4
    assert relative_error(model.logits(got), logits[:40]) < 1e-4
    for position in range(40, 70):
        batch = make_batch(table, [row], [[ids[position]]], [position], mode=BatchMode.DECODE)
        got = model.forward(batch, table, pool)
        assert relative_error(got, hidden[position : position + 1]) < 1e-4


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("is_scattered", [False, True])
def test_chunked_prefill_verification_and_mixed_batches_equal_one_prefill(
    page_size, is_scattered, gqa
):
    hf, model = gqa
    table = make_table(page_size=page_size, num_pages=4096 // page_size)
    pool = model.new_pool(4096)
    sequences = [random_ids(60, seed=2), random_ids(45, seed=3), random_ids(33, seed=4)]
    wanted = [reference(hf, ids)[0] for ids in sequences]
    rows = [table.acquire_row() for _ in sequences]
    if is_scattered:
        scatter_pages(table, rows, 64)
        assert table.contiguous_start(rows[1], 40) is None
    # (cut points per sequence, mode): ragged chunks, one-row decodes beside chunks, K+1 = 4 rows.
    steps = [
        ([20, 1, 17], BatchMode.PREFILL),
        ([13, 1, 1], BatchMode.PREFILL),
        ([1, 1, 1], BatchMode.DECODE),
        ([4, 4, 4], BatchMode.VERIFY),
        ([2, 30, 1], BatchMode.PREFILL),
        ([1, 1, 1], BatchMode.DECODE),
    ]
    done = [0, 0, 0]
    for lens, mode in steps:
        chunks = [ids[d : d + n] for ids, d, n in zip(sequences, done, lens, strict=True)]
        batch = make_batch(table, rows, chunks, done, mode=mode)
        got = model.forward(batch, table, pool).split(lens)
        for index, length in enumerate(lens):
            rows_wanted = wanted[index][done[index] : done[index] + length]
            assert relative_error(got[index], rows_wanted) < 1e-4, (mode, index)
            done[index] += length


def test_rejected_rows_are_overwritten_by_the_next_step(gqa):
    hf, model = gqa
    ids = random_ids(30, seed=5)
    hidden, _ = reference(hf, ids)
    table = make_table()
    row, pool = table.acquire_row(), model.new_pool(4096)
    model.forward(make_batch(table, [row], [ids[:20]], [0]), table, pool)
    wrong = [ids[20], 7, 8, 9]
    model.forward(make_batch(table, [row], [wrong], [20], mode=BatchMode.VERIFY), table, pool)
    batch = make_batch(table, [row], [ids[21:25]], [21], mode=BatchMode.VERIFY)
    assert relative_error(model.forward(batch, table, pool), hidden[21:25]) < 1e-4


@pytest.mark.parametrize("use_kernels", KERNELS)
def test_bf16_error_is_bf16_rounding(use_kernels, tmp_path):
    hf = save_llama(tmp_path / "model")
    ids = random_ids(64, seed=6)
    hidden, _ = reference(hf, ids)
    model = load(tmp_path / "model", torch.bfloat16, use_kernels=use_kernels).model
    table = make_table()
    row, pool = table.acquire_row(), model.new_pool(4096)
    got = model.forward(make_batch(table, [row], [ids], [0]), table, pool)
    ours = (got.float() - hidden).abs().mean()
    theirs = (reference(hf.to(torch.bfloat16), ids)[0].float() - hidden).abs().mean()
    assert got.dtype is torch.bfloat16
    assert ours <= 1.2 * theirs
