"""Bytes of a head's weights, master copies, moments and gradients on one rank, by ZeRO stage.

As DeepSpeed 0.19 allocates them with the trainer's settings (gradients accumulated and sent in
fp32); read off the living tensors of one and two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = (0, 1, 2, 3)
BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default reduce_bucket_size


@dataclass(frozen=True)
class HeadStates:
    """Bytes per rank. ``bucket``: DeepSpeed's buffer for sending gradients, whatever the head."""

    weights: float
    master: float
    moments: float
    gradients: float
    bucket: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.master + self.moments + self.gradients + self.bucket


def head_states(
    num_weights: int, *, zero_stage: int, ranks: int, width: int, is_cpu: bool
) -> HeadStates:
    """States of ``num_weights`` weights of ``width`` bytes (2: bf16, 4: fp32).

    Stage 3 holds one gathered copy of the weights while it computes. The bucket is reserved whole;
    on a CPU only the part that is used takes memory.
    """
    whole, share = float(num_weights), num_weights / ranks
    elements = min(num_weights, BUCKET_ELEMENTS) if is_cpu else BUCKET_ELEMENTS
    if zero_stage == 0:
        return HeadStates(4 * whole, 0.0, 8 * whole, 4 * whole)
    master, moments = 4 * share, 8 * share
    if zero_stage == 1:
        accumulated = 4 * whole if width == 2 else 4 * share
        return HeadStates(width * whole, master, moments, accumulated + width * whole)
    gradients = 4 * share + width * whole
    if zero_stage == 2:
        return HeadStates(width * whole, master, moments, gradients, float(width * elements))
    weights = width * (share + whole)
    return HeadStates(weights, master, moments, gradients, 4.0 * elements)
