"""Norms, rotary embedding and the merged decoder block that target and draft heads share.

Norms are computed in float32 and rounded once. Rotary angles are computed in float32 from the
positions of each batch, so no table bounds the length and nothing is lost at long positions.

Shape legend: N rows, D model width, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from runtime.attention.base import AttentionBackend
from runtime.cpu import Linear
from runtime.head_spec import RopeSpec
from runtime.kv_cache import KVPool

TensorSource = Callable[[str], torch.Tensor]  # hands over one tensor by name, once


@dataclass(frozen=True)
class BlockShape:
    """What one decoder block needs to know besides its weights."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * w`` in float32, rounded once to ``x``'s dtype.

    ``plus_one`` is the Gemma form: the stored weight is added to one.
    """

    def __init__(self, weight_D: torch.Tensor, *, eps: float, plus_one: bool = False) -> None:
        weight = weight_D.float()
        self.weight_D = weight + 1.0 if plus_one else weight
        self.eps = eps

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        x = x_ND.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * scale * self.weight_D).to(x_ND.dtype)


def rope_inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Inverse frequencies, fp32 ``[C / 2]``.

    ``llama3``: frequencies whose wavelength exceeds ``original_max_position / low_freq_factor`` are
    divided by ``factor``, those below ``original_max_position / high_freq_factor`` are kept, the
    rest is interpolated (Llama 3.1; same formula as transformers).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (spec.theta**exponents)
    if spec.kind == "default":
        return inverse
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


@dataclass(frozen=True)
class RotaryAngles:
    """Angles of one batch, ``sin`` signed: ``x * cos + swap_halves(x) * sin`` is the rotation."""

    cos_N1C: torch.Tensor
    sin_N1C: torch.Tensor


class RotaryEmbedding:
    """Half-layout rotary embedding (element ``c`` is paired with ``c + C/2``)."""

    def __init__(self, spec: RopeSpec, head_dim: int, *, device: torch.device) -> None:
        self._inverse = rope_inverse_frequencies(spec, head_dim).to(device)

    def angles(self, positions_N: torch.Tensor, dtype: torch.dtype) -> RotaryAngles:
        """Angles in float32, rounded to ``dtype`` once per batch (as transformers does)."""
        angle = positions_N.to(torch.float32)[:, None] * self._inverse
        cos, sin = angle.cos(), angle.sin()
        return RotaryAngles(
            torch.cat((cos, cos), -1).to(dtype)[:, None],
            torch.cat((-sin, sin), -1).to(dtype)[:, None],
        )


def apply_rotary(x_NHC: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Rotate every head of ``x``; a new tensor of ``x``'s dtype."""
    first, second = x_NHC.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x_NHC * angles.cos_N1C, swapped, angles.sin_N1C)


class DecoderBlock:
    """Pre-norm attention and gated MLP, with merged QKV and merged gate/up.

    ``shapes`` lists the block's tensors without their layer prefix (``self_attn.q_proj.weight`` …);
    ``take`` hands them over one at a time, so that loading holds one of them beside the merged one.
    A norm that is not listed is the identity.
    """

    def __init__(
        self,
        shape: BlockShape,
        take: TensorSource,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        pack: bool,
        plus_one_norms: bool = False,
    ) -> None:
        self.shape = shape
        self.input_norm: RMSNorm | None = None
        self.post_attention_norm: RMSNorm | None = None
        if "input_layernorm.weight" in shapes:
            self.input_norm = RMSNorm(
                take("input_layernorm.weight"), eps=shape.norm_eps, plus_one=plus_one_norms
            )
        if "post_attention_layernorm.weight" in shapes:
            self.post_attention_norm = RMSNorm(
                take("post_attention_layernorm.weight"), eps=shape.norm_eps, plus_one=plus_one_norms
            )
        attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        self.qkv = _merge(take, shapes, attention, pack)
        self.out = _merge(take, shapes, ["self_attn.o_proj"], pack)
        self.gate_up = _merge(take, shapes, ["mlp.gate_proj", "mlp.up_proj"], pack)
        self.down = _merge(take, shapes, ["mlp.down_proj"], pack)

    def __call__(
        self,
        x_ND: torch.Tensor,
        angles: RotaryAngles,
        *,
        backend: AttentionBackend,
        plan: Any,
        pool: KVPool,
        layer: int,
    ) -> torch.Tensor:
        """Residual stream in, residual stream out; ``[N, D]``."""
        shape = self.shape
        rows = x_ND.shape[0]
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        normed = self.input_norm(x_ND) if self.input_norm is not None else x_ND
        qkv = self.qkv(normed).view(rows, num_heads + 2 * num_kv_heads, shape.head_dim)
        rotated = apply_rotary(qkv[:, : num_heads + num_kv_heads], angles)
        attended = backend.run(
            plan,
            pool,
            layer,
            rotated[:, :num_heads],
            rotated[:, num_heads:],
            qkv[:, num_heads + num_kv_heads :],
        )
        x_ND = x_ND + self.out(attended.reshape(rows, num_heads * shape.head_dim))
        normed = self.post_attention_norm(x_ND) if self.post_attention_norm is not None else x_ND
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x_ND + self.down(F.silu(gate).mul_(up))


def _merge(
    take: TensorSource, shapes: Mapping[str, tuple[int, ...]], names: list[str], pack: bool
) -> Linear:
    """One linear whose outputs are those of ``names``, one after the other."""
    bias = None
    if names[0] + ".bias" in shapes:
        bias = _concat_rows(take, shapes, [name + ".bias" for name in names])
    weight = _concat_rows(take, shapes, [name + ".weight" for name in names])
    return Linear(weight, bias, pack=pack)


def _concat_rows(
    take: TensorSource, shapes: Mapping[str, tuple[int, ...]], names: list[str]
) -> torch.Tensor:
    if len(names) == 1:
        return take(names[0])
    rows = [shapes[name][0] for name in names]
    merged: torch.Tensor | None = None
    for index, name in enumerate(names):
        part = take(name)
        if merged is None:
            merged = part.new_empty((sum(rows), *part.shape[1:]))
        start = sum(rows[:index])
        merged[start : start + rows[index]] = part
        del part
    assert merged is not None, "no tensors to merge"
    return merged
