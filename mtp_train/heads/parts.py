"""Parts of a differentiable decoder layer: norms, rotation, grouped attention, the gated MLP.

Modules have the names of their tensors in a checkpoint. Softmax happens outside
(:mod:`mtp_train.attention`): an attention module makes queries, keys and values of rows and takes
back what was mixed.

Shape legend: N rows, D model width, H query heads, G key/value heads, C head width, I what a
layer's projections read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import nn

from runtime.head_spec import HeadSpec, RopeSpec
from runtime.rope import attention_factor, inverse_frequencies


class RMSNorm(nn.Module):
    """RMSNorm in fp32, rounded before the weight is applied (as transformers does)."""

    def __init__(self, width: int, *, eps: float, one_plus: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps, self.one_plus = eps, one_plus
        self.weight = nn.Parameter(torch.full((width,), 0.0 if one_plus else 1.0, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        if self.one_plus:
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype)


def make_norm(
    spec: HeadSpec, exists: bool, dtype: torch.dtype, *, width: int | None = None
) -> nn.Module:
    """``width``: the model's, unless given."""
    if not exists:
        return nn.Identity()
    return RMSNorm(
        width or spec.hidden_size, eps=spec.norm_eps, one_plus=spec.norm_form == "1+w", dtype=dtype
    )


def rotate(x_NHC: torch.Tensor, positions_N: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Half-split rotary embedding; angles in fp32, applied in x's dtype (as transformers)."""
    frequencies = inverse_frequencies(rope, x_NHC.shape[-1])
    angles = torch.outer(positions_N.float(), frequencies.to(positions_N.device))[:, None]
    factor = attention_factor(rope)
    cos, sin = ((turn * factor).to(x_NHC.dtype) for turn in (angles.cos(), angles.sin()))
    first, second = x_NHC.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class AttentionInputs(nn.Module, ABC):
    """Everything of an attention but the softmax, which scales scores by ``C ** -0.5``.

    ``positions_N`` are rotary positions.
    """

    @abstractmethod
    def queries(self, inputs_NI: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """``[N, H, C]``, rotated."""

    @abstractmethod
    def keys_values(
        self, inputs_NI: torch.Tensor, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated, and values, ``[N, G, C]`` each."""

    @abstractmethod
    def output(self, mixed_NHC: torch.Tensor) -> torch.Tensor:
        """What is added to the residual stream, ``[N, D]``, from mixed values."""


class GroupedAttention(AttentionInputs):
    """Grouped-query attention, with biases and norms of heads as in ``spec.layer_parts``."""

    def __init__(self, spec: HeadSpec, dtype: torch.dtype, *, inputs: int) -> None:
        super().__init__()
        parts = spec.layer_parts
        self._rope, self._head_dim = spec.rope, spec.head_dim
        q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(inputs, q_dim, bias=parts.qkv_bias, dtype=dtype)
        self.k_proj = nn.Linear(inputs, kv_dim, bias=parts.qkv_bias, dtype=dtype)
        self.v_proj = nn.Linear(inputs, kv_dim, bias=parts.qkv_bias, dtype=dtype)
        self.o_proj = nn.Linear(q_dim, spec.hidden_size, bias=parts.out_bias, dtype=dtype)
        self.q_norm = make_norm(spec, parts.qk_norm, dtype, width=spec.head_dim)
        self.k_norm = make_norm(spec, parts.qk_norm, dtype, width=spec.head_dim)

    def queries(self, inputs_NI: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj(inputs_NI))), positions_N, self._rope)

    def keys_values(
        self, inputs_NI: torch.Tensor, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_NGC = rotate(self.k_norm(self._heads(self.k_proj(inputs_NI))), positions_N, self._rope)
        return k_NGC, self._heads(self.v_proj(inputs_NI))

    def output(self, mixed_NHC: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o_proj(mixed_NHC.flatten(1))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1] // self._head_dim, self._head_dim)


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``, ``inner`` wide."""

    def __init__(self, width: int, inner: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias, dtype=dtype)
        self.up_proj = nn.Linear(width, inner, bias=bias, dtype=dtype)
        self.down_proj = nn.Linear(inner, width, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
