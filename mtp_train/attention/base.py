"""The interface of attention in training.

Shape legend: S packed key rows, N query rows, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from mtp_train.attention.plan import AttentionPlan, ChainStep


class TrainingAttention(ABC):
    """Softmax attention of packed query rows over prefix and chain, with an exact gradient."""

    @abstractmethod
    def __call__(
        self,
        q_NHC: torch.Tensor,
        k_SGC: torch.Tensor,
        v_SGC: torch.Tensor,
        plan: AttentionPlan,
        chain: Sequence[ChainStep] = (),
    ) -> torch.Tensor:
        """``[N, H, C]`` in q's dtype, scores scaled by ``C ** -0.5``.

        Differentiable in ``q``, ``k``, ``v`` and the chain's keys and values.
        """
