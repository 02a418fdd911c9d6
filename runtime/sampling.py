"""Sampling: one truncation function for plain decoding and verification, and keyed randomness.

Every draw is one Philox4x32-10 uniform (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3") keyed by (seed, position, stream), turned into a token by the inverse CDF in vocabulary
order with float64 sums. It never depends on call order, batch row or schedule.

Shape legend: M rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from runtime.batch import upload
from runtime.request import SamplingParams

_MASK32 = 0xFFFFFFFF


ArgMax = Callable[[torch.Tensor], torch.Tensor]
"""Logits ``[M, V]`` -> best tokens, int64 ``[M]``; the lowest id on a tie."""


class Stream(IntEnum):
    """What a draw is for. Sharing a stream between two purposes correlates them."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of M rows on the device, with host facts that choose the code path."""

    temperature_M: torch.Tensor  # float32; 0 = greedy
    top_k_M: torch.Tensor  # int64; 0 = off
    top_p_M: torch.Tensor  # float32
    min_p_M: torch.Tensor  # float32
    seed_M: torch.Tensor  # int64
    argmax: ArgMax  # as the model's processor does it best
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        device: torch.device,
        *,
        argmax: ArgMax | None = None,
    ) -> SamplingTensors:
        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return upload(torch.tensor(values, dtype=dtype), device)

        return cls(
            temperature_M=column([p.temperature for p in params], torch.float32),
            top_k_M=column([p.top_k for p in params], torch.int64),
            top_p_M=column([p.top_p for p in params], torch.float32),
            min_p_M=column([p.min_p for p in params], torch.float32),
            seed_M=column([p.seed for p in params], torch.int64),
            argmax=argmax or best_tokens,
            all_greedy=all(p.temperature == 0 for p in params),
            any_top_k=any(p.top_k > 0 for p in params),
            any_top_p=any(p.top_p < 1 for p in params),
            any_min_p=any(p.min_p > 0 for p in params),
        )

    def repeat(self, times: int) -> SamplingTensors:
        """Every row ``times`` times (``[M * times]``), for the K+1 rows of verification."""

        def spread(values_M: torch.Tensor) -> torch.Tensor:
            return values_M[:, None].expand(-1, times).reshape(-1)

        return SamplingTensors(
            temperature_M=spread(self.temperature_M),
            top_k_M=spread(self.top_k_M),
            top_p_M=spread(self.top_p_M),
            min_p_M=spread(self.min_p_M),
            seed_M=spread(self.seed_M),
            argmax=self.argmax,
            all_greedy=self.all_greedy,
            any_top_k=self.any_top_k,
            any_top_p=self.any_top_p,
            any_min_p=self.any_min_p,
        )


def token_probs(logits_MV: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """The distribution a token is drawn from, float32 ``[M, V]``.

    Order as in transformers: temperature, top-k, top-p (smallest set whose mass reaches p), min-p
    (relative to the best token). A greedy row is one-hot at its arg-max.
    """
    logits_MV = logits_MV.float()
    best_M1 = best_tokens(logits_MV)[:, None]
    one_hot_MV = torch.zeros_like(logits_MV).scatter_(-1, best_M1, 1.0)
    if sampling.all_greedy:
        return one_hot_MV
    is_greedy_M1 = (sampling.temperature_M == 0)[:, None]
    scaled_MV = logits_MV / sampling.temperature_M.masked_fill(is_greedy_M1[:, 0], 1.0)[:, None]
    if sampling.any_top_k or sampling.any_top_p:
        scaled_MV = _truncate(scaled_MV, sampling)
    probs_MV = scaled_MV.softmax(-1)
    if sampling.any_min_p:
        floor_M1 = probs_MV.amax(-1, keepdim=True) * sampling.min_p_M[:, None]
        kept_MV = probs_MV.masked_fill(probs_MV < floor_M1, 0.0)
        probs_MV = kept_MV / kept_MV.sum(-1, keepdim=True)
    return torch.where(is_greedy_M1, one_hot_MV, probs_MV)


def _truncate(scaled_MV: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Top-k, then top-p on what is left; the rest gets -inf. Ties go by vocabulary order."""
    sorted_MV, order_MV = scaled_MV.sort(dim=-1, descending=True, stable=True)
    if sampling.any_top_k:
        rank_V = torch.arange(scaled_MV.shape[-1], device=scaled_MV.device)
        is_cut_MV = (sampling.top_k_M > 0)[:, None] & (rank_V >= sampling.top_k_M[:, None])
        sorted_MV = sorted_MV.masked_fill(is_cut_MV, -torch.inf)
    if sampling.any_top_p:
        probs_MV = sorted_MV.softmax(-1)
        mass_before_MV = probs_MV.cumsum(-1) - probs_MV
        is_cut_MV = (mass_before_MV >= sampling.top_p_M[:, None]) & (sampling.top_p_M < 1)[:, None]
        sorted_MV = sorted_MV.masked_fill(is_cut_MV, -torch.inf)
    return torch.empty_like(scaled_MV).scatter_(-1, order_MV, sorted_MV)


def sample(
    logits_MV: torch.Tensor,
    sampling: SamplingTensors,
    positions_M: torch.Tensor,
    stream: Stream,
) -> torch.Tensor:
    """Draw one token per row, int64 ``[M]``; ``positions_M`` are the drawn tokens' indices."""
    if sampling.all_greedy:
        return sampling.argmax(logits_MV)
    uniform_M = philox_uniform(sampling.seed_M, positions_M, stream)
    return inverse_cdf(token_probs(logits_MV, sampling), uniform_M)


def best_tokens(logits_MV: torch.Tensor) -> torch.Tensor:
    """Best token of each row, int64 ``[M]``; the lowest id on a tie.

    ``max`` returns the same index as ``argmax``, five times as fast on a CPU in bfloat16.
    """
    return logits_MV.max(-1).indices


def top_candidates(logits_XV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best tokens of each row, best first: ids and log-probabilities (float32).

    Any leading shape X. A tie at the edge may fall either way.
    """
    top = logits_XV.topk(count, dim=-1)
    best = top.values[..., :1].float()
    total = (logits_XV.float() - best).exp_().sum(-1, keepdim=True)
    return top.indices, top.values.float() - best - total.log_()


def inverse_cdf(weights_MV: torch.Tensor, uniform_M: torch.Tensor) -> torch.Tensor:
    """First token whose cumulative weight exceeds ``uniform * total``; never one of weight zero.

    ``weights_MV`` need not be normalised, but every row must have mass. Sums are float64.
    """
    cumulative_MV = weights_MV.double().cumsum(-1)
    total_M1 = cumulative_MV[:, -1:]
    below_M1 = torch.nextafter(total_M1, torch.zeros_like(total_M1))
    threshold_M1 = torch.minimum(uniform_M[:, None] * total_M1, below_M1)
    return torch.searchsorted(cumulative_MV, threshold_M1, right=True)[:, 0]


def philox_uniform(seed_M: torch.Tensor, position_M: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Philox4x32-10 at counter (position, stream), key seed: float64 ``[M]`` in [0, 1), 53 bits."""
    c0, c1 = position_M & _MASK32, (position_M >> 32) & _MASK32
    c2, c3 = torch.full_like(c0, int(stream)), torch.zeros_like(c0)
    k0, k1 = seed_M & _MASK32, (seed_M >> 32) & _MASK32
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK32) ^ c1 ^ k0,
            product1 & _MASK32,
            ((product0 >> 32) & _MASK32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return ((c0 >> 5) * 67108864 + (c1 >> 6)).double() / 9007199254740992.0
