"""Expected accepted length over the unroll steps of one start: rows of different steps coupled.

Shape legend: A active rows of all steps one after the other, N rows of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_train.packing import UnrollStep


@dataclass(frozen=True)
class ExpectedLength:
    """What is missing of the expected accepted length: ``sum_k beta^k (1 - a_0 a_1 ... a_k)``.

    Over all active pairs (start, k); ``a_j`` is the acceptance of step j of the same start, so with
    ``beta = 1`` a start whose K steps all carry loss loses K less its expected number of accepted
    drafts. A step of the start that carries no loss counts as accepted. With one step it is total
    variation.
    """

    steps: Sequence[UnrollStep]
    step_decay: float

    def __call__(self, acceptance_A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss sum and its derivative by each acceptance (fp32 scalar and ``[A]``)."""
        parts = acceptance_A.split([step.active_A.numel() for step in self.steps])
        loss = acceptance_A.new_zeros(())
        own, before = [], []  # [N] of each step: its acceptance, that of all steps before it
        reached_N = acceptance_A.new_ones(0)
        for k, (step, part) in enumerate(zip(self.steps, parts, strict=True)):
            own_N = acceptance_A.new_ones(step.rows_N.numel())
            own_N[step.active_A] = part
            before.append(reached_N[step.parent_N] if k else torch.ones_like(own_N))
            own.append(own_N)
            reached_N = before[k] * own_N
            loss += self.step_decay**k * (1.0 - reached_N[step.active_A]).sum()
        gradients = []
        later_N = torch.zeros_like(reached_N)  # weighted acceptance of what follows in the chain
        for k in range(len(self.steps) - 1, -1, -1):
            step = self.steps[k]
            later_N[step.active_A] += self.step_decay**k
            gradients.append(-(before[k] * later_N)[step.active_A])
            if k:
                above_N = acceptance_A.new_zeros(self.steps[k - 1].rows_N.numel())
                above_N[step.parent_N] = own[k] * later_N
                later_N = above_N
        return loss, torch.cat(gradients[::-1])
