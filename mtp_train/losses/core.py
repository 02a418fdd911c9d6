"""The chunked core: row losses between two ``lm_head`` distributions, and their gradient.

Both logits are recomputed from hidden states, a chunk of rows (and optionally a chunk of the
vocabulary) at a time, and the gradient of the head's states is left behind in the same pass:
``tokens x V`` never exists.

Shape legend: A active rows, R rows of one chunk, D model width, V vocabulary, S sums per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mtp_train.losses.formulas import Columns, RowFormula, SoftCrossEntropy
from mtp_train.losses.softmax import log_normaliser, log_sum_exp, share_of_softmax
from mtp_train.losses.sub_vocabulary import (
    SubVocabulary,
    sub_vocab_chunk,
    sub_vocab_cross_entropy_chunk,
)
from runtime.parallel import ProcessGroup

# Row values (fp32 [A]) to their loss (scalar) and its derivative by each of them (fp32 [A]).
Coupling = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class ChunkSizes:
    """Memory is ``rows * columns`` logits. ``columns=0`` keeps whole logit rows (three products
    per row); otherwise the logits are made twice, three times where a formula needs sums first.
    """

    rows: int
    columns: int = 0


def distribution_loss_sum(
    state_AD: torch.Tensor,
    target_AD: torch.Tensor,
    weight_A: torch.Tensor,
    lm_head_VD: torch.Tensor,
    *,
    formula: RowFormula,
    chunks: ChunkSizes,
    target_lse_A: torch.Tensor | None = None,
    sub_vocab: SubVocabulary | None = None,
    coupling: Coupling | None = None,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """``sum_a w_a * formula(softmax(lm_head(target_a)), softmax(lm_head(state_a)))``, fp32 scalar.

    Gradient flows to ``state_AD`` only. Logits are made in ``lm_head``'s dtype. With ``sub_vocab``
    the distributions are over the kept ids and the rest, and ``target_lse_A`` (fp32, from
    :func:`target_log_normaliser`) is required. ``coupling`` makes the loss of all rows' values in
    place of the weighted sum (``weight_A`` is not read). With ``group`` every rank has all rows
    and, in rank order, a part of ``lm_head``'s; a collective whose result and gradient are the same
    on all ranks. Raises ``ValueError`` for a sub-vocabulary without normaliser, with a group or
    with reverse KL.
    """
    if sub_vocab is not None and target_lse_A is None:
        raise ValueError("sub_vocab: target_lse_A is required (the target's exact tail mass)")
    if sub_vocab is not None and group is not None:
        raise ValueError(
            "sub_vocab with group: a sub-vocabulary is small enough for every rank; give each "
            "rank the whole lm_head and no group"
        )
    if sub_vocab is not None and not formula.is_fit_to_merge:
        raise ValueError(
            f"sub_vocab with {type(formula).__name__}: it would reward mass outside of the kept "
            "ids; use the whole vocabulary"
        )
    problem = _Problem(lm_head_VD.detach(), formula, chunks, sub_vocab, group)
    loss: torch.Tensor = _DistributionLoss.apply(
        state_AD, target_AD.detach(), weight_A, target_lse_A, problem, coupling
    )
    return loss


@dataclass(frozen=True)
class _Problem:
    """What all row chunks share."""

    lm_head_VD: torch.Tensor
    formula: RowFormula
    chunks: ChunkSizes
    sub_vocab: SubVocabulary | None
    group: ProcessGroup | None

    @property
    def width(self) -> int:
        """Columns that exist at once."""
        if self.sub_vocab is not None:
            return len(self.sub_vocab.weight_WD)
        return min(self.chunks.columns, len(self.lm_head_VD)) or len(self.lm_head_VD)

    def solve(
        self, h: torch.Tensor, g: torch.Tensor, lse: torch.Tensor | None, scratch: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses ``[R]`` and gradients ``[R, D]`` of the states ``h``; the target's are ``g``."""
        if self.sub_vocab is not None:
            assert lse is not None
            if isinstance(self.formula, SoftCrossEntropy):
                return sub_vocab_cross_entropy_chunk(h, g, lse, self.sub_vocab, scratch)
            return sub_vocab_chunk(h, g, lse, self.sub_vocab, self.formula, scratch)
        if self.group is None and self.width == len(self.lm_head_VD):
            return _whole_chunk(h, g, self.lm_head_VD, self.formula, scratch)
        return _Streamed(h, g, lse, self, scratch).solve()


class _DistributionLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        state: torch.Tensor,
        target: torch.Tensor,
        weight_A: torch.Tensor,
        target_lse: torch.Tensor | None,
        problem: _Problem,
        coupling: Coupling | None,
    ) -> torch.Tensor:
        grad = torch.empty_like(state)
        loss = torch.zeros((), dtype=torch.float32, device=state.device)
        values_A = torch.empty(len(state), dtype=torch.float32, device=state.device)
        row_chunk, dtype = problem.chunks.rows, problem.lm_head_VD.dtype
        # Reused by every chunk: fresh blocks of this size cost more in page faults than the maths.
        scratch = torch.empty(
            3, min(row_chunk, len(state)), problem.width, dtype=dtype, device=state.device
        )
        for start in range(0, len(state), row_chunk):
            rows = slice(start, start + row_chunk)
            h, g = state[rows].to(dtype), target[rows].to(dtype)
            lse = None if target_lse is None else target_lse[rows]
            values_A[rows], grad_RD = problem.solve(h, g, lse, scratch)
            if coupling is None:
                loss += (values_A[rows] * weight_A[rows]).sum()
                grad_RD = grad_RD * weight_A[rows, None]
            grad[rows] = grad_RD
        if coupling is not None:
            loss, weight_A = coupling(values_A)
            grad.mul_(weight_A[:, None].to(grad.dtype))
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grad_loss).to(grad.dtype), None, None, None, None, None


def _whole_chunk(
    h: torch.Tensor,
    g: torch.Tensor,
    lm_head: torch.Tensor,
    formula: RowFormula,
    scratch: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, p, q = scratch[:, : len(h)]
    torch.mm(g, lm_head.t(), out=logits)
    torch.softmax(logits, -1, out=p)
    torch.mm(h, lm_head.t(), out=logits)
    torch.softmax(logits, -1, out=q)
    columns = Columns(p, q, logits, log_normaliser(logits, q))
    sums_SR = formula.sums(columns)
    values_R = formula.values(sums_SR, columns.state_lse_R)
    return values_R, formula.gradient(columns, sums_SR) @ lm_head


class _Streamed:
    """One row chunk in passes over the vocabulary: normalisers, sums (where the gradient needs them
    first), gradient. What ranks hold of the vocabulary is added up after each pass.
    """

    def __init__(
        self,
        h: torch.Tensor,
        g: torch.Tensor,
        target_lse: torch.Tensor | None,
        problem: _Problem,
        scratch: torch.Tensor,
    ) -> None:
        self._h, self._g = h, g
        self._formula, self._group = problem.formula, problem.group
        self._pieces = problem.lm_head_VD.split(problem.width)
        self._flat = scratch.view(3, -1)
        self._state_lse = self._normaliser(h)
        self._target_lse = self._normaliser(g) if target_lse is None else target_lse

    def solve(self) -> tuple[torch.Tensor, torch.Tensor]:
        formula, sums_SR = self._formula, torch.zeros(0)
        if formula.needs_sums:
            sums_SR = self._add_up([formula.sums(columns) for _, columns in self._columns()])
        parts = []
        grad_RD = torch.zeros(self._h.shape, dtype=torch.float32, device=self._h.device)
        for piece, columns in self._columns():
            if not formula.needs_sums:
                parts.append(formula.sums(columns))
            grad_RD += formula.gradient(columns, sums_SR) @ piece
        if not formula.needs_sums:
            sums_SR = self._add_up(parts)
        return formula.values(sums_SR, self._state_lse), self._over_ranks(grad_RD)

    def _normaliser(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        lse_R = torch.full((len(hidden_RD),), float("-inf"), device=hidden_RD.device)
        for piece in self._pieces:
            lse_R = torch.logaddexp(lse_R, log_sum_exp(hidden_RD @ piece.t()))
        if self._group is None:
            return lse_R
        return torch.logsumexp(self._group.all_gather(lse_R), 0)

    def _columns(self) -> Iterator[tuple[torch.Tensor, Columns]]:
        num_rows = len(self._h)
        for piece in self._pieces:
            size = num_rows * len(piece)
            logits, p, q = self._flat[:, :size].view(3, num_rows, len(piece))
            torch.mm(self._g, piece.t(), out=logits)
            share_of_softmax(logits, self._target_lse, out=p)
            torch.mm(self._h, piece.t(), out=logits)
            share_of_softmax(logits, self._state_lse, out=q)
            yield piece, Columns(p, q, logits, self._state_lse)

    def _add_up(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return self._over_ranks(torch.stack(parts).sum(0))

    def _over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._group is None else self._group.all_reduce(tensor)
