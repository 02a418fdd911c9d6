"""A batch in two halves, layer by layer: communication between ranks behind computation.

Every part of a decoder block ends in a sum over ranks. While the sum of one half is on its way, the
other half is computed:

    compute    A attention   B attention   A MLP         B MLP         A attention ...
    sums                     A attention   B attention   A MLP         B MLP

A half is whole requests, so that nobody's keys are read twice; weights are. What a row gets does
not depend on the rows beside it, so halves change nothing but the order of events.

Shape legend: N rows of both halves, M of one, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.attention.base import AttentionBackend
from runtime.batch import ForwardBatch
from runtime.kv_cache import KVPool, SlotTable
from runtime.layers import DecoderBlock, run_blocks
from runtime.ops import RotaryAngles
from runtime.parallel import PendingSum, ProcessGroup


@dataclass(frozen=True)
class HalfPlans:
    """Attention plans of the halves of a batch; the first one has ``num_first`` rows."""

    num_first: int
    plans: tuple[Any, Any]


def plan_rows(backend: AttentionBackend, batch: ForwardBatch, table: SlotTable) -> Any:
    """``backend``'s plan of ``batch``, or those of its halves; for :func:`run_rows`."""
    if batch.halves is None:
        return backend.plan_once(batch, table)
    first, second = batch.halves
    plans = (backend.plan_once(first, table), backend.plan_once(second, table))
    return HalfPlans(sum(first.q_lens), plans)


def run_rows(
    blocks: Sequence[DecoderBlock],
    x_ND: torch.Tensor,
    angles: RotaryAngles,
    *,
    backend: AttentionBackend,
    plan: Any,
    pool: KVPool,
    first_layer: int = 0,
) -> torch.Tensor | None:
    """:func:`runtime.layers.run_blocks` with a plan of :func:`plan_rows`."""
    if not isinstance(plan, HalfPlans):
        return run_blocks(
            blocks, x_ND, angles, backend=backend, plan=plan, pool=pool, first_layer=first_layer
        )
    if not blocks:
        return None
    bounds = ((0, plan.num_first), (plan.num_first, x_ND.shape[0]))
    halves = [
        _Half(x_ND[start:stop], _rows_of(angles, start, stop), own)
        for (start, stop), own in zip(bounds, plan.plans, strict=True)
    ]
    for layer, block in enumerate(blocks, start=first_layer):
        for half in halves:
            inputs_MD = block.add_norm(half.x_MD, half.finish(), block.input_norm)
            half.start(
                block.attention.own_part(
                    inputs_MD,
                    half.angles,
                    backend=backend,
                    plan=half.plan,
                    pool=pool,
                    layer=layer,
                ),
                block.group,
            )
        for half in halves:
            inputs_MD = block.add_norm(half.x_MD, half.finish(), block.post_attention_norm)
            half.start(block.mlp.own_part(inputs_MD), block.group)
    deltas = [half.finish() for half in halves]
    return torch.cat([delta_MD for delta_MD in deltas if delta_MD is not None])


class _Half:
    """``x_MD`` is a view of the rows' residual stream; ``finish`` before it is added to."""

    def __init__(self, x_MD: torch.Tensor, angles: RotaryAngles, plan: Any) -> None:
        self.x_MD = x_MD
        self.angles = angles
        self.plan = plan
        self._pending: PendingSum | None = None

    def start(self, part_MD: torch.Tensor, group: ProcessGroup) -> None:
        """Send this rank's part of what is to be added to ``x`` on its way."""
        self._pending = group.start_all_reduce(part_MD)

    def finish(self) -> torch.Tensor | None:
        """What is to be added to ``x``; ``None`` before the first part."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.wait()


def _rows_of(angles: RotaryAngles, start: int, stop: int) -> RotaryAngles:
    return RotaryAngles(angles.cos_NC[start:stop], angles.sin_NC[start:stop])
