"""Optimiser and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mtp_train.config import TrainerConfig


def learning_rate(update: int, *, total: int, config: TrainerConfig) -> float:
    """The rate of update number ``update`` (from 0) of ``total``.

    Warm-up is linear from ``1/n`` to 1 over the first ``n = ceil(warmup_share * total)`` updates.
    Then ``linear`` and ``cosine`` fall to ``min_lr_share`` at the end of the run; ``wsd`` holds and
    falls linearly during the last ``decay_share`` of the updates.
    """
    warmup = math.ceil(config.warmup_share * total)
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    start = warmup
    if config.schedule == "wsd":
        start = max(warmup, total - math.ceil(config.decay_share * total))
    progress = min(1.0, max(0.0, (update - start) / max(1, total - start)))
    shape = (
        0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    )
    return config.learning_rate * (config.min_lr_share + (1 - config.min_lr_share) * shape)


class GatedAdamW(torch.optim.AdamW):
    """AdamW whose next step can be refused.

    DeepSpeed's engines only offer to skip on what they themselves call an overflow, and its fp32
    and bf16 paths differ in that. With the gate closed the engine goes through a whole step
    (gradients cleared, counters advanced) while weights and moments stay as they are.
    """

    is_closed: bool = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.is_closed:
            return None
        return super().step(closure)


def make_adamw(parameters: Iterable[nn.Parameter], *, config: TrainerConfig) -> GatedAdamW:
    """AdamW with weight decay on matrices only (norm weights are kept out)."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return GatedAdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        fused=True,
    )
