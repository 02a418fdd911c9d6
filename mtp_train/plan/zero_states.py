"""Bytes of a head's weights, master copies, moments and gradients on one rank, by ZeRO stage.

As DeepSpeed 0.19 allocates them with the trainer's settings (gradients accumulated and sent in
fp32); read off the living tensors of one and two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Offload = Literal["none", "optimizer", "all"]
STAGES = (0, 1, 2, 3)
MOMENT_BYTES = MappingProxyType({"adamw": 8, "muon": 4})  # per weight; norm weights are few
BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default reduce_bucket_size


@dataclass(frozen=True)
class HeadStates:
    """Bytes per rank. ``bucket``: DeepSpeed's buffer for sending gradients, whatever the head;
    ``offloaded``: what lies in the host's memory, by ``deepspeed.offload``.
    """

    weights: float
    master: float
    moments: float
    gradients: float
    bucket: float = 0.0
    offloaded: float = 0.0

    @property
    def total(self) -> float:
        """On the device."""
        return self.weights + self.master + self.moments + self.gradients + self.bucket


def head_states(
    num_weights: int,
    *,
    zero_stage: int,
    ranks: int,
    width: int,
    is_cpu: bool,
    offload: Offload = "none",
    optimizer: str = "adamw",
) -> HeadStates:
    """States of ``num_weights`` weights of ``width`` bytes (2: bf16, 4: fp32).

    Stage 3 holds one gathered copy of the weights while it computes. The bucket is reserved whole;
    on a CPU only the part that is used takes memory. With ``offload`` stage 1 sends gradients as
    stage 2 does; staging buffers of the size of the largest weight are not counted.
    """
    whole, share = float(num_weights), num_weights / ranks
    moment = MOMENT_BYTES[optimizer]
    elements = min(num_weights, BUCKET_ELEMENTS) if is_cpu else BUCKET_ELEMENTS
    if offload != "none" and zero_stage > 0:
        # Master, moments, accumulated gradients and those of the step; weights that were stepped.
        host = (4 + moment + 4 + 4) * share
        bucket, at_rest = float(width) * elements, 0.0
        if zero_stage < 3:
            host += width * share
        else:
            bucket, at_rest = 4.0 * elements, width * share
            if offload == "all":
                host, at_rest = host + at_rest, 0.0
        return HeadStates(width * whole + at_rest, 0.0, 0.0, width * whole, bucket, host)
    if zero_stage == 0:
        return HeadStates(4 * whole, 0.0, moment * whole, 4 * whole)
    master, moments = 4 * share, moment * share
    if zero_stage == 1:
        accumulated = 4 * whole if width == 2 else 4 * share
        return HeadStates(width * whole, master, moments, accumulated + width * whole)
    gradients = 4 * share + width * whole
    if zero_stage == 2:
        return HeadStates(width * whole, master, moments, gradients, float(width * elements))
    weights = width * (share + whole)
    return HeadStates(weights, master, moments, gradients, 4.0 * elements)
