"""The kernel of the draft extension's input ids, compiled, against plain torch."""

from __future__ import annotations

import pytest
import torch

from runtime.spec.shift import shift_inputs, shift_inputs_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("num_requests", "k"), [(1, 1), (64, 1), (300, 1), (129, 3)])
def test_the_compiled_kernel_computes_what_torch_does(num_requests: int, k: int) -> None:
    generator = torch.Generator().manual_seed(num_requests + k)
    ids = torch.randint(0, 50_000, (num_requests, k + 1), generator=generator)
    last = torch.randint(0, 50_000, (num_requests,), generator=generator)
    emitted = torch.randint(1, k + 2, (num_requests,), generator=generator)
    got = shift_inputs(ids.cuda(), last.cuda(), emitted.cuda())
    want = shift_inputs_torch(ids, last, emitted)
    assert torch.equal(got.ids_N.cpu(), want.ids_N)
    assert torch.equal(got.end_rows_B.cpu(), want.end_rows_B)
