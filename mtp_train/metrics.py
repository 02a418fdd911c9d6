"""What training reports, as plain records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mtp_train.phases import PhaseSeconds
from runtime.head_spec import HeadSpec


@dataclass(frozen=True)
class StepMetrics:
    """One optimiser step. Losses are global means over active positions.

    ``step`` counts from 1. ``updates`` counts the steps that changed the weights; ``skipped`` those
    that were not finite. ``seconds`` are the first rank's.
    """

    step: int
    epoch: int
    loss: float
    hidden_loss: float
    logit_loss: float
    learning_rate: float
    grad_norm: float
    num_tokens: int
    num_active: int
    updates: int
    skipped: int
    seconds: PhaseSeconds


class Validation(Protocol):
    """Acceptance measured by decoding in the runtime, pooled over all prompts and ranks."""

    @property
    def loss(self) -> float: ...

    @property
    def tau(self) -> float: ...  # 1 + accepted / verification steps

    @property
    def rates(self) -> tuple[float, ...]: ...  # [j]: drafts whose first j + 1 tokens were accepted


# Called by all ranks with (step, spec, the head's tensors); all ranks return the same figures.
Validator = Callable[[int, HeadSpec, Mapping[str, torch.Tensor]], Validation]


@dataclass(frozen=True)
class Best:
    """The best validation so far: highest tau, lower loss on a tie."""

    step: int
    tau: float
    loss: float

    def is_beaten_by(self, other: Validation) -> bool:
        return (other.tau, -other.loss) > (self.tau, -self.loss)


@dataclass(frozen=True)
class TrainReport:
    """What a finished training run leaves behind."""

    steps: int
    updates: int
    skipped: int
    final: StepMetrics | None  # None: the run had already finished
    best: Best | None  # None: never validated; the head directory holds the last weights
    tokens_per_s: float
    head_dir: str
