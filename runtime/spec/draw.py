"""Drawing drafted tokens from a draft's logits, one per request.

Shape legend: B requests, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import upload_ids
from runtime.config import DraftMode
from runtime.sampling import (
    SamplingTensors,
    Stream,
    inverse_cdf,
    philox_uniform,
    token_probs,
)


def draw_draft(
    logits_BW: torch.Tensor,
    sampling: SamplingTensors,
    positions: Sequence[int],
    mode: DraftMode,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One drafted column ``[B]`` per request and, where it is sampled, the very q ``[B, W]`` that
    it comes from. ``positions``: of the drafted tokens.
    """
    if mode == "argmax":
        return sampling.argmax(logits_BW), None
    probs_BW = token_probs(logits_BW, sampling)
    positions_B = upload_ids(positions, logits_BW.device)
    uniform_B = philox_uniform(sampling.seed_M, positions_B, Stream.DRAFT)
    return inverse_cdf(probs_BW, uniform_B), probs_BW
