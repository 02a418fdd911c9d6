"""Losses between a head's states and the target's: smooth-L1 and soft cross-entropy.

The soft cross-entropy recomputes both logits from hidden states, a chunk of rows (and optionally a
chunk of the vocabulary) at a time, and leaves the gradient of the head's states behind in the same
pass: ``tokens x V`` never exists. Only sums come out; the caller divides by the global count.

Shape legend: A active rows, R rows of one chunk, D model width, V vocabulary, W sub-vocabulary plus
tail sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mtp_train.config import LossConfig
from mtp_train.packing import HeadBatch
from mtp_train.rows import take_rows

_FP32_BLOCK = 1 << 18  # elements that are widened at once


@dataclass(frozen=True)
class SubVocabulary:
    """A loss over the ids that matter, with all others in one ``rest`` bucket.

    The target's mass outside is one minus that of the kept ids, ``exp(lse_kept - lse_all)`` with
    both log-sum-exps in fp32 over logits of ``lm_head``'s dtype. In fp32 that is exact up to
    rounding. In bf16 the rounding of the logits remains: the mass is off by at most
    ``2^-7 max|z| * kept * outside``. The head's mass outside is estimated from a uniform sample of
    the outside ids that changes with every step: ``|outside| / |sample| * sum(exp(z))`` is an
    unbiased estimate of the outside part of its partition function, and exact when the sample is
    everything outside. Without it nothing would hold the other logits down, and the full head
    drafts from them.
    """

    ids_W: torch.Tensor  # int64, kept ids followed by the sampled outside ids
    weight_WD: torch.Tensor  # lm_head rows of ids_W, contiguous
    num_kept: int
    tail_log_scale: float  # log(|outside| / |sample|)


@dataclass(frozen=True)
class LossParts:
    """Sums over active rows (fp32 scalars), steps weighted by ``beta^k``.

    Divide by :func:`loss_weight` summed over all ranks and micro-batches. ``total`` is the weighted
    sum of the parts and carries the gradient. A part whose weight is 0 is not computed and reads 0.
    """

    total: torch.Tensor
    hidden: torch.Tensor
    logit: torch.Tensor


class TailSampler:
    """Draws the outside sample of :class:`SubVocabulary`; holds the kept rows' weights."""

    def __init__(
        self, kept_ids: torch.Tensor, lm_head_VD: torch.Tensor, *, sample_size: int
    ) -> None:
        is_outside = torch.ones(lm_head_VD.shape[0], dtype=torch.bool)
        is_outside[kept_ids.cpu()] = False
        self._outside = is_outside.nonzero()[:, 0]
        if not len(self._outside):
            raise ValueError("loss.sub_vocab_size: nothing is left outside; use 0 (everything)")
        self._size = min(sample_size, len(self._outside))
        self._lm_head_VD = lm_head_VD
        kept, device = len(kept_ids), lm_head_VD.device
        self._ids_W = torch.cat((kept_ids.to(device), self._outside[: self._size].to(device)))
        self._weight_WD = lm_head_VD[self._ids_W]
        self._num_kept = kept

    def draw(self, *, seed: int) -> SubVocabulary:
        """The sub-vocabulary of one step. The returned tensors are overwritten by the next draw."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self._outside), generator=generator)[: self._size]
        ids = self._outside[chosen.sort().values].to(self._ids_W.device)
        self._ids_W[self._num_kept :] = ids
        self._weight_WD[self._num_kept :] = self._lm_head_VD[ids]
        return SubVocabulary(
            self._ids_W,
            self._weight_WD,
            self._num_kept,
            math.log(len(self._outside) / self._size),
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
) -> LossParts:
    """Loss sums of one packed batch; ``states`` are the head's, one tensor per unroll step."""
    pairs = list(zip(states, batch.steps, strict=True))
    state_AD = torch.cat([take_rows(state, step.active_A) for state, step in pairs])
    target_AD = torch.cat([step.target_AD for _, step in pairs])
    weight_A = torch.cat(
        [
            torch.full((step.active_A.numel(),), config.step_decay**k, device=state_AD.device)
            for k, (_, step) in enumerate(pairs)
        ]
    )
    lses = [step.target_lse_A for _, step in pairs if step.target_lse_A is not None]
    hidden = logit = torch.zeros((), device=state_AD.device)
    if config.hidden_weight:
        hidden = smooth_l1_sum(state_AD, target_AD, weight_A)
    if config.logit_weight:
        logit = soft_cross_entropy_sum(
            state_AD,
            target_AD,
            weight_A,
            lm_head_VD,
            row_chunk=config.row_chunk,
            vocab_chunk=config.vocab_chunk,
            target_lse_A=torch.cat(lses) if lses else None,
            sub_vocab=sub_vocab,
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
    """``sum_a w_a * H(softmax(lm_head(target_a)), softmax(lm_head(state_a)))``, fp32 scalar.

    Gradient flows to ``state_AD`` only. Logits are made in ``lm_head``'s dtype. ``vocab_chunk=0``
    keeps one chunk's whole logit rows (three products per row); otherwise memory is
    ``row_chunk * vocab_chunk`` and the logits are made twice. With ``sub_vocab`` the distributions
    are over the kept ids and the rest, and ``target_lse_A`` (fp32, from
    :func:`target_log_normaliser`) is required.
    """
    if sub_vocab is not None and target_lse_A is None:
        raise ValueError("sub_vocab: target_lse_A is required (the target's exact tail mass)")
    loss: torch.Tensor = _SoftCrossEntropy.apply(
        state_AD,
        target_AD.detach(),
        weight_A,
        lm_head_VD.detach(),
        row_chunk,
        vocab_chunk,
        target_lse_A,
        sub_vocab,
    )
    return loss


@torch.no_grad()
def target_log_normaliser(
    target_AD: torch.Tensor, lm_head_VD: torch.Tensor, *, row_chunk: int
) -> torch.Tensor:
    """fp32 ``[A]``: log-sum-exp of ``lm_head(target)`` over the whole vocabulary."""
    out = torch.empty(len(target_AD), dtype=torch.float32, device=target_AD.device)
    for start in range(0, len(target_AD), row_chunk):
        logits = target_AD[start : start + row_chunk] @ lm_head_VD.t()
        out[start : start + row_chunk] = _log_sum_exp(logits)
    return out


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        state: torch.Tensor,
        target: torch.Tensor,
        weight_A: torch.Tensor,
        lm_head: torch.Tensor,
        row_chunk: int,
        vocab_chunk: int,
        target_lse: torch.Tensor | None,
        sub_vocab: SubVocabulary | None,
    ) -> torch.Tensor:
        grad = torch.empty_like(state)
        loss = torch.zeros((), dtype=torch.float32, device=state.device)
        width = lm_head.shape[0] if sub_vocab is None else sub_vocab.weight_WD.shape[0]
        is_streamed = sub_vocab is None and 0 < vocab_chunk < width
        columns = vocab_chunk if is_streamed else width
        # Reused by every chunk: fresh blocks of this size cost more in page faults than the maths.
        scratch = torch.empty(
            3, min(row_chunk, len(state)), columns, dtype=lm_head.dtype, device=state.device
        )
        for start in range(0, len(state), row_chunk):
            rows = slice(start, start + row_chunk)
            h, g = state[rows].to(lm_head.dtype), target[rows].to(lm_head.dtype)
            lse = None if target_lse is None else target_lse[rows]
            if sub_vocab is not None:
                assert lse is not None
                loss_R, grad_RD = _sub_vocab_chunk(h, g, lse, sub_vocab, scratch)
            elif is_streamed:
                loss_R, grad_RD = _streamed_chunk(h, g, lse, lm_head, scratch)
            else:
                loss_R, grad_RD = _whole_chunk(h, g, lm_head, scratch)
            loss += (loss_R * weight_A[rows]).sum()
            grad[rows] = grad_RD * weight_A[rows, None]
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grad_loss).to(grad.dtype), None, None, None, None, None, None, None


def _log_sum_exp(logits_RV: torch.Tensor) -> torch.Tensor:
    """fp32 ``[R]``, computed in fp32 a few rows at a time (bf16 would round the result by 2^-9 of
    its size, several per cent of a probability) so that the copy stays in the cache.
    """
    if logits_RV.dtype == torch.float32:
        return torch.logsumexp(logits_RV, -1)
    rows = max(1, _FP32_BLOCK // logits_RV.shape[-1])
    return torch.cat([torch.logsumexp(part.float(), -1) for part in logits_RV.split(rows)])


def _log_normaliser(logits_RV: torch.Tensor, probs_RV: torch.Tensor) -> torch.Tensor:
    """fp32 log-sum-exp of logits whose softmax is known: two maxima instead of another exp pass."""
    return logits_RV.amax(-1).float() - probs_RV.amax(-1).float().log()


def _whole_chunk(
    h: torch.Tensor, g: torch.Tensor, lm_head: torch.Tensor, scratch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, p, q = scratch[:, : len(h)]
    torch.mm(g, lm_head.t(), out=logits)
    torch.softmax(logits, -1, out=p)
    torch.mm(h, lm_head.t(), out=logits)
    torch.softmax(logits, -1, out=q)
    lse = _log_normaliser(logits, q)
    q.sub_(p)
    mass = p.sum(-1, dtype=torch.float32)  # 1 up to rounding; keeps the loss free of logit offsets
    loss_R = mass * lse - p.mul_(logits).sum(-1, dtype=torch.float32)
    return loss_R, q @ lm_head


def _streamed_chunk(
    h: torch.Tensor,
    g: torch.Tensor,
    target_lse: torch.Tensor | None,
    lm_head: torch.Tensor,
    scratch: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in two passes over the vocabulary: normalisers, then probabilities and gradient."""
    pieces = lm_head.split(scratch.shape[2])
    state_lse = torch.full((len(h),), float("-inf"), device=h.device)
    lse = torch.full_like(state_lse, float("-inf")) if target_lse is None else target_lse
    for piece in pieces:
        state_lse = torch.logaddexp(state_lse, _log_sum_exp(h @ piece.t()))
        if target_lse is None:
            lse = torch.logaddexp(lse, _log_sum_exp(g @ piece.t()))
    loss_R = torch.zeros_like(state_lse)
    grad_RD = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
    flat = scratch.view(3, -1)
    for piece in pieces:
        p, logits, q = flat[:, : len(h) * len(piece)].view(3, len(h), len(piece))
        torch.mm(g, piece.t(), out=logits)
        _share_of_softmax(logits, lse, out=p)
        torch.mm(h, piece.t(), out=logits)
        _share_of_softmax(logits, state_lse, out=q)
        q.sub_(p)
        loss_R += p.sum(-1, dtype=torch.float32) * state_lse
        loss_R -= p.mul_(logits).sum(-1, dtype=torch.float32)
        grad_RD += q @ piece
    return loss_R, grad_RD


def _share_of_softmax(logits: torch.Tensor, lse: torch.Tensor, *, out: torch.Tensor) -> None:
    """``exp(logits - lse)`` through a softmax, whose exponents stay in fp32 inside."""
    torch.softmax(logits, -1, out=out)
    share = (_log_normaliser(logits, out) - lse).exp()
    out.mul_(share[:, None].to(out.dtype))


def _sub_vocab_chunk(
    h: torch.Tensor,
    g: torch.Tensor,
    target_lse: torch.Tensor,
    sub: SubVocabulary,
    scratch: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``-sum_kept p log q - p_rest log q_rest``; ``q`` is over kept ids and weighted sample."""
    kept = sub.num_kept
    flat = scratch.view(3, -1)
    shape = (len(h), kept)
    target_logits, p = (flat[i, : len(h) * kept].view(shape) for i in range(2))
    torch.mm(g, sub.weight_WD[:kept].t(), out=target_logits)
    torch.softmax(target_logits, -1, out=p)
    kept_mass = (_log_sum_exp(target_logits) - target_lse).exp().clamp_(max=1.0)
    rest_mass = 1.0 - kept_mass
    logits, q = scratch[0, : len(h)], scratch[2, : len(h)]
    torch.mm(h, sub.weight_WD.t(), out=logits)
    logits[:, kept:] += sub.tail_log_scale
    torch.softmax(logits, -1, out=q)
    state_lse = _log_normaliser(logits, q)
    rest_q = q[:, kept:].sum(-1, dtype=torch.float32)
    rest_log_q = torch.logsumexp(logits[:, kept:].float(), -1) - state_lse
    mass = kept_mass[:, None].to(p.dtype)
    # d/dz = q - p on kept ids, q (1 - p_rest / q_rest) on the sample
    q[:, :kept].addcmul_(p, mass, value=-1.0)
    scale = 1.0 - rest_mass / rest_q.clamp(min=torch.finfo(torch.float32).tiny)
    q[:, kept:] *= scale[:, None].to(q.dtype)
    picked = p.mul_(logits[:, :kept]).sum(-1, dtype=torch.float32)
    loss_R = kept_mass * (state_lse - picked) - rest_mass * rest_log_q
    return loss_R, q @ sub.weight_WD
