"""The best outputs found through an int8 screen are those of the whole product, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime import screened_linear
from runtime.cpu_kernels import MOST_BEST, MOST_ROWS, CpuKernels
from runtime.models.loader import load_target
from runtime.panel_linear import PanelLinear
from runtime.screened_linear import ScreenedLinear
from tests.unit.runtime.engine_fixtures import random_head
from tests.unit.runtime.model_fixtures import fused_kernels, kernel_cache, save_llama

CPU = torch.device("cpu")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def kernels(dtype: torch.dtype) -> CpuKernels:
    kernels = fused_kernels()
    if not kernels.has_screen(dtype):
        pytest.skip("no screen of this dtype on this processor")
    return kernels


def best_of_all(values_MO: torch.Tensor, count: int) -> torch.Tensor:
    """By falling value, the lowest id first among equals."""
    return values_MO.float().sort(dim=1, descending=True, stable=True).indices[:, :count]


def pair(kernels: CpuKernels, weight: torch.Tensor) -> tuple[PanelLinear, ScreenedLinear]:
    linear = PanelLinear(weight, kernels=kernels)
    return linear, ScreenedLinear(linear)


@pytest.mark.parametrize(("outputs", "inputs"), [(8192, 64), (4099, 36), (77, 128), (16, 4)])
def test_equal_to_choosing_among_all(
    kernels: CpuKernels, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    linear, screened = pair(kernels, weight)
    for rows in range(1, MOST_ROWS + 1):
        x = torch.randn(rows, inputs, generator=generator)
        x[:, 0] *= 30  # as hidden states are: a few channels are large
        x = x.to(dtype)
        for count in (1, 3, MOST_BEST):
            assert torch.equal(screened.best(x, count), best_of_all(linear(x), count))


def test_ties_go_to_the_lowest_output(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Small integers: many outputs are equal, in bfloat16 also by rounding."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-2, 3, (5000, 8), generator=generator).to(dtype)
    linear, screened = pair(kernels, weight)
    x = torch.randint(-3, 4, (4, 8), generator=generator).to(dtype)
    values = linear(x)
    assert int((values == values.amax(1, keepdim=True)).sum()) > 4
    assert torch.equal(screened.best(x, 5), best_of_all(values, 5))


def test_rows_that_say_nothing(kernels: CpuKernels, dtype: torch.dtype) -> None:
    weight = torch.randn(640, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, screened = pair(kernels, weight)
    x = torch.zeros(2, 16, dtype=dtype)
    x[1] = float("nan")
    assert screened.best(x, 3).tolist() == [[0, 1, 2]] * 2


def test_all_negative_outputs(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Outputs behind the last one, which are zero in memory, never win."""
    weight = -1 - torch.rand(8200, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    linear, screened = pair(kernels, weight[:8195])
    x = torch.full((1, 32), 0.5).to(dtype)
    assert torch.equal(screened.best(x, 8), best_of_all(linear(x), 8))


def test_few_panels_are_multiplied(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """What the kernel may skip: the slack is small beside the spread of the outputs."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(20000, 256, generator=generator).to(dtype)
    linear, screened = pair(kernels, weight)
    x = weight[123:124].float() + 0.5 * torch.randn(1, 256, generator=generator)
    values = linear(x.to(dtype)).float()[0]
    slack = screened._screen.slack_O[:20000] * x.norm()
    floor = (values - slack).max()
    assert int((values + slack >= floor).sum()) < 20
    assert screened.best(x.to(dtype), 1).item() == 123


def test_the_bound_covers_every_output(
    kernels: CpuKernels, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too small a slack loses the best output: the bound is needed, and it is enough."""
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(9000, 48, generator=generator)
    weight[:, 7] *= 40  # a coarse step for all others
    linear, screened = pair(kernels, weight.to(dtype))
    x = torch.randn(64, 48, generator=generator)
    x[:, 7] = 0
    x = x.to(dtype)
    want = best_of_all(linear(x), 1)
    assert torch.equal(torch.cat([screened.best(row, 1) for row in x.split(4)]), want)
    monkeypatch.setattr(screened_linear, "_slack", lambda weight, about, inputs: torch.zeros(1))
    careless = ScreenedLinear(linear)
    assert not torch.equal(torch.cat([careless.best(row, 1) for row in x.split(4)]), want)


def test_a_head_drafts_through_it(
    kernels: CpuKernels, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screened_linear, "_MIN_OUTPUTS", 1)
    save_llama(tmp_path / "model")
    target = load_target(tmp_path / "model", dtype=dtype, device=CPU, cache_dir=kernel_cache())
    head = random_head(target)
    assert head._screened is target.model.screened_head is not None
    hidden = torch.randn(6, head.width, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = best_of_all(head.logits(hidden), 3)
    for rows in (1, MOST_ROWS, 6):  # six are more than it takes
        assert torch.equal(head.best_columns(hidden[:rows], 1), wanted[:rows, :1])
    assert torch.equal(head.best_columns(hidden[:2], 3), wanted[:2])
