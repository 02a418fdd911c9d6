"""The ids of the draft extension: shifted by one, the target's own token where it belongs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from runtime.no_wait import no_wait
from runtime.spec.shift import ShiftedInputs, shift_inputs, shift_inputs_torch
from tests.unit.runtime.model_fixtures import fused_kernels


def reference(ids: list[list[int]], last: list[int], emitted: list[int]) -> tuple[list[int], ...]:
    """Written out row by row. Rows after the new token may hold anything of the vocabulary."""
    flat, ends = [], []
    for request, (row, token, count) in enumerate(zip(ids, last, emitted, strict=True)):
        for column in range(len(row)):
            if column == count - 1:
                ends.append(request * len(row) + column)
                flat.append(token)
            else:
                flat.append(row[min(column + 1, len(row) - 1)])
    return flat, ends


def draw(num_requests: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_requests * 10 + k)
    ids = torch.randint(0, 50_000, (num_requests, k + 1), generator=generator)
    last = torch.randint(0, 50_000, (num_requests,), generator=generator)
    emitted = torch.randint(1, k + 2, (num_requests,), generator=generator)
    return ids, last, emitted


SHAPES = [(1, 1), (1, 3), (7, 1), (5, 4), (300, 1), (129, 3)]


@pytest.mark.parametrize(("num_requests", "k"), SHAPES)
def test_every_row_has_the_token_that_follows_it(num_requests: int, k: int) -> None:
    ids, last, emitted = draw(num_requests, k)
    with no_wait():
        got = shift_inputs(ids, last, emitted)
    flat, ends = reference(ids.tolist(), last.tolist(), emitted.tolist())
    assert got.ids_N.tolist() == flat
    assert got.end_rows_B.tolist() == ends
    assert got.ids_N.dtype == got.end_rows_B.dtype == torch.int64


@pytest.mark.parametrize(("num_requests", "k"), SHAPES)
def test_the_cpu_kernel_does_what_torch_does(num_requests: int, k: int) -> None:
    ids, last, emitted = draw(num_requests, k)
    kernels = fused_kernels()
    with no_wait():
        got = kernels.shift_inputs(ids, last, emitted)
    want = shift_inputs_torch(ids, last, emitted)
    assert torch.equal(got.ids_N, want.ids_N)
    assert torch.equal(got.end_rows_B, want.end_rows_B)


def test_inputs_are_left_as_they_were() -> None:
    ids, last, emitted = draw(4, 2)
    kept = ids.clone(), last.clone(), emitted.clone()
    shift_inputs_torch(ids, last, emitted)
    assert all(torch.equal(a, b) for a, b in zip(kept, (ids, last, emitted), strict=True))


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    pytest.importorskip("triton", reason="Triton is not installed (extra dev, on Linux)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        sys.modules.pop("runtime.spec.shift_triton", None)  # read when the module is imported
        return importlib.import_module("runtime.spec.shift_triton")


@pytest.mark.parametrize(("num_requests", "k"), SHAPES)
def test_the_kernel_computes_what_torch_does(kernel: ModuleType, num_requests: int, k: int) -> None:
    """In Triton's interpreter: indices and masks are those of a GPU."""
    ids, last, emitted = draw(num_requests, k)
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]] = kernel.shift_inputs_triton
    got = ShiftedInputs(*run(ids, last, emitted))
    want = shift_inputs_torch(ids, last, emitted)
    assert torch.equal(got.ids_N, want.ids_N)
    assert torch.equal(got.end_rows_B, want.end_rows_B)


def test_the_kernel_takes_views(kernel: ModuleType) -> None:
    ids, last, emitted = draw(6, 3)
    wide = torch.zeros(6, 8, dtype=torch.int64)
    wide[:, ::2] = ids
    got_ids, got_ends = kernel.shift_inputs_triton(wide[:, ::2], last, emitted)
    want = shift_inputs_torch(ids, last, emitted)
    assert torch.equal(got_ids, want.ids_N)
    assert torch.equal(got_ends, want.end_rows_B)
