"""The training objective of one packed batch: smooth-L1 on states, a loss between distributions.

Only sums come out; the caller divides by the global count.

Shape legend: A active rows, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mtp_train.config import LossConfig
from mtp_train.losses.core import ChunkSizes, distribution_loss_sum
from mtp_train.losses.formulas import SoftCrossEntropy, row_formula
from mtp_train.losses.sub_vocabulary import SubVocabulary
from mtp_train.losses.unroll import ExpectedLength
from mtp_train.packing import HeadBatch
from mtp_train.rows import take_rows
from runtime.parallel import ProcessGroup


@dataclass(frozen=True)
class LossParts:
    """Sums over active rows (fp32 scalars), steps weighted by ``beta^k``.

    Divide by :func:`loss_weight` summed over all ranks and micro-batches. ``total`` is the weighted
    sum of the parts and carries the gradient. A part whose weight is 0 is not computed and reads 0.
    """

    total: torch.Tensor
    hidden: torch.Tensor
    logit: torch.Tensor


@dataclass(frozen=True)
class ActivePairs:
    """The rows of all unroll steps that carry loss, one step after the other."""

    state_AD: torch.Tensor
    target_AD: torch.Tensor
    weight_A: torch.Tensor  # fp32: beta^k
    target_lse_A: torch.Tensor | None

    @classmethod
    def of(
        cls, states: Sequence[torch.Tensor], batch: HeadBatch, *, step_decay: float
    ) -> ActivePairs:
        """``states`` are the head's, one tensor per unroll step."""
        pairs = list(zip(states, batch.steps, strict=True))
        state_AD = torch.cat([take_rows(state, step.active_A) for state, step in pairs])
        weights = [
            torch.full((step.active_A.numel(),), step_decay**k, device=state_AD.device)
            for k, (_, step) in enumerate(pairs)
        ]
        lses = [step.target_lse_A for _, step in pairs if step.target_lse_A is not None]
        return cls(
            state_AD,
            torch.cat([step.target_AD for _, step in pairs]),
            torch.cat(weights),
            torch.cat(lses) if lses else None,
        )


def loss_weight(num_active: Sequence[int], *, step_decay: float) -> float:
    """``sum_k beta^k * active pairs at step k``: what a sum of losses is divided by."""
    return sum(step_decay**k * count for k, count in enumerate(num_active))


def head_loss(
    states: Sequence[torch.Tensor],
    batch: HeadBatch,
    lm_head_VD: torch.Tensor,
    *,
    config: LossConfig,
    sub_vocab: SubVocabulary | None = None,
    group: ProcessGroup | None = None,
) -> LossParts:
    """Loss sums of one packed batch; ``states`` are the head's, one tensor per unroll step.

    With ``group`` every rank passes the same batch and its own part of ``lm_head``'s rows.
    """
    pairs = ActivePairs.of(states, batch, step_decay=config.step_decay)
    hidden = logit = torch.zeros((), device=pairs.state_AD.device)
    if config.hidden_weight:
        hidden = smooth_l1_sum(pairs.state_AD, pairs.target_AD, pairs.weight_A)
    if config.logit_weight:
        is_coupled = config.kind == "expected_length"
        logit = distribution_loss_sum(
            pairs.state_AD,
            pairs.target_AD,
            pairs.weight_A,
            lm_head_VD,
            formula=row_formula(config),
            chunks=ChunkSizes(config.row_chunk, config.vocab_chunk),
            target_lse_A=pairs.target_lse_A,
            sub_vocab=sub_vocab,
            coupling=ExpectedLength(batch.steps, config.step_decay) if is_coupled else None,
            group=group,
        )
    total = config.hidden_weight * hidden + config.logit_weight * logit
    return LossParts(total, hidden.detach(), logit.detach())


def smooth_l1_sum(
    state_AD: torch.Tensor, target_AD: torch.Tensor, weight_A: torch.Tensor
) -> torch.Tensor:
    """``sum_a w_a * mean_d smooth_l1(state - target)`` (beta 1), fp32 scalar."""
    per_row = F.smooth_l1_loss(state_AD.float(), target_AD.float(), reduction="none").mean(-1)
    return (per_row * weight_A).sum()


def soft_cross_entropy_sum(
    state_AD: torch.Tensor,
    target_AD: torch.Tensor,
    weight_A: torch.Tensor,
    lm_head_VD: torch.Tensor,
    *,
    row_chunk: int,
    vocab_chunk: int = 0,
    target_lse_A: torch.Tensor | None = None,
    sub_vocab: SubVocabulary | None = None,
) -> torch.Tensor:
    """``sum_a w_a * H(softmax(lm_head(target_a)), softmax(lm_head(state_a)))``, fp32 scalar: see
    :func:`distribution_loss_sum`.
    """
    return distribution_loss_sum(
        state_AD,
        target_AD,
        weight_A,
        lm_head_VD,
        formula=SoftCrossEntropy(),
        chunks=ChunkSizes(row_chunk, vocab_chunk),
        target_lse_A=target_lse_A,
        sub_vocab=sub_vocab,
    )
