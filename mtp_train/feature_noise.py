"""Noise on the states that a head reads: a head trained on exact states only meets its own, inexact
ones when it drafts several tokens (EAGLE, arXiv 2401.15077, section 4).

Shape legend: T tokens of one sample, D model width.
"""

from __future__ import annotations

import torch


def add_uniform_noise(hidden_TD: torch.Tensor, *, amplitude: float, seed: int) -> torch.Tensor:
    """``hidden + amplitude * rms(row) * U(-1, 1)``, each entry on its own (host, same dtype).

    Measured in each row's root mean square, so that one amplitude means the same for every target.
    (EAGLE-1 adds ``U(-0.1, 0.1)`` to LLaMA's states as they are.) ``seed`` alone decides the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(hidden_TD.shape, generator=generator).mul_(2.0).sub_(1.0)
    wide = hidden_TD.float()
    rms = wide.square().mean(-1, keepdim=True).sqrt()
    return (wide + amplitude * rms * noise).to(hidden_TD.dtype)
