"""A loss over the ids that matter: kept ids, and a sample of the others that changes every step.

Shape legend: R rows of one chunk, D model width, V vocabulary, W sub-vocabulary plus tail sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mtp_train.losses.formulas import Columns, RowFormula
from mtp_train.losses.softmax import log_normaliser, log_sum_exp, row_sums

_LEAST_REST = 2.0**-24  # what fp32 can tell of one minus a probability


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

    Every loss is that of the two distributions with all outside ids merged into one. Merging can
    only make distributions more alike: KL divergences and total variation are lower bounds of those
    over the whole vocabulary, the overlap an upper bound that is off by at most the smaller of the
    two masses outside.
    """

    ids_W: torch.Tensor  # int64, kept ids followed by the sampled outside ids
    weight_WD: torch.Tensor  # lm_head rows of ids_W, contiguous
    num_kept: int
    tail_log_scale: float  # log(|outside| / |sample|)


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


def sub_vocab_chunk(
    h: torch.Tensor,
    g: torch.Tensor,
    target_lse: torch.Tensor,
    sub: SubVocabulary,
    formula: RowFormula,
    scratch: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses ``[R]`` and gradients ``[R, D]`` by a formula that knows p and q by their ratio.

    The bucket's part of p is dealt out over the sampled columns in proportion to q. The ratio of
    p and q is then the bucket's in each of them, so every sum over columns is that of the bucket,
    and the gradient spreads over the sample as the estimate of q's mass does.
    """
    kept = sub.num_kept
    flat = scratch.view(3, -1)
    target_logits, target_q = (flat[i, : len(h) * kept].view(len(h), kept) for i in (0, 2))
    torch.mm(g, sub.weight_WD[:kept].t(), out=target_logits)
    torch.softmax(target_logits, -1, out=target_q)
    kept_mass = (log_sum_exp(target_logits) - target_lse).exp().clamp_(max=1.0)
    rest_mass = (1.0 - kept_mass).clamp_(min=_LEAST_REST)
    logits, p, q = scratch[:, : len(h)]
    torch.mul(target_q, kept_mass[:, None].to(p.dtype), out=p[:, :kept])
    torch.mm(h, sub.weight_WD.t(), out=logits)
    logits[:, kept:] += sub.tail_log_scale
    torch.softmax(logits, -1, out=q)
    rest_q = row_sums(q[:, kept:])
    ratio = rest_mass / rest_q.clamp(min=torch.finfo(torch.float32).tiny)
    torch.mul(q[:, kept:], ratio[:, None].to(q.dtype), out=p[:, kept:])
    columns = Columns(p, q, logits, log_normaliser(logits, q))
    sums_SR = formula.sums(columns)
    values_R = formula.values(sums_SR, columns.state_lse_R)
    return values_R, formula.gradient(columns, sums_SR) @ sub.weight_WD


def sub_vocab_cross_entropy_chunk(
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
    kept_mass = (log_sum_exp(target_logits) - target_lse).exp().clamp_(max=1.0)
    rest_mass = 1.0 - kept_mass
    logits, q = scratch[0, : len(h)], scratch[2, : len(h)]
    torch.mm(h, sub.weight_WD.t(), out=logits)
    logits[:, kept:] += sub.tail_log_scale
    torch.softmax(logits, -1, out=q)
    state_lse = log_normaliser(logits, q)
    rest_q = row_sums(q[:, kept:])
    rest_log_q = torch.logsumexp(logits[:, kept:].float(), -1) - state_lse
    mass = kept_mass[:, None].to(p.dtype)
    # d/dz = q - p on kept ids, q (1 - p_rest / q_rest) on the sample
    q[:, :kept].addcmul_(p, mass, value=-1.0)
    scale = 1.0 - rest_mass / rest_q.clamp(min=torch.finfo(torch.float32).tiny)
    q[:, kept:] *= scale[:, None].to(q.dtype)
    picked = row_sums(p.mul_(logits[:, :kept]))
    loss_R = kept_mass * (state_lse - picked) - rest_mass * rest_log_q
    return loss_R, q @ sub.weight_WD
