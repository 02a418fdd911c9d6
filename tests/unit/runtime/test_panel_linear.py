"""Linears as panels, and decoder blocks run by one kernel, against their single operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from runtime.attention.cpu import CpuBackend
from runtime.cpu_kernels import CpuKernels
from runtime.head_spec import RopeSpec
from runtime.kv_cache import KVPool
from runtime.layers import BlockShape, DecoderBlock, RotaryEmbedding, build_block, run_blocks
from runtime.panel_linear import PanelLinear
from runtime.parallel import SingleProcessGroup
from tests.unit.runtime.model_fixtures import fused_kernels, make_batch, make_table

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16"])
def dtype(request) -> torch.dtype:
    if not fused_kernels().has_products(request.param):
        pytest.skip("no products of this dtype on this processor")
    return request.param


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 33, 200])
@pytest.mark.parametrize("inputs", [50, 96])  # 96: whole matrix tiles of bfloat16
@pytest.mark.parametrize("outputs", [1, 16, 33, 97, 128])
@pytest.mark.parametrize("has_bias", [False, True])
def test_panels_give_the_product(dtype, rows, inputs, outputs, has_bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    got = PanelLinear(weight, bias, kernels=fused_kernels())(x)
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    assert got.dtype is dtype
    assert torch.allclose(got.double(), wanted, rtol=tolerance, atol=1e-4)


def test_the_weight_comes_back_bit_for_bit(dtype):
    weight = torch.randn(33, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(PanelLinear(weight, kernels=fused_kernels()).dense_weight(), weight)


def test_a_row_does_not_depend_on_the_rows_beside_it(dtype):
    generator = torch.Generator().manual_seed(0)
    linear = PanelLinear(
        torch.randn(131, 576, generator=generator).to(dtype), kernels=fused_kernels()
    )
    x = torch.randn(400, 576, generator=generator).to(dtype)
    together = linear(x)
    for first, last in ((0, 1), (3, 5), (7, 11), (8, 25), (100, 313), (395, 400)):
        assert torch.equal(linear(x[first:last]), together[first:last])


def test_other_libraries_find_their_matrix_tiles_again():
    """torch's own products of bfloat16 may keep a configuration in the same registers."""
    generator = torch.Generator().manual_seed(0)
    weight, other = torch.randn(2, 96, 64, generator=generator).bfloat16()
    linear = PanelLinear(weight, kernels=fused_kernels())
    xs = [torch.randn(rows, 64, generator=generator).bfloat16() for rows in (1, 17, 40, 3)]
    wanted = [F.linear(x, other) for x in xs]
    for x, result in zip(xs, wanted, strict=True):
        linear(x)
        assert torch.equal(F.linear(x, other), result)


def test_rows_that_are_not_contiguous_are_read_right(dtype):
    linear = PanelLinear(torch.eye(32, dtype=dtype), kernels=fused_kernels())
    x = torch.arange(96, dtype=dtype).view(3, 32)
    assert torch.equal(linear(x[::2]), x[::2])


class OneByOne(CpuBackend):
    """The same kernels, called one after the other."""

    def run_blocks(self, *_: object) -> bool:
        return False


def make_block(
    kernels: CpuKernels,
    dtype: torch.dtype,
    *,
    bias: bool,
    norms: bool,
    head_norms: bool = False,
    head_dim: int = 24,
    width: int = 64,
) -> DecoderBlock:
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, inner = 4, 2, 80
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * head_dim, width),
        "self_attn.k_proj.weight": (kv_heads * head_dim, width),
        "self_attn.v_proj.weight": (kv_heads * head_dim, width),
        "self_attn.o_proj.weight": (width, heads * head_dim),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    if bias:
        shapes |= {n.replace(".weight", ".bias"): (s[0],) for n, s in list(shapes.items())}
    if head_norms:
        shapes |= {f"self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
    if norms:
        shapes |= {f"{n}_layernorm.weight": (width,) for n in ("input", "post_attention")}

    def take(name: str) -> torch.Tensor:
        values = torch.randn(shapes[name], generator=generator)
        return (values * 0.3 + ("norm" in name)).to(dtype)

    return build_block(
        BlockShape(heads, kv_heads, head_dim, 1e-5),
        take,
        shapes,
        ops=kernels,
        make_linear=lambda weight, bias: PanelLinear(weight, bias, kernels=kernels),
        group=SingleProcessGroup(CPU),
    )


class Blocks:
    """Three random blocks behind 70 tokens of every request; ``rows``: (table row, new rows)."""

    def __init__(
        self,
        dtype: torch.dtype,
        rows: list[tuple[int, int]],
        *,
        head_dim: int = 24,
        **parts: bool,
    ) -> None:
        kernels = fused_kernels()
        self.blocks = [make_block(kernels, dtype, head_dim=head_dim, **parts) for _ in range(3)]
        self.table = make_table()
        for row, count in rows:
            self.table.acquire_row()
            self.table.reserve(row, 70 + count)
        generator = torch.Generator().manual_seed(1)
        self.pool = KVPool(
            num_layers=3, num_slots=4096, num_kv_heads=2, head_dim=head_dim, dtype=dtype, device=CPU
        )
        self.filled = torch.randn(self.pool._all.shape, generator=generator).to(dtype)
        chunks = [[1] * count for _, count in rows]
        self.batch = make_batch(self.table, [row for row, _ in rows], chunks, [70] * len(rows))
        self.x = torch.randn(sum(map(len, chunks)), 64, generator=generator).to(dtype)
        rotary = RotaryEmbedding(RopeSpec(1e4), head_dim, device=CPU)
        self.angles = rotary.angles(self.batch.positions_N, dtype, end=self.batch.end)

    def run(self, backend: CpuBackend) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The residual stream, all K/V, and whether the blocks were one call."""
        self.pool._all.copy_(self.filled)
        out = self.x.clone()
        plan = backend.plan(replace(self.batch), self.table)
        delta = run_blocks(
            self.blocks, out, self.angles, backend=backend, plan=plan, pool=self.pool
        )
        assert not torch.equal(out, self.x)
        return out if delta is None else out + delta, self.pool._all.clone(), delta is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("norms", "head_norms"), [(False, False), (True, False), (True, True), (False, True)]
)
@pytest.mark.parametrize("head_dim", [24, 32])  # 32: whole matrix tiles
@pytest.mark.parametrize("rows", [[(0, 40), (1, 7)], [(0, 1)], [(0, 1), (1, 3)], [(0, 230)]])
def test_fused_blocks_equal_their_operations_bit_for_bit(
    dtype, bias, norms, head_norms, head_dim, rows
):
    work = Blocks(dtype, rows, bias=bias, norms=norms, head_norms=head_norms, head_dim=head_dim)
    fused_x, fused_kv, is_one_call = work.run(CpuBackend(fused_kernels()))
    single_x, single_kv, is_one_call_too = work.run(OneByOne(fused_kernels()))
    assert (is_one_call, is_one_call_too) == (True, False)
    assert torch.equal(fused_x, single_x)
    assert torch.equal(fused_kv, single_kv)


@pytest.mark.parametrize("rows", [[(0, 40), (1, 7)], [(0, 1)], [(0, 230), (1, 1), (2, 4)]])
def test_the_number_of_threads_changes_no_bit(dtype, rows):
    work = Blocks(dtype, rows, bias=True, norms=True, head_norms=True)
    logits = PanelLinear(torch.randn(97, 64).to(dtype), kernels=fused_kernels())
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            x, kv, _ = work.run(CpuBackend(fused_kernels()))
            results.append((x, kv, logits(x)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            assert torch.equal(got, wanted)


def test_blocks_of_other_widths_run_one_by_one(dtype):
    kernels = fused_kernels()
    assert make_block(kernels, dtype, bias=False, norms=True, width=36).fused is None
