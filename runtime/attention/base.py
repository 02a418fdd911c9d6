"""The attention interface: a backend stores new K/V and attends over the paged prefix.

Causality is bottom-right aligned: row ``i`` of a request sees positions
``0 .. kv_len - q_len + i``.

Shape legend: N rows, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

import torch

from runtime.batch import ForwardBatch
from runtime.kv_cache import KVPool, SlotTable
from runtime.ops import RotaryAngles

_NOT_PLANNED = frozenset({"input_ids_N", "hidden_ND", "positions_N", "plans", "halves"})


class AttentionBackend(ABC):
    """Two calls per forward: ``plan`` once on the host, ``run`` once per layer."""

    has_latent = False  # whether ``run_latent`` is there
    plans_at_once = True  # whether a plan stays good when another one is made

    @abstractmethod
    def plan(self, batch: ForwardBatch, table: SlotTable) -> Any:
        """Host work for one batch; every ``run`` of that forward (all layers) gets the result."""

    def plan_once(self, batch: ForwardBatch, table: SlotTable) -> Any:
        """:meth:`plan`, or the plan that another model made with this backend over the same rows.

        Ids, hidden states and positions are the models' own; everything else decides the plan.
        """
        parts = [
            getattr(batch, field.name) for field in fields(batch) if field.name not in _NOT_PLANNED
        ]
        key = (id(self), id(table), *(p if isinstance(p, tuple | Enum) else id(p) for p in parts))
        if key not in batch.plans:
            # What has its id in the key stays alive, or something else could get the same one.
            batch.plans[key] = self.plan(batch, table), parts
        return batch.plans[key][0]

    @abstractmethod
    def run(
        self,
        plan: Any,
        pool: KVPool,
        layer: int,
        q_NHC: torch.Tensor,
        k_NGC: torch.Tensor,
        v_NGC: torch.Tensor,
    ) -> torch.Tensor:
        """Write ``k, v`` at the batch's slots, attend; returns ``[N, H, C]`` in q's dtype."""

    def run_latent(
        self,
        plan: Any,
        pool: KVPool,
        layer: int,
        q_NHC: torch.Tensor,
        latent_N1C: torch.Tensor,
        *,
        scale: float,
    ) -> torch.Tensor:
        """:meth:`run` over a pool without values: all query heads read one vector per token, which
        is key and value. ``scale`` multiplies scores.
        """
        raise AssertionError(f"{type(self).__name__} has no attention over a latent cache")

    def run_blocks(
        self,
        blocks: Sequence[Any],
        x_ND: torch.Tensor,
        angles: RotaryAngles,
        plan: Any,
        pool: KVPool,
        first_layer: int,
    ) -> bool:
        """Run whole decoder blocks (:class:`runtime.layers.DecoderBlock`) in one go over the
        pool's layers from ``first_layer`` on, updating ``x`` in place; ``False``: this backend has
        no kernel for them, and nothing has happened.
        """
        return False
