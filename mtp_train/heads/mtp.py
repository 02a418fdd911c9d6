"""The differentiable MTP head: the training twin of the inference head with the same HeadSpec.

``eh_proj([enorm(e), hnorm(h)])`` -> one decoder layer or two, with the biases, head norms, latent
attention and experts of the spec -> final norm. Embedding and lm_head are the target's, frozen, and
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
from mtp_train.heads.experts import ExpertMlp
from mtp_train.heads.latent import LatentAttention
from mtp_train.heads.parts import AttentionInputs, GatedMlp, GroupedAttention, make_norm
from mtp_train.own_tokens import own_tokens
from mtp_train.packing import HeadBatch, RowLayout, UnrollStep
from mtp_train.rows import take_rows
from mtp_train.sequence_parallel import ALONE, HeadExchange
from runtime.head_spec import HeadSpec


class DecoderLayer(nn.Module):
    """Norms and linears under their checkpoint names; ``inputs``: columns that q, k and v read."""

    self_attn: AttentionInputs

    def __init__(
        self, spec: HeadSpec, dtype: torch.dtype, *, inputs: int, has_input_norm: bool
    ) -> None:
        super().__init__()
        attention = GroupedAttention if spec.latent is None else LatentAttention
        self.input_layernorm = make_norm(spec, has_input_norm, dtype)
        self.self_attn = attention(spec, dtype, inputs=inputs)
        self.post_attention_layernorm = make_norm(spec, spec.norms.post_attention, dtype)
        self.mlp = ExpertMlp(spec, dtype) if spec.experts is not None else _dense_mlp(spec, dtype)


def _dense_mlp(spec: HeadSpec, dtype: torch.dtype) -> GatedMlp:
    return GatedMlp(
        spec.hidden_size, spec.intermediate_size, bias=spec.layer_parts.mlp_bias, dtype=dtype
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
        self.norm = make_norm(spec, spec.norms.final, dtype)

    def _make_inputs(self, dtype: torch.dtype) -> None:
        """Everything in front of the final norm."""
        spec, width = self.spec, self.spec.hidden_size
        if spec.draft_vocab is not None:
            raise ValueError("head draft_vocab: a trained MTP head uses the target's vocabulary")
        self.enorm = make_norm(spec, spec.norms.enorm, dtype)
        self.hnorm = make_norm(spec, spec.norms.hnorm, dtype)
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
        return layer.self_attn.queries(normed_ND, positions_N + self.spec.position_offset)

    def _behind_attention(
        self, layer: DecoderLayer, x_ND: torch.Tensor, mixed_NHC: torch.Tensor
    ) -> torch.Tensor:
        x_ND = x_ND + layer.self_attn.output(mixed_NHC)
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
        rotary_N = positions_N + self.spec.position_offset
        k_NGC, v_NGC = layer.self_attn.keys_values(normed_ND, rotary_N)
        return self._exchange.to_heads(k_NGC, layout), self._exchange.to_heads(v_NGC, layout)
