"""The attention interface: a backend stores new K/V and attends over the paged prefix.

Causality is bottom-right aligned: row ``i`` of a request sees positions
``0 .. kv_len - q_len + i``.

Shape legend: N rows, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from runtime.batch import ForwardBatch
from runtime.kv_cache import KVPool, SlotTable


class AttentionBackend(ABC):
    """Two calls per forward: ``plan`` once on the host, ``run`` once per layer."""

    @abstractmethod
    def plan(self, batch: ForwardBatch, table: SlotTable) -> Any:
        """Host work for one batch; every ``run`` of that forward (all layers) gets the result."""

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
