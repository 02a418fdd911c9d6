"""Differentiable multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the training twin of
``runtime.models.mla``.

Expanded, as the paper states it: keys and values of every head are made of the token's latent, and
the rotated key is the same for all heads. The attention of training wants keys and values of one
width and scales scores by ``C ** -0.5``: the narrower ones are filled up with zeros, and queries
carry the rest of the scale.

Shape legend: N rows, D model width, H heads, P unrotated and R rotated elements of a query or key
head, U value width, C = max(P + R, U).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mtp_train.heads.parts import AttentionInputs, RMSNorm, rotate
from runtime.head_spec import HeadSpec


class LatentAttention(AttentionInputs):
    """``spec.latent`` must be there. Weights are in the checkpoint's order of rotated elements."""

    def __init__(self, spec: HeadSpec, dtype: torch.dtype, *, inputs: int) -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None, "a head without latent attention"
        self._latent, self._rope = latent, spec.rope
        self._num_heads, self._width = spec.num_heads, spec.attention_width

        def linear(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False, dtype=dtype)

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, eps=latent.norm_eps, one_plus=False, dtype=dtype)

        q_dim, rank = spec.num_heads * latent.query_dim, latent.query_rank
        if rank is None:
            self.q_proj = linear(q_dim, inputs)
        else:
            self.q_a_proj, self.q_a_layernorm = linear(rank, inputs), norm(rank)
            self.q_b_proj = linear(q_dim, rank)
        self.kv_a_proj_with_mqa = linear(latent.cache_width, inputs)
        self.kv_a_layernorm = norm(latent.kv_rank)
        up = spec.num_heads * (latent.nope_dim + latent.value_dim)
        self.kv_b_proj = linear(up, latent.kv_rank)
        self.o_proj = linear(spec.hidden_size, spec.num_heads * latent.value_dim)

    def queries(self, inputs_NI: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        latent = self._latent
        if latent.query_rank is None:
            query = self.q_proj(inputs_NI)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs_NI)))
        q_NHP, q_NHR = query.unflatten(1, (self._num_heads, -1)).split(
            (latent.nope_dim, latent.rope_dim), dim=-1
        )
        q_NHC = torch.cat((q_NHP, self._rotate(q_NHR, positions_N)), dim=-1)
        return self._filled(q_NHC) * (latent.scale * self._width**0.5)

    def keys_values(
        self, inputs_NI: torch.Tensor, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self._latent
        latent_NL, key_NR = self.kv_a_proj_with_mqa(inputs_NI).split(
            (latent.kv_rank, latent.rope_dim), dim=1
        )
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent_NL))
        k_NHP, v_NHU = expanded.unflatten(1, (self._num_heads, -1)).split(
            (latent.nope_dim, latent.value_dim), dim=-1
        )
        shared_NHR = self._rotate(key_NR[:, None], positions_N).expand(-1, self._num_heads, -1)
        return self._filled(torch.cat((k_NHP, shared_NHR), dim=-1)), self._filled(v_NHU)

    def output(self, mixed_NHC: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o_proj(mixed_NHC[..., : self._latent.value_dim].flatten(1))
        return out

    def _filled(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, self._width - x.shape[-1]))

    def _rotate(self, x_NHR: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        if self._latent.is_interleaved:  # neighbours become halves, of queries and keys alike
            x_NHR = x_NHR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x_NHR, positions_N, self._rope)
