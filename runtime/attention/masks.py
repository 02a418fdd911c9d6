"""Attention masks, bottom-right aligned.

torch's ``is_causal`` is aligned top-left and therefore only right when there is no prefix;
everything with a prefix uses an explicit mask from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import upload_ids


def causal_mask(
    q_len: int, kv_len: int, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Additive mask ``[q_len, kv_len]``: 0 where query row ``i`` may see key ``j``, else ``-inf``.

    Row ``i`` sits at position ``kv_len - q_len + i`` and sees keys up to and including itself.
    """
    assert 0 < q_len <= kv_len, f"{q_len} query rows over {kv_len} keys"
    rows = torch.arange(kv_len - q_len, kv_len, device=device)
    hidden = torch.arange(kv_len, device=device) > rows[:, None]
    return torch.zeros(q_len, kv_len, dtype=dtype, device=device).masked_fill_(
        hidden, float("-inf")
    )


def padded_causal_mask(
    q_len: int, kv_lens: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Additive masks ``[B, q_len, max(kv_lens)]`` of requests with ``q_len`` rows each.

    Keys past a request's own length are hidden from all of its rows.
    """
    assert 0 < q_len <= min(kv_lens), f"{q_len} query rows over {min(kv_lens)} keys"
    lens = upload_ids(kv_lens, device)
    rows = lens[:, None] - q_len + torch.arange(q_len, device=device)
    hidden = torch.arange(max(kv_lens), device=device) > rows[:, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
