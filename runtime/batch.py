"""ForwardBatch: what one forward call of any model (target or draft head) runs over.

Rows of all requests are flattened. Shape legend: N rows, B requests, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class BatchMode(Enum):
    """What the rows are. The attention backend may choose a kernel by it; the arithmetic is the
    same.
    """

    PREFILL = "prefill"  # ragged rows: prompt chunks, possibly mixed with one-row decodes
    DECODE = "decode"  # exactly one row per request
    VERIFY = "verify"  # exactly K+1 rows per request (target verification and draft extension)


@dataclass(frozen=True)
class ForwardBatch:
    """One flattened batch.

    ``q_lens`` and ``kv_lens`` are exact host lengths per request; ``kv_lens`` counts the new rows.
    Row ``i`` of request ``b`` sits at position ``kv_lens[b] - q_lens[b] + i``; its K/V go to the
    slot
    that the slot table holds for (``table_rows[b]``, position). ``hidden_ND`` is the draft head's
    second input.
    """

    mode: BatchMode
    input_ids_N: torch.Tensor  # int64, device
    positions_N: torch.Tensor  # int64, device
    write_slots_N: torch.Tensor  # int64, device
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    table_rows: tuple[int, ...]
    hidden_ND: torch.Tensor | None = None
