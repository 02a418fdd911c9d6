"""A grouped product over experts against a product per expert."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from runtime.expert_products import (
    ExpertProducts,
    GroupedExperts,
    LoopedExperts,
    prefers_grouped,
    stack_experts,
)
from runtime.layer_parts import ExpertSpec
from runtime.layers import GatedMlp
from runtime.linear import PlainLinear
from runtime.no_wait import DeviceWaitError, no_wait
from runtime.ops import TorchOps
from runtime.parallel import SingleProcessGroup

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WIDTH, INNER, NUM_EXPERTS, NUM_CHOSEN = 32, 16, 12, 4


def make(
    dtype: torch.dtype, own: range = range(NUM_EXPERTS), device: torch.device = CPU
) -> tuple[ExpertProducts, ExpertProducts]:
    """Looped and grouped, of the same weights."""
    shapes = ExpertSpec(NUM_EXPERTS, NUM_CHOSEN, INNER).shapes(hidden_size=WIDTH)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator).to(device, dtype)
        for name, shape in shapes.items()
    }
    mlps = [
        GatedMlp(
            tensors.__getitem__,
            shapes,
            ops=TorchOps(),
            make_linear=PlainLinear,
            group=SingleProcessGroup(device),
            prefix=f"mlp.experts.{index}.",
        )
        for index in own
    ]
    stacked = stack_experts(own, tensors.__getitem__, shapes)
    return (
        LoopedExperts(own, NUM_EXPERTS, mlps),
        GroupedExperts(own, NUM_EXPERTS, *stacked, ops=TorchOps()),
    )


def choices(rows: int, *, among: int = NUM_EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    """``x_ND`` and ``ids_NE``, distinct in a row."""
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randperm(among, generator=generator)[:NUM_CHOSEN] for _ in range(rows)]
    return torch.randn(rows, WIDTH, generator=generator), torch.stack(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "among"), [(1, 12), (37, 12), (9, 5)])
def test_grouped_products_are_those_per_expert(dtype: torch.dtype, rows: int, among: int) -> None:
    looped, grouped = make(dtype)
    x, ids = choices(rows, among=among)  # of 5 in 12, seven groups are empty
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    ours, theirs = grouped(x.to(dtype), ids).float(), looped(x.to(dtype), ids).float()
    assert float((ours - theirs).norm() / theirs.norm()) < bound


@pytest.mark.parametrize("own", [range(5), range(5, 9), range(9, 12)])
def test_experts_that_are_elsewhere_give_zeros(own: range) -> None:
    x, ids = choices(37)
    whole, _ = make(torch.float32)
    is_here = (ids >= own.start) & (ids < own.stop)
    wanted = whole(x, ids) * is_here[..., None]
    for products in make(torch.float32, own):
        torch.testing.assert_close(products(x, ids), wanted, rtol=1e-5, atol=1e-4)


def test_parts_of_ranks_add_up_to_the_whole() -> None:
    x, ids = choices(20)
    _, whole = make(torch.float32)
    borders = (0, 3, 3 + 4, NUM_EXPERTS)
    parts = [make(torch.float32, range(a, b))[1](x, ids) for a, b in pairwise(borders)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole(x, ids), rtol=1e-5, atol=1e-4)


def test_grouped_products_wait_for_nothing_and_those_per_expert_do() -> None:
    looped, grouped = make(torch.float32, range(5, 9))
    x, ids = choices(9)
    with no_wait():
        grouped(x, ids)
        with pytest.raises(DeviceWaitError):
            looped(x, ids)


def test_both_hold_the_same_bytes() -> None:
    looped, grouped = make(torch.bfloat16, range(3, 8))
    assert looped.num_bytes() == grouped.num_bytes() == 5 * 3 * WIDTH * INNER * 2


@pytest.mark.parametrize(
    ("device", "dtype", "inner", "wanted"),
    [
        (CUDA, torch.bfloat16, 1408, True),
        (CUDA, torch.bfloat16, 1404, False),  # 2808 bytes are no multiple of 16
        (CUDA, torch.float32, 1408, False),
        (CPU, torch.bfloat16, 1408, False),
        (CPU, torch.float32, 1408, False),
    ],
)
def test_the_choice_follows_device_dtype_and_width(
    device: torch.device, dtype: torch.dtype, inner: int, wanted: bool
) -> None:
    assert prefers_grouped(device, dtype, width=2048, inner=inner) is wanted


@pytest.mark.gpu
def test_grouped_products_on_a_gpu_are_those_per_expert() -> None:
    for own in (range(NUM_EXPERTS), range(5, 9)):
        looped, grouped = make(torch.bfloat16, own, CUDA)
        x, ids = choices(37)
        inputs = x.to(CUDA, torch.bfloat16), ids.to(CUDA)
        ours, theirs = grouped(*inputs).float(), looped(*inputs).float()
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
