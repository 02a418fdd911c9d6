"""Verification of a chain of K drafted tokens. All on the device, nothing waits.

Row ``j`` of a request's K+1 target rows gives the distribution of the token after ``j`` accepted
drafts. Output ids are -1 padded and are output only: never feed them to an embedding.
Shape legend: B requests, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.config import VerifyMode
from runtime.sampling import (
    SamplingTensors,
    Stream,
    inverse_cdf,
    philox_uniform,
    sample,
    token_probs,
)


@dataclass(frozen=True)
class Verified:
    """``ids_BK1`` int64 ``[B, K+1]`` (-1 padded), ``num_emitted_B`` int64 in 1..K+1, last ids."""

    ids_BK1: torch.Tensor
    num_emitted_B: torch.Tensor
    last_ids_B: torch.Tensor


AcceptChain = Callable[[torch.Tensor, torch.Tensor], Verified]
"""The target's tokens ``[B, K+1]`` and drafts ``[B, K]``, int64 -> what was accepted."""


def verify_chain(
    mode: VerifyMode,
    target_logits_BKV: torch.Tensor,
    draft_ids_BK: torch.Tensor,
    sampling: SamplingTensors,
    first_positions_B: torch.Tensor,
    *,
    draft_probs_BKV: torch.Tensor | None,
    accept: AcceptChain | None = None,
) -> Verified:
    """Verify K drafts against ``[B, K+1, V]`` target logits.

    ``sampling`` has B rows; ``first_positions_B`` is the index of the first token emitted.
    ``draft_probs_BKV`` is the very q that the drafts were sampled from (``None``: arg-maxed drafts,
    one-hot q). ``greedy`` and ``keyed`` differ only in what the caller may ask for (T = 0).
    ``accept``: :func:`accept_chain` as the model's processor does it best.
    """
    if mode == "rejection":
        return _verify_rejection(
            target_logits_BKV, draft_ids_BK, sampling, first_positions_B, draft_probs_BKV
        )
    return _verify_keyed(
        target_logits_BKV, draft_ids_BK, sampling, first_positions_B, accept or accept_chain
    )


def _verify_keyed(
    target_logits_BKV: torch.Tensor,
    draft_ids_BK: torch.Tensor,
    sampling: SamplingTensors,
    first_positions_B: torch.Tensor,
    accept: AcceptChain,
) -> Verified:
    """The target's own keyed draw at every row; a draft is accepted iff it equals the draw."""
    num_requests, num_rows, vocab = target_logits_BKV.shape
    logits_MV = target_logits_BKV.reshape(-1, vocab)
    if sampling.all_greedy:  # nothing depends on positions
        tokens_M = sampling.argmax(logits_MV)
    else:
        positions_BK1 = first_positions_B[:, None] + _arange(num_rows, draft_ids_BK)
        rows = sampling.repeat(num_rows)
        tokens_M = sample(logits_MV, rows, positions_BK1.reshape(-1), Stream.TARGET)
    return accept(tokens_M.view(num_requests, num_rows), draft_ids_BK)


def _verify_rejection(
    target_logits_BKV: torch.Tensor,
    draft_ids_BK: torch.Tensor,
    sampling: SamplingTensors,
    first_positions_B: torch.Tensor,
    draft_probs_BKV: torch.Tensor | None,
) -> Verified:
    """Speculative sampling (Leviathan et al. 2023, appendix A.1): accept with min(1, p/q), else the
    residual relu(p - q); after K acceptances one more token from p.
    """
    num_requests, num_rows, vocab = target_logits_BKV.shape
    rows = sampling.repeat(num_rows)
    p_BKV = token_probs(target_logits_BKV.reshape(-1, vocab), rows).view(target_logits_BKV.shape)
    if draft_probs_BKV is None:
        draft_probs_BKV = torch.zeros_like(p_BKV[:, :-1]).scatter_(-1, draft_ids_BK[..., None], 1.0)
    positions_BK1 = first_positions_B[:, None] + _arange(num_rows, draft_ids_BK)
    flat_positions = positions_BK1.reshape(-1)

    p_draft_BK = p_BKV[:, :-1].gather(-1, draft_ids_BK[..., None])[..., 0].double()
    q_draft_BK = draft_probs_BKV.gather(-1, draft_ids_BK[..., None])[..., 0].double()
    accept_u = philox_uniform(rows.seed_M, flat_positions, Stream.ACCEPT)
    accept_u_BK = accept_u.view(num_requests, num_rows)[:, :-1]
    is_accepted_BK = accept_u_BK * q_draft_BK < p_draft_BK
    num_accepted_B = is_accepted_BK.long().cumprod(-1).sum(-1)

    residual_BKV = (p_BKV[:, :-1] - draft_probs_BKV).clamp_min(0.0)
    # p = q to the last bit leaves no residual; rejection then has probability zero, any p will do.
    is_empty_BK1 = residual_BKV.sum(-1, keepdim=True) <= 0
    residual_BKV = torch.where(is_empty_BK1, p_BKV[:, :-1], residual_BKV)
    weights_BKV = torch.cat([residual_BKV, p_BKV[:, -1:]], 1)
    picked_BV = weights_BKV.gather(1, num_accepted_B[:, None, None].expand(-1, 1, vocab))[:, 0]
    end_positions_B = first_positions_B + num_accepted_B
    is_full_B = num_accepted_B == num_rows - 1
    uniform_B = torch.where(
        is_full_B,
        philox_uniform(sampling.seed_M, end_positions_B, Stream.TARGET),
        philox_uniform(sampling.seed_M, end_positions_B, Stream.RESIDUAL),
    )
    new_ids_B = inverse_cdf(picked_BV, uniform_B)
    tokens_BK1 = torch.cat([draft_ids_BK, draft_ids_BK[:, -1:]], 1)
    tokens_BK1 = tokens_BK1.scatter(1, num_accepted_B[:, None], new_ids_B[:, None])
    return _emit(tokens_BK1, num_accepted_B)


def accept_chain(tokens_BK1: torch.Tensor, draft_ids_BK: torch.Tensor) -> Verified:
    """The target's own tokens up to the first that was not drafted, this one included."""
    matches_BK = draft_ids_BK == tokens_BK1[:, :-1]
    return _emit(tokens_BK1, matches_BK.long().cumprod(-1).sum(-1))


def _emit(tokens_BK1: torch.Tensor, num_accepted_B: torch.Tensor) -> Verified:
    column = _arange(tokens_BK1.shape[1], tokens_BK1)
    ids_BK1 = tokens_BK1.masked_fill(column > num_accepted_B[:, None], -1)
    last_ids_B = tokens_BK1.gather(1, num_accepted_B[:, None])[:, 0]
    return Verified(ids_BK1=ids_BK1, num_emitted_B=num_accepted_B + 1, last_ids_B=last_ids_B)


def _arange(length: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(length, device=like.device)
