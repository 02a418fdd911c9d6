"""The loss of a head with ``lm_head``s of its own: over its draft vocabulary, one ``lm_head`` for
all steps (EAGLE-3) or one per step (Medusa).

``p`` is the target's distribution over its *whole* vocabulary, ``q`` the head's over the W ids that
it can draft and nothing elsewhere, so that ``reverse_kl``, ``tv``, ``lk_alpha`` and
``expected_length`` are exactly those of the whole vocabulary. Of the cross-entropy only what lies
on the list is counted, ``sum_{v in W} p(v) * -log q(v)``: a row counts with the mass that the
target puts there, and where the target goes elsewhere nothing can be drafted and nothing is learnt.
(EAGLE-3's own code counts a row whole where the target's arg-max is in the list, and not at all
elsewhere.) The divergence of p from q is infinite as soon as p has mass outside of the list, so
``forward_kl`` and ``lk_lambda`` need a whole one. There is no loss on the states: the head's are
its own.

As in :mod:`mtp_train.losses`, logits exist for a chunk of rows at a time, and the same pass leaves
both gradients behind, that of the states and those of the ``lm_head``s, which are summed in fp32
over the chunks: ``row_chunk * W`` and ``W * D`` elements each, never ``A * W``. A loss that couples
the steps of a start makes the logits twice, for it weighs a row by what all of them are worth.

Shape legend: A active rows, R rows of one chunk, D model width, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtp_train.config import LossConfig
from mtp_train.losses import ExpectedLength, LossParts, row_formula
from mtp_train.losses.core import Coupling
from mtp_train.losses.formulas import Columns, ForwardKL, LkLambda, RowFormula, SoftCrossEntropy
from mtp_train.losses.objective import ActivePairs
from mtp_train.losses.softmax import log_normaliser, log_sum_exp
from mtp_train.packing import HeadBatch

_NEEDS_WHOLE = (ForwardKL, LkLambda)


@dataclass(frozen=True)
class DraftTarget:
    """What is drafted from: the target's ``lm_head`` rows of the draft vocabulary, ``[W, D]``;
    ``is_whole`` where that is the whole vocabulary.
    """

    weight_WD: torch.Tensor
    is_whole: bool

    @classmethod
    def of(cls, lm_head_VD: torch.Tensor, ids_W: torch.Tensor | None) -> DraftTarget:
        """Rows of ``ids_W`` are copied; ``None``: all of them, shared."""
        if ids_W is None:
            return cls(lm_head_VD, True)
        return cls(lm_head_VD[ids_W.to(lm_head_VD.device)], False)


def draft_head_loss(
    states: Sequence[torch.Tensor],
    batch: HeadBatch,
    lm_heads: Sequence[torch.Tensor],
    target: DraftTarget,
    *,
    config: LossConfig,
) -> LossParts:
    """Loss sums of one packed batch; ``lm_heads`` ``[W, D]`` are the head's own, one for all steps
    or at least one per step, and get gradients.
    """
    pairs = ActivePairs.of(states, batch, step_decay=config.step_decay)
    counts = [step.active_A.numel() for step in batch.steps]
    if len(lm_heads) == 1:
        counts = [sum(counts)]
    is_coupled = config.kind == "expected_length"
    loss = draft_loss_sum(
        pairs.state_AD,
        pairs.target_AD,
        pairs.weight_A,
        lm_heads[: len(counts)],
        target,
        formula=row_formula(config),
        row_chunk=config.row_chunk,
        counts=counts,
        target_lse_A=pairs.target_lse_A,
        coupling=ExpectedLength(batch.steps, config.step_decay) if is_coupled else None,
    )
    none = torch.zeros((), device=loss.device)
    return LossParts(config.logit_weight * loss, none, loss.detach())


def draft_loss_sum(
    state_AD: torch.Tensor,
    target_AD: torch.Tensor,
    weight_A: torch.Tensor,
    lm_heads: Sequence[torch.Tensor],
    target: DraftTarget,
    *,
    formula: RowFormula,
    row_chunk: int,
    counts: Sequence[int] | None = None,
    target_lse_A: torch.Tensor | None = None,
    coupling: Coupling | None = None,
) -> torch.Tensor:
    """``sum_a w_a * formula(p_a, q_a)``, fp32 scalar; gradients flow to ``state_AD`` and
    ``lm_heads``.

    ``counts[i]`` rows are read by ``lm_heads[i]`` (``[W, D]``), one group behind the other; without
    it there is one ``lm_head``. ``target_AD`` are the target's ``g``; ``target_lse_A`` (fp32, over
    the whole vocabulary) is required unless the draft vocabulary is whole. ``coupling`` as in
    :func:`mtp_train.losses.distribution_loss_sum`. Raises ``ValueError`` without it, and for a
    formula that is infinite over a list.
    """
    if not target.is_whole:
        if target_lse_A is None:
            raise ValueError("draft vocabulary: target_lse_A is required (the target's mass on it)")
        if isinstance(formula, _NEEDS_WHOLE):
            raise ValueError(
                f"draft vocabulary with {type(formula).__name__}: the divergence from a head that "
                "cannot draft some tokens is infinite; use soft_ce, or the whole vocabulary"
            )
    problem = _Problem(
        target.weight_WD.detach(),
        None if target.is_whole else target_lse_A,
        formula,
        row_chunk,
        (len(state_AD),) if counts is None else tuple(counts),
    )
    assert len(problem.counts) == len(lm_heads), "rows of every lm_head"
    loss: torch.Tensor = _DraftLoss.apply(
        state_AD, target_AD.detach(), weight_A, problem, coupling, *lm_heads
    )
    return loss


@dataclass(frozen=True)
class _Problem:
    """What all row chunks share."""

    target_head_WD: torch.Tensor
    target_lse_A: torch.Tensor | None
    formula: RowFormula
    row_chunk: int
    counts: tuple[int, ...]

    def chunks(self) -> Iterator[tuple[int, slice]]:
        """Which ``lm_head`` reads which rows."""
        first = 0
        for number, count in enumerate(self.counts):
            for start in range(first, first + count, self.row_chunk):
                yield number, slice(start, min(start + self.row_chunk, first + count))
            first += count

    def solve(
        self, h_RD: torch.Tensor, g_RD: torch.Tensor, rows: slice, lm_head_WD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Columns, torch.Tensor]:
        """Losses, what the logits' gradient is to be multiplied with (fp32 ``[R]`` both), and what
        it follows from.
        """
        p_RW = g_RD.to(self.target_head_WD.dtype) @ self.target_head_WD.t()
        mass_R = torch.ones(len(p_RW), device=p_RW.device)
        if self.target_lse_A is not None:
            mass_R = (log_sum_exp(p_RW) - self.target_lse_A[rows]).exp().clamp_(max=1.0)
        torch.softmax(p_RW, -1, out=p_RW)
        # The cross-entropy of p on the list is the mass times that of p given the list.
        is_scaled = isinstance(self.formula, SoftCrossEntropy)
        if not is_scaled:
            p_RW.mul_(mass_R[:, None].to(p_RW.dtype))
        logits_RW = h_RD @ lm_head_WD.t()
        q_RW = torch.softmax(logits_RW, -1)
        columns = Columns(p_RW, q_RW, logits_RW, log_normaliser(logits_RW, q_RW))
        sums_SR = self.formula.sums(columns)
        values_R = self.formula.values(sums_SR, columns.state_lse_R)
        scale_R = mass_R if is_scaled else torch.ones_like(mass_R)
        return values_R * scale_R, scale_R, columns, sums_SR


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        state: torch.Tensor,
        target: torch.Tensor,
        weight_A: torch.Tensor,
        problem: _Problem,
        coupling: Coupling | None,
        *lm_heads: torch.Tensor,
    ) -> torch.Tensor:
        grad_state = torch.empty_like(state)
        grad_heads = [
            torch.zeros(lm_head.shape, dtype=torch.float32, device=lm_head.device)
            for lm_head in lm_heads
        ]
        values_A = torch.empty(len(state), dtype=torch.float32, device=state.device)
        loss = torch.zeros((), dtype=torch.float32, device=state.device)
        if coupling is not None:
            for number, rows in problem.chunks():
                h = state[rows].to(lm_heads[number].dtype)
                values_A[rows] = problem.solve(h, target[rows], rows, lm_heads[number])[0]
            loss, weight_A = coupling(values_A)
        for number, rows in problem.chunks():
            lm_head = lm_heads[number]
            h = state[rows].to(lm_head.dtype)
            values_R, scale_R, columns, sums_SR = problem.solve(h, target[rows], rows, lm_head)
            if coupling is None:
                loss += (values_R * weight_A[rows]).sum()
            d_logits = problem.formula.gradient(columns, sums_SR)
            d_logits.mul_((scale_R * weight_A[rows])[:, None].to(d_logits.dtype))
            grad_state[rows] = d_logits @ lm_head
            grad_heads[number] += d_logits.t() @ h
        own = [grad.to(head.dtype) for grad, head in zip(grad_heads, lm_heads, strict=True)]
        ctx.save_for_backward(grad_state, *own)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_state, *grad_heads = ((grad * grad_loss).to(grad.dtype) for grad in ctx.saved_tensors)
        return grad_state, None, None, None, None, *grad_heads
