"""What a row loses when the head's distribution is q and the target's is p, with the gradient.

Each formula sees the columns of a row in one piece or in several (chunks of the vocabulary, shards
of ``lm_head``): sums over columns are added up first, values and gradients follow from them. The
temperature is 1. With ``m = [q < p]`` the overlap ``a = sum(min(p, q))`` is the probability that
rejection sampling accepts a draft drawn from q (Leviathan et al., arXiv 2211.17192); its gradient
in the logits of q is ``q * (m - sum(q * m))``, and the distance in total variation is ``1 - a``.

Shape legend: R rows of one chunk, C columns at hand, S sums per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mtp_train.config import LossConfig
from mtp_train.losses.softmax import row_sums


@dataclass(frozen=True)
class Columns:
    """Some columns of one row chunk, in ``lm_head``'s dtype and memory that is used again.

    :meth:`RowFormula.sums` may overwrite the logits, :meth:`RowFormula.gradient` everything.
    """

    p_RC: torch.Tensor  # the target's probabilities
    q_RC: torch.Tensor  # the head's
    logits_RC: torch.Tensor  # the head's
    state_lse_R: torch.Tensor  # fp32: log-sum-exp of all of the head's logits


class RowFormula(ABC):
    """One loss. ``needs_sums``: whether the gradient reads sums over all columns, so that a
    vocabulary in pieces is passed over once more.
    """

    needs_sums = True
    is_fit_to_merge = True  # whether ids may be merged into one, as a sub-vocabulary does

    @abstractmethod
    def sums(self, columns: Columns) -> torch.Tensor:
        """fp32 ``[S, R]``, to be added up over pieces of the vocabulary."""

    @abstractmethod
    def values(self, sums_SR: torch.Tensor, state_lse_R: torch.Tensor) -> torch.Tensor:
        """The loss of each row, fp32 ``[R]``."""

    @abstractmethod
    def gradient(self, columns: Columns, sums_SR: torch.Tensor) -> torch.Tensor:
        """``[R, C]``: the loss's gradient in the head's logits, in the columns' memory."""


class SoftCrossEntropy(RowFormula):
    """``-sum(p * log q)``; gradient ``q - p``."""

    needs_sums = False

    def sums(self, columns: Columns) -> torch.Tensor:
        # Sum(p) is 1 up to rounding; it keeps the loss free of logit offsets.
        mass = row_sums(columns.p_RC)
        torch.mul(columns.p_RC, columns.logits_RC, out=columns.logits_RC)
        return torch.stack((mass, row_sums(columns.logits_RC)))

    def values(self, sums_SR: torch.Tensor, state_lse_R: torch.Tensor) -> torch.Tensor:
        mass, picked = sums_SR
        return mass * state_lse_R - picked

    def gradient(self, columns: Columns, sums_SR: torch.Tensor) -> torch.Tensor:
        return columns.q_RC.sub_(columns.p_RC)


class ForwardKL(RowFormula):
    """``sum(p * log(p / q))``: soft cross-entropy less the target's entropy, same gradient."""

    needs_sums = False

    def sums(self, columns: Columns) -> torch.Tensor:
        log_ratio = _log_ratio(columns)
        return -row_sums(log_ratio.mul_(columns.p_RC))[None]

    def values(self, sums_SR: torch.Tensor, state_lse_R: torch.Tensor) -> torch.Tensor:
        return sums_SR[0]

    def gradient(self, columns: Columns, sums_SR: torch.Tensor) -> torch.Tensor:
        return columns.q_RC.sub_(columns.p_RC)


class ReverseKL(RowFormula):
    """``sum(q * log(q / p))``; gradient ``q * (log(q / p) - loss)``.

    Not for merged ids: all of q in the bucket costs no more than ``-log p_rest``, whatever the ids,
    and a head that knows nothing yet goes there and stays.
    """

    is_fit_to_merge = False

    def sums(self, columns: Columns) -> torch.Tensor:
        log_ratio = _log_ratio(columns)
        return row_sums(log_ratio.mul_(columns.q_RC))[None]

    def values(self, sums_SR: torch.Tensor, state_lse_R: torch.Tensor) -> torch.Tensor:
        return sums_SR[0]

    def gradient(self, columns: Columns, sums_SR: torch.Tensor) -> torch.Tensor:
        log_ratio = _log_ratio(columns)
        return log_ratio.sub_(_column(sums_SR[0], log_ratio)).mul_(columns.q_RC)


class Acceptance(RowFormula):
    """The overlap ``a`` itself; what is made of it (expected length) follows from the values."""

    def sums(self, columns: Columns) -> torch.Tensor:
        scratch = columns.logits_RC
        torch.minimum(columns.p_RC, columns.q_RC, out=scratch)
        overlap = row_sums(scratch)
        return torch.stack((overlap, row_sums(_below(columns))))

    def values(self, sums_SR: torch.Tensor, state_lse_R: torch.Tensor) -> torch.Tensor:
        return sums_SR[0]

    def gradient(self, columns: Columns, sums_SR: torch.Tensor) -> torch.Tensor:
        below = _below(columns)
        return below.addcmul_(columns.q_RC, _column(sums_SR[1], below), value=-1.0)


class TotalVariation(Acceptance):
    """``1 - a``: the share of drafts that rejection sampling turns down."""

    def values(self, sums_SR: torch.Tensor, state_lse_R: torch.Tensor) -> torch.Tensor:
        return 1.0 - sums_SR[0]

    def gradient(self, columns: Columns, sums_SR: torch.Tensor) -> torch.Tensor:
        return super().gradient(columns, sums_SR).neg_()


class LkAlpha(Acceptance):
    """``-log a``: total variation whose gradient is divided by ``a``, so that it does not vanish
    where nothing is accepted yet (Samarin et al., "LK Losses", arXiv 2602.23881).
    """

    def values(self, sums_SR: torch.Tensor, state_lse_R: torch.Tensor) -> torch.Tensor:
        return -_positive(sums_SR[0]).log()

    def gradient(self, columns: Columns, sums_SR: torch.Tensor) -> torch.Tensor:
        gradient = super().gradient(columns, sums_SR)
        return gradient.mul_(_column(-1.0 / _positive(sums_SR[0]), gradient))


class LkLambda(Acceptance):
    """``w * KL(p, q) + (1 - w) * (1 - a)`` with ``w = exp(-eta * a)`` held constant in the
    gradient: KL while little is accepted, total variation later (the hybrid of the same paper,
    whose best ``eta`` was 3). ``w`` is a row's own, so a row's loss does not depend on its batch.
    """

    def __init__(self, eta: float) -> None:
        self._eta = eta

    def sums(self, columns: Columns) -> torch.Tensor:
        divergence = ForwardKL().sums(columns)
        return torch.cat((super().sums(columns), divergence))

    def values(self, sums_SR: torch.Tensor, state_lse_R: torch.Tensor) -> torch.Tensor:
        overlap, _, divergence = sums_SR
        weight = self._weight(sums_SR)
        return weight * divergence + (1.0 - weight) * (1.0 - overlap)

    def gradient(self, columns: Columns, sums_SR: torch.Tensor) -> torch.Tensor:
        """``w (q - p) + (1 - w) (q s - q m)`` with ``s = sum(q m)``."""
        weight = self._weight(sums_SR)
        gradient = _below(columns)
        gradient.mul_(_column(weight - 1.0, gradient))
        gradient.addcmul_(columns.p_RC, _column(-weight, gradient))
        share = weight + (1.0 - weight) * sums_SR[1]
        return gradient.addcmul_(columns.q_RC, _column(share, gradient))

    def _weight(self, sums_SR: torch.Tensor) -> torch.Tensor:
        return torch.exp(-self._eta * sums_SR[0])


_FORMULAS: dict[str, Callable[[LossConfig], RowFormula]] = {
    "soft_ce": lambda _: SoftCrossEntropy(),
    "forward_kl": lambda _: ForwardKL(),
    "reverse_kl": lambda _: ReverseKL(),
    "tv": lambda _: TotalVariation(),
    "lk_alpha": lambda _: LkAlpha(),
    "lk_lambda": lambda config: LkLambda(config.lk_eta),
    "expected_length": lambda _: Acceptance(),
}


def row_formula(config: LossConfig) -> RowFormula:
    """The formula of ``loss.kind``."""
    return _FORMULAS[config.kind](config)


def _log_ratio(columns: Columns) -> torch.Tensor:
    """``log(q / p)`` in the logits' memory, finite everywhere.

    From the ratio: the difference of two logits would carry the rounding of both.
    """
    tiny = torch.finfo(torch.float32).tiny
    ratio = torch.clamp(columns.p_RC, min=tiny, out=columns.logits_RC)
    return torch.div(columns.q_RC.clamp_(min=tiny), ratio, out=ratio).log_()


def _below(columns: Columns) -> torch.Tensor:
    """``q * [q < p]`` in the logits' memory."""
    torch.lt(columns.q_RC, columns.p_RC, out=columns.logits_RC)
    return columns.logits_RC.mul_(columns.q_RC)


def _positive(overlap_R: torch.Tensor) -> torch.Tensor:
    return overlap_R.clamp(min=torch.finfo(torch.float32).tiny)


def _column(values_R: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values_R[:, None].to(like.dtype)
