"""ForwardBatch: what one forward call of any model (target or draft head) runs over.

Rows of all requests are flattened. Shape legend: N rows, B requests, D model width.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import torch

from runtime.kv_cache import SlotTable


class BatchMode(Enum):
    """What the rows are. A backend may choose a kernel by it; the arithmetic is the same."""

    PREFILL = "prefill"  # ragged rows: prompt chunks, possibly mixed with one-row decodes
    DECODE = "decode"  # exactly one row per request
    VERIFY = "verify"  # equally many rows per request: K+1 (target, head) or 2 (draft model)
    TREE = "tree"  # equally many tree rows per request, each with the rows that it sees


@dataclass(frozen=True)
class ForwardBatch:
    """One flattened batch.

    ``q_lens`` and ``kv_lens`` are exact host lengths per request; ``kv_lens`` counts the new rows.
    Row ``i`` of request ``b`` sits at position ``kv_lens[b] - q_lens[b] + i``; its K/V go to the
    slot that the slot table holds for (``table_rows[b]``, position). ``hidden_ND`` is the draft
    head's second input.

    Rows of a draft tree (``visible_BSJ``, bool): the last J of the ``kv_lens[b]`` slots are a block
    of tree rows, of which the S new ones come last; row ``s`` sees the prefix before the block and
    the block rows that ``visible_BSJ[b, s]`` names. Slots then count rows, positions count tokens.

    ``attention_plan`` is what the attention backend made beforehand, where a forward is captured
    into a graph; its ``plan`` then returns this object.
    """

    mode: BatchMode
    input_ids_N: torch.Tensor  # int64, device
    positions_N: torch.Tensor  # int64, device
    write_slots_N: torch.Tensor  # int64, device
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    table_rows: tuple[int, ...]
    # What attention backends planned for these rows; `dataclasses.replace` keeps it, so that a head
    # over the target's rows reads the target's plan (`AttentionBackend.plan_once`).
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    hidden_ND: torch.Tensor | None = None
    visible_BSJ: torch.Tensor | None = None
    attention_plan: Any = None
    # The same rows by halves, where they are to be computed so; only what plans read is looked at.
    halves: tuple[ForwardBatch, ForwardBatch] | None = None

    @property
    def end(self) -> int:
        """Every position is below it."""
        return max(self.kv_lens)

    @property
    def may_hold_first(self) -> bool:
        """Whether a row can be at position 0, as far as the host knows."""
        is_captured = self.attention_plan is not None  # other lengths will follow
        return is_captured or any(map(operator.eq, self.q_lens, self.kv_lens))


def build_batch(
    mode: BatchMode,
    *,
    table: SlotTable,
    table_rows: Sequence[int],
    starts: Sequence[int],
    q_lens: Sequence[int],
    input_ids_N: torch.Tensor,
    device: torch.device,
    hidden_ND: torch.Tensor | None = None,
) -> ForwardBatch:
    """Rows ``starts[b] .. starts[b] + q_lens[b] - 1`` of each request, in request order."""
    if len(starts) == 1:  # where every microsecond of the host is one of the step
        stop = starts[0] + q_lens[0]
        positions_N = np.arange(starts[0], stop)
        slots_N = table.host_slots_RT[table_rows[0], starts[0] : stop].copy()
    else:
        positions_N, rows_N = _locate(table_rows, starts, q_lens)
        slots_N = table.host_slots_RT[rows_N, positions_N]
    return ForwardBatch(
        mode=mode,
        input_ids_N=input_ids_N,
        positions_N=upload(torch.from_numpy(positions_N), device),
        write_slots_N=upload(torch.from_numpy(slots_N), device),
        q_lens=tuple(q_lens),
        kv_lens=tuple(start + count for start, count in zip(starts, q_lens, strict=True)),
        table_rows=tuple(table_rows),
        hidden_ND=hidden_ND,
    )


def _locate(
    table_rows: Sequence[int], starts: Sequence[int], q_lens: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Position and table row of every row of a batch."""
    starts_B, rows_B = np.asarray(starts), np.asarray(table_rows)
    if min(q_lens) == max(q_lens):  # decoding and verification
        positions_N = (starts_B[:, None] + np.arange(q_lens[0])).ravel()
        return positions_N, np.repeat(rows_B, q_lens[0])
    # Row i of the batch: its request's start, plus how far it is into that request's rows.
    counts_B = np.asarray(q_lens)
    offsets_B = np.cumsum(counts_B) - counts_B
    positions_N = np.repeat(starts_B - offsets_B, counts_B) + np.arange(sum(q_lens))
    return positions_N, np.repeat(rows_B, counts_B)


def cut_in_halves(batch: ForwardBatch) -> ForwardBatch:
    """``batch`` with :attr:`~ForwardBatch.halves`, each of whole requests; a lone request is left
    as it is. Not for trees.
    """
    assert batch.visible_BSJ is None, "a tree is not cut"
    assert batch.attention_plan is None, "a graph's batch is not cut"
    num_requests = len(batch.q_lens)
    if num_requests < 2:
        return batch
    middle = (num_requests + 1) // 2
    row = sum(batch.q_lens[:middle])
    first, second = (
        ForwardBatch(
            mode=batch.mode,
            input_ids_N=batch.input_ids_N[rows],
            positions_N=batch.positions_N[rows],
            write_slots_N=batch.write_slots_N[rows],
            q_lens=batch.q_lens[requests],
            kv_lens=batch.kv_lens[requests],
            table_rows=batch.table_rows[requests],
        )
        for rows, requests in (
            (slice(row), slice(middle)),
            (slice(row, None), slice(middle, None)),
        )
    )
    return replace(batch, halves=(first, second))


def build_tree_batch(
    *,
    table: SlotTable,
    table_rows: Sequence[int],
    prefix_lens: Sequence[int],
    positions_BS: torch.Tensor,
    input_ids_BS: torch.Tensor,
    visible_BSJ: torch.Tensor,
    hidden_BSD: torch.Tensor | None = None,
) -> ForwardBatch:
    """The last S of J tree rows behind the prefix of each request; positions are on the device."""
    _, num_rows, block_len = visible_BSJ.shape
    kv_lens = tuple(length + block_len for length in prefix_lens)
    if len(kv_lens) == 1:  # see build_batch
        slots_BS = table.host_slots_RT[table_rows[0], kv_lens[0] - num_rows : kv_lens[0]].copy()
    else:
        ends_B1, rows_B1 = np.asarray(kv_lens)[:, None], np.asarray(table_rows)[:, None]
        slots_BS = table.host_slots_RT[rows_B1, ends_B1 + np.arange(-num_rows, 0)]
    return ForwardBatch(
        mode=BatchMode.TREE,
        input_ids_N=input_ids_BS.reshape(-1),
        positions_N=positions_BS.reshape(-1),
        write_slots_N=upload(torch.from_numpy(slots_BS.ravel()), positions_BS.device),
        q_lens=(num_rows,) * len(kv_lens),
        kv_lens=kv_lens,
        table_rows=tuple(table_rows),
        hidden_ND=None if hidden_BSD is None else hidden_BSD.flatten(0, 1),
        visible_BSJ=visible_BSJ,
    )


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on ``device`` without waiting for it (through pinned memory on a GPU)."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_ids(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Host integers as an int64 tensor on ``device``, without waiting for it."""
    return upload(torch.tensor(values, dtype=torch.int64), device)
