"""The head's input ids after verification: the target's, shifted left, with its new tokens.

One kernel on a GPU (Triton), plain torch on a CPU; tests hold them against each other. Nobody asks
the device how many tokens were accepted.

Shape legend: B requests, K drafts, N = B * (K + 1) rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShiftedInputs:
    """``ids_N`` int64; ``end_rows_B`` int64: the flat row of each request that holds its new token.

    Rows after that one are stale: whoever reads them next overwrites them first.
    """

    ids_N: torch.Tensor
    end_rows_B: torch.Tensor


def shift_inputs(
    ids_BK1: torch.Tensor, last_ids_B: torch.Tensor, num_emitted_B: torch.Tensor
) -> ShiftedInputs:
    """Row ``j`` of a request gets its target's input ``j + 1``; row ``num_emitted - 1`` the token
    that the target added. The last row keeps an id of the vocabulary, whatever it is.

    ``ids_BK1``: what the target ran over, ``[t_L, d_1 .. d_K]``; ``num_emitted_B`` in 1..K+1. All
    int64, on one device.
    """
    if ids_BK1.device.type == "cuda":
        from runtime.spec.shift_triton import shift_inputs_triton

        return ShiftedInputs(*shift_inputs_triton(ids_BK1, last_ids_B, num_emitted_B))
    return shift_inputs_torch(ids_BK1, last_ids_B, num_emitted_B)


def shift_inputs_torch(
    ids_BK1: torch.Tensor, last_ids_B: torch.Tensor, num_emitted_B: torch.Tensor
) -> ShiftedInputs:
    """The same in plain torch, on any device."""
    num_requests, num_rows = ids_BK1.shape
    ends_B = num_emitted_B - 1
    shifted_BK1 = torch.cat([ids_BK1[:, 1:], ids_BK1[:, -1:]], 1)
    shifted_BK1 = shifted_BK1.scatter_(1, ends_B[:, None], last_ids_B[:, None])
    first_rows_B = torch.arange(0, num_requests * num_rows, num_rows, device=ids_BK1.device)
    return ShiftedInputs(shifted_BK1.reshape(-1), first_rows_B + ends_B)
