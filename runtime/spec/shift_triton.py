"""The Triton kernel of :mod:`runtime.spec.shift`; imported where a GPU is used, or in its tests.

With ``TRITON_INTERPRET=1`` set before this module is imported it runs on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256  # rows per program


@triton.jit
def _shift_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, last_ptr, emitted_ptr, out_ptr, ends_ptr, num_rows, total, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < total
    request = row // num_rows
    column = row % num_rows
    is_last_column = column == num_rows - 1
    source = tl.where(is_last_column, row, row + 1)
    shifted = tl.load(ids_ptr + source, mask=is_row, other=0)
    new = tl.load(last_ptr + request, mask=is_row, other=0)
    is_end = column == tl.load(emitted_ptr + request, mask=is_row, other=0) - 1
    tl.store(out_ptr + row, tl.where(is_end, new, shifted), mask=is_row)
    tl.store(ends_ptr + request, row.to(tl.int64), mask=is_row & is_end)


def shift_inputs_triton(
    ids_BK1: torch.Tensor, last_ids_B: torch.Tensor, num_emitted_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ids_N, end_rows_B)`` as :class:`runtime.spec.shift.ShiftedInputs`; one launch."""
    num_requests, num_rows = ids_BK1.shape
    total = num_requests * num_rows
    ids_N = torch.empty(total, dtype=torch.int64, device=ids_BK1.device)
    end_rows_B = torch.empty(num_requests, dtype=torch.int64, device=ids_BK1.device)
    _shift_kernel[(triton.cdiv(total, _BLOCK),)](
        ids_BK1.contiguous(),
        last_ids_B.contiguous(),
        num_emitted_B.contiguous(),
        ids_N,
        end_rows_B,
        num_rows,
        total,
        BLOCK=_BLOCK,
    )
    return ids_N, end_rows_B
