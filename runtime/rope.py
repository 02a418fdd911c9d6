"""Rotary frequencies of a ``RopeSpec``: the formulas that targets, heads and training share.

Shape legend: C head width.
"""

from __future__ import annotations

import math

import torch

from runtime.head_spec import RopeSpec, YarnSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Inverse frequencies, fp32 ``[C / 2]``.

    ``llama3``: frequencies whose wavelength exceeds ``original_max_position / low_freq_factor`` are
    divided by ``factor``, those below ``original_max_position / high_freq_factor`` are kept, the
    rest is interpolated (Llama 3.1). ``yarn``: those that turn less than ``beta_slow`` times over
    ``original_max_position`` are divided by ``factor``, those above ``beta_fast`` are kept, with a
    ramp over the dimensions between (Peng et al. 2023, arXiv:2309.00071). Both as in transformers.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = spec.theta**exponents  # over 2 pi
    if spec.kind == "llama3":
        return _llama3(spec, 1.0 / wavelengths)
    if spec.yarn is not None:
        return _yarn(spec, spec.yarn, wavelengths)
    return 1.0 / wavelengths


def attention_factor(spec: RopeSpec) -> float:
    """What cosine and sine are multiplied with: 1 but for ``yarn``."""
    return 1.0 if spec.yarn is None else spec.yarn.attention_factor


def yarn_attention_factor(
    factor: float, *, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """The factor of a yarn configuration that does not state it (transformers' rule)."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """How much larger scores get when lengths do by ``factor`` (yarn, with DeepSeek's weights)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(spec: RopeSpec, inverse: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / inverse
    low = spec.original_max_position / spec.low_freq_factor
    high = spec.original_max_position / spec.high_freq_factor
    smooth = (spec.original_max_position / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    between = (1 - smooth) * inverse / spec.factor + smooth * inverse
    scaled = torch.where(wavelength > low, inverse / spec.factor, inverse)
    is_between = (wavelength >= high) & (wavelength <= low)
    return torch.where(is_between, between, scaled)


def _yarn(spec: RopeSpec, yarn: YarnSpec, wavelengths: torch.Tensor) -> torch.Tensor:
    width = 2 * len(wavelengths)

    def dimension(num_turns: float) -> float:
        turns = spec.original_max_position / (num_turns * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # transformers' way around a ramp of no width
    steps = torch.arange(len(wavelengths), dtype=torch.float32)
    kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    # 1 - kept is not the ramp to the last bit, which position 100,000 would show
    return 1.0 / (spec.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
