"""The differentiable MTP head: the training twin of the inference head with the same HeadSpec.

``eh_proj([enorm(e), hnorm(h)])`` -> one decoder layer or two, a Llama's but for the biases and head
norms of ``spec.layer_parts`` -> final norm. Embedding and lm_head are the target's, frozen, and
stay outside of this module.

Shape legend: S packed rows, N query rows of one step, H query heads, G key/value heads, C head
width, D model width, I what a layer's projections read, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mtp_train.attention import (
    BLOCKWISE,
    AttentionPlan,
    ChainStep,
    TrainingAttention,
    extend_chain,
)
from mtp_train.heads.base import TrainingHead
from mtp_train.own_tokens import own_tokens
from mtp_train.packing import HeadBatch, RowLayout, UnrollStep
from mtp_train.rows import take_rows
from mtp_train.sequence_parallel import ALONE, HeadExchange
from runtime.head_spec import HeadSpec
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


class _Attention(nn.Module):
    """The four projections and the norms of heads. Rotation and softmax happen in
    :class:`MtpHead`.
    """

    def __init__(self, spec: HeadSpec, dtype: torch.dtype, *, inputs: int) -> None:
        super().__init__()
        parts = spec.layer_parts
        q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(inputs, q_dim, bias=parts.qkv_bias, dtype=dtype)
        self.k_proj = nn.Linear(inputs, kv_dim, bias=parts.qkv_bias, dtype=dtype)
        self.v_proj = nn.Linear(inputs, kv_dim, bias=parts.qkv_bias, dtype=dtype)
        self.o_proj = nn.Linear(q_dim, spec.hidden_size, bias=parts.out_bias, dtype=dtype)
        self.q_norm = _norm(spec, parts.qk_norm, dtype, width=spec.head_dim)
        self.k_norm = _norm(spec, parts.qk_norm, dtype, width=spec.head_dim)


class _Mlp(nn.Module):
    def __init__(self, spec: HeadSpec, dtype: torch.dtype) -> None:
        super().__init__()
        width, inner, bias = spec.hidden_size, spec.intermediate_size, spec.layer_parts.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias, dtype=dtype)
        self.up_proj = nn.Linear(width, inner, bias=bias, dtype=dtype)
        self.down_proj = nn.Linear(inner, width, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Norms and linears under their checkpoint names; ``inputs``: columns that q, k and v read."""

    def __init__(
        self, spec: HeadSpec, dtype: torch.dtype, *, inputs: int, has_input_norm: bool
    ) -> None:
        super().__init__()
        self.input_layernorm = _norm(spec, has_input_norm, dtype)
        self.self_attn = _Attention(spec, dtype, inputs=inputs)
        self.post_attention_layernorm = _norm(spec, spec.norms.post_attention, dtype)
        self.mlp = _Mlp(spec, dtype)


def _norm(
    spec: HeadSpec, exists: bool, dtype: torch.dtype, *, width: int | None = None
) -> nn.Module:
    """``width``: the model's, unless given."""
    if not exists:
        return nn.Identity()
    return RMSNorm(
        width or spec.hidden_size, eps=spec.norm_eps, one_plus=spec.norm_form == "1+w", dtype=dtype
    )


_COMPILED_PARTS = ("_enter", "_keys_values", "_queries", "_behind_attention")


class Cache:
    """Keys and values of one layer: of every packed row, and of each row's own recycled steps."""

    k_SGC: torch.Tensor
    v_SGC: torch.Tensor

    def __init__(self) -> None:
        self.chain: tuple[ChainStep, ...] = ()

    def extend(self, parent_N: torch.Tensor, k_NGC: torch.Tensor, v_NGC: torch.Tensor) -> None:
        """Go on with the rows that ``parent_N`` picks from the step before."""
        self.chain = extend_chain(self.chain, parent_N, k_NGC, v_NGC)


class MtpHead(TrainingHead):
    """With ``activation_checkpointing`` attention and MLP of every step are computed again in the
    backward pass instead of being kept.
    """

    def __init__(
        self,
        spec: HeadSpec,
        *,
        dtype: torch.dtype = torch.float32,
        attention: TrainingAttention = BLOCKWISE,
        activation_checkpointing: bool = False,
        exchange: HeadExchange = ALONE,
    ) -> None:
        super().__init__(spec)
        self._attend = attention
        self._exchange = exchange
        self._is_checkpointed = activation_checkpointing
        self._make_inputs(dtype)
        self.norm = _norm(spec, spec.norms.final, dtype)

    def _make_inputs(self, dtype: torch.dtype) -> None:
        """Everything in front of the final norm."""
        spec, width = self.spec, self.spec.hidden_size
        if spec.draft_vocab is not None:
            raise ValueError("head draft_vocab: a trained MTP head uses the target's vocabulary")
        self.enorm = _norm(spec, spec.norms.enorm, dtype)
        self.hnorm = _norm(spec, spec.norms.hnorm, dtype)
        self.eh_proj = nn.Linear(2 * width, width, bias=spec.projection_bias, dtype=dtype)
        self.layers = nn.ModuleList(
            [
                DecoderLayer(spec, dtype, inputs=width, has_input_norm=spec.norms.input)
                for _ in range(spec.num_layers)
            ]
        )

    def forward(
        self,
        batch: HeadBatch,
        embedding_VD: torch.Tensor,
        draft_lm_head_VD: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        caches = [Cache() for _ in self.layers]
        states: list[torch.Tensor] = []
        recycled = self._read(batch.hidden_SD)
        for number, step in enumerate(batch.steps):
            if number == 0:
                x_ND = self._first_pass(recycled, batch, caches, embedding_VD)
            else:
                ids_N = step.ids_N
                if draft_lm_head_VD is not None:
                    ids_N = own_tokens(states[-1][step.parent_N], draft_lm_head_VD)
                hidden_ND = take_rows(recycled, step.parent_N)
                positions_N = batch.positions_S[step.rows_N] + number
                x_ND = self._next_pass(step, ids_N, hidden_ND, positions_N, caches, embedding_VD)
            normed_ND = self.norm(x_ND)
            states.append(normed_ND if self.spec.logits_from == "post_norm" else x_ND)
            recycled = normed_ND if self.spec.recycle == "post_norm" else x_ND
        return tuple(states)

    def compile_parts(self) -> None:
        """Compile what lies between the attentions, once for all numbers of rows; attention itself
        runs as it is. The first steps take the compiler's time. The results are the same up to
        rounding.
        """
        for name in _COMPILED_PARTS:
            setattr(self, name, torch.compile(getattr(self, name), dynamic=True))

    def _read(self, hidden_SI: torch.Tensor) -> torch.Tensor:
        """What is in the target's rows in the place of a recycled state, ``[S, D]``."""
        return hidden_SI

    def _enter(
        self,
        ids_N: torch.Tensor,
        hidden_ND: torch.Tensor,
        positions_N: torch.Tensor,
        embedding_VD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream, and what query, key and value of the first layer read."""
        x_ND = self._combine(ids_N, hidden_ND, positions_N, embedding_VD)
        return x_ND, self._layers[0].input_layernorm(x_ND)

    def _first_pass(
        self,
        hidden_SD: torch.Tensor,
        batch: HeadBatch,
        caches: list[Cache],
        embedding_VD: torch.Tensor,
    ) -> torch.Tensor:
        """Step 0. Every row has keys in every layer, so all rows go through all layers but the
        last, and the rows that are asked for through that one.
        """
        positions_S, step = batch.positions_S, batch.steps[0]
        x_SD, read_SI = self._enter(batch.next_ids_S, hidden_SD, positions_S, embedding_VD)
        for number, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            if number:
                read_SI = layer.input_layernorm(x_SD)
            cache.k_SGC, cache.v_SGC = self._keys_values(layer, read_SI, positions_S, batch.layout)
            if number + 1 < len(caches):
                x_SD = self._block(layer, x_SD, read_SI, positions_S, batch, cache)
        x_ND, read_NI = (take_rows(t, step.rows_N) for t in (x_SD, read_SI))
        return self._block(layer, x_ND, read_NI, positions_S[step.rows_N], step, cache)

    def _next_pass(
        self,
        step: UnrollStep,
        ids_N: torch.Tensor,
        hidden_ND: torch.Tensor,
        positions_N: torch.Tensor,
        caches: list[Cache],
        embedding_VD: torch.Tensor,
    ) -> torch.Tensor:
        """Step k >= 1: every row goes on from the step before, in every layer."""
        x_ND, read_NI = self._enter(ids_N, hidden_ND, positions_N, embedding_VD)
        for number, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            if number:
                read_NI = layer.input_layernorm(x_ND)
            k_NGC, v_NGC = self._keys_values(layer, read_NI, positions_N, step.layout)
            cache.extend(step.chain_parent_N, k_NGC, v_NGC)
            x_ND = self._block(layer, x_ND, read_NI, positions_N, step, cache)
        return x_ND

    def _block(
        self,
        layer: DecoderLayer,
        x_ND: torch.Tensor,
        normed_ND: torch.Tensor,
        positions_N: torch.Tensor,
        rows: HeadBatch | UnrollStep,
        cache: Cache,
    ) -> torch.Tensor:
        # arguments, not the cache: it has grown by the time the block is computed again
        keys_values = (cache.k_SGC, cache.v_SGC, cache.chain)
        inputs = (layer, x_ND, normed_ND, positions_N, rows.plan, rows.layout, *keys_values)
        if self._is_checkpointed and torch.is_grad_enabled():
            out: torch.Tensor = checkpoint(self._compute_block, *inputs, use_reentrant=False)
            return out
        return self._compute_block(*inputs)

    def _compute_block(
        self,
        layer: DecoderLayer,
        x_ND: torch.Tensor,
        normed_ND: torch.Tensor,
        positions_N: torch.Tensor,
        plan: AttentionPlan,
        layout: RowLayout | None,
        k_SGC: torch.Tensor,
        v_SGC: torch.Tensor,
        chain: tuple[ChainStep, ...],
    ) -> torch.Tensor:
        q_NHC = self._exchange.to_heads(self._queries(layer, normed_ND, positions_N), layout)
        mixed_NHC = self._attend(q_NHC, k_SGC, v_SGC, plan, chain)
        return self._behind_attention(layer, x_ND, self._exchange.to_rows(mixed_NHC, layout))

    def _queries(
        self, layer: DecoderLayer, normed_ND: torch.Tensor, positions_N: torch.Tensor
    ) -> torch.Tensor:
        attention = layer.self_attn
        q_NHC = attention.q_norm(self._heads(attention.q_proj(normed_ND)))
        return self._rotate(q_NHC, positions_N)

    def _behind_attention(
        self, layer: DecoderLayer, x_ND: torch.Tensor, mixed_NHC: torch.Tensor
    ) -> torch.Tensor:
        x_ND = x_ND + layer.self_attn.o_proj(mixed_NHC.flatten(1))
        out: torch.Tensor = x_ND + layer.mlp(layer.post_attention_layernorm(x_ND))
        return out

    @property
    def _layers(self) -> Sequence[DecoderLayer]:
        return cast(Sequence[DecoderLayer], self.layers)

    def _combine(
        self,
        ids_N: torch.Tensor,
        hidden_ND: torch.Tensor,
        positions_N: torch.Tensor,
        embedding_VD: torch.Tensor,
    ) -> torch.Tensor:
        e_ND = F.embedding(ids_N, embedding_VD).to(hidden_ND.dtype)
        if self.spec.first_embedding_mask:
            e_ND = e_ND.masked_fill((positions_N == 0)[:, None], 0.0)
        parts = [self.enorm(e_ND), self.hnorm(hidden_ND)]
        if self.spec.concat == "hidden_embedding":
            parts.reverse()
        out: torch.Tensor = self.eh_proj(torch.cat(parts, dim=-1))
        return out

    def _keys_values(
        self,
        layer: DecoderLayer,
        normed_ND: torch.Tensor,
        positions_N: torch.Tensor,
        layout: RowLayout | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention = layer.self_attn
        k_NGC = attention.k_norm(self._heads(attention.k_proj(normed_ND)))
        k_NGC = self._rotate(k_NGC, positions_N)
        v_NGC = self._heads(attention.v_proj(normed_ND))
        return self._exchange.to_heads(k_NGC, layout), self._exchange.to_heads(v_NGC, layout)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1] // self.spec.head_dim, self.spec.head_dim)

    def _rotate(self, x_NHC: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """Half-split rotary embedding; angles in fp32, applied in x's dtype (as transformers)."""
        frequencies = inverse_frequencies(self.spec.rope, self.spec.head_dim)
        positions = (positions_N + self.spec.position_offset).float()
        angles = torch.outer(positions, frequencies.to(positions.device))[:, None]
        factor = attention_factor(self.spec.rope)
        cos, sin = ((turn * factor).to(x_NHC.dtype) for turn in (angles.cos(), angles.sin()))
        first, second = x_NHC.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
