"""The decoder of Llama, Mistral, Qwen and DeepSeek over a paged cache.

What differs between them is read by :mod:`runtime.models.families`; latent attention
(:mod:`runtime.models.mla`) and experts (:mod:`runtime.moe`) are parts of their decoder blocks.

``forward`` returns ``g``, the hidden state *after* the final norm, and behind it what
:meth:`LlamaModel.tapped` asks for; ``logits`` is the head alone. Draft heads share ``embed`` and
``lm_head`` of the target they belong to. Tensors are inference tensors: clone them to use them in
autograd.

Shape legend: N rows, M selected rows, D model width, V vocabulary, W draft ids, E row width.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from itertools import pairwise

import torch

from runtime.attention.base import AttentionBackend
from runtime.batch import ForwardBatch
from runtime.cpu import choose_linear
from runtime.halves import plan_rows, run_rows
from runtime.kv_cache import Fp8Scales, KVPool, SlotTable
from runtime.layers import (
    BlockShape,
    DecoderBlock,
    RotaryEmbedding,
    build_block,
    norm_weight,
)
from runtime.linear import LinearMaker, LinearSource, TensorSource
from runtime.models.base import Model
from runtime.models.config import ModelConfig
from runtime.models.sparse_parts import check_backend, sparse_parts, why_not_recorded
from runtime.ops import BlockOps
from runtime.parallel import ProcessGroup
from runtime.parallel_layers import vocabulary_of
from runtime.screened_linear import ScreenedLinear
from runtime.sharding import share_layer


class LlamaModel(Model):
    """A target. ``take(name)`` hands over one checkpoint tensor in the wanted dtype and device; on
    several ranks this rank's part of it (:func:`runtime.sharding.target_shards`), with
    ``expert_parallel`` whole experts.

    Every tensor is taken exactly once, and merged and packed at once, so that loading needs little
    more than the weights themselves. ``make_linear`` defaults to what
    :func:`runtime.cpu.choose_linear` chooses without kernels. ``fp8_cache``: keys and values are
    kept in fp8, with these scales. Raises ``ValueError`` for latent attention with a backend that
    has none.
    """

    backend: AttentionBackend

    def __init__(
        self,
        config: ModelConfig,
        take: TensorSource,
        *,
        backend: AttentionBackend,
        ops: BlockOps,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup,
        make_linear: LinearMaker | None = None,
        fp8_cache: Fp8Scales | None = None,
        expert_parallel: bool = False,
    ) -> None:
        self.config = config
        self.fp8_cache = fp8_cache
        self.group = group
        self.expert_parallel = expert_parallel
        self.backend = backend
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.vocab_size = config.vocab_size
        self.width = config.hidden_size
        self.make_linear = make_linear or choose_linear(dtype, device)
        check_backend(backend, config.latent, config.architecture)
        self.not_recorded = why_not_recorded(config.latent, config.experts)
        heads = share_layer(config, 0, group).heads
        self.block_shape = BlockShape(
            num_heads=len(heads.query),
            num_kv_heads=len(heads.kv),
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
        )
        self.rotary = RotaryEmbedding(config.rope, config.rotary_dim, device=device)
        self._plus_one = config.norm_form == "1+w"
        self.max_context = config.sliding_window
        self.vocabulary = vocabulary_of(config.vocab_size, group)
        self.embedding_VD = take("model.embed_tokens.weight")  # this rank's rows
        if config.tie_word_embeddings:
            self.lm_head = self.make_linear(self.embedding_VD, None)
        else:
            self.lm_head = self.make_linear(take("lm_head.weight"), None)
        self.blocks = [self._take_block(take, index) for index in range(config.num_layers)]
        self.final_norm = norm_weight(
            take("model.norm.weight"), eps=config.norm_eps, plus_one=self._plus_one
        )

    def new_pool(self, num_slots: int) -> KVPool:
        latent = self.config.latent
        return KVPool(
            num_layers=self.config.num_layers,
            num_slots=num_slots,
            num_kv_heads=1 if latent else self.block_shape.num_kv_heads,
            head_dim=latent.cache_width if latent else self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
            has_values=latent is None,
            fp8=self.fp8_cache,
        )

    def embed(self, input_ids_N: torch.Tensor) -> torch.Tensor:
        """Embedding rows ``[N, D]``; a copy."""
        return self.vocabulary.lookup(self.embedding_VD, input_ids_N)

    def head_rows(self, ids_W: torch.Tensor) -> torch.Tensor:
        """Rows ``[W, D]`` of ``lm_head``'s plain weight, copied (not for the decode path)."""
        if self.config.tie_word_embeddings:
            return self.embed(ids_W)
        return self.vocabulary.lookup(self.lm_head.dense_weight(), ids_W)

    def tapped(self, layer_ids: Sequence[int]) -> LlamaModel:
        """This model over the same weights, giving ``S_k`` for each of ``layer_ids`` too: the
        residual stream, un-normed, after ``k`` layers, which is the input of layer ``k`` (from 0).

        Raises ``ValueError`` as :func:`check_layer_ids` does.
        """
        check_layer_ids(layer_ids, num_layers=len(self.blocks), field="layer_ids")
        tapped = copy.copy(self)
        tapped.layer_ids = tuple(layer_ids)
        return tapped

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, table: SlotTable, pool: KVPool) -> torch.Tensor:
        """``g`` of every row, ``[N, D]``; with ``layer_ids`` ``[N, row_width]``."""
        plan = plan_rows(self.backend, batch, table)
        angles = self.rotary.angles(batch.positions_N, self.dtype, end=batch.end)
        x_ND = self.embed(batch.input_ids_N)
        rows_NE: torch.Tensor | None = None
        if self.layer_ids:
            rows_NE = x_ND.new_empty(x_ND.shape[0], self.row_width)
        done, delta_ND = 0, None
        for number, stop in enumerate((*self.layer_ids, len(self.blocks)), start=1):
            delta_ND = run_rows(
                self.blocks[done:stop],
                x_ND,
                angles,
                backend=self.backend,
                plan=plan,
                pool=pool,
                first_layer=done,
            )
            if rows_NE is None or number > len(self.layer_ids):
                break
            if delta_ND is not None:
                x_ND.add_(delta_ND)
            rows_NE[:, number * self.width : (number + 1) * self.width] = x_ND
            done = stop
        g_ND = self.ops.add_rms_norm(x_ND, delta_ND, self.final_norm)
        if rows_NE is None:
            return g_ND
        rows_NE[:, : self.width] = g_ND
        return rows_NE

    @torch.inference_mode()
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """``[M, V]`` in the model's dtype. Callers select rows first: V is large."""
        if hidden_MD.shape[1] != self.width:
            hidden_MD = hidden_MD[:, : self.width].contiguous()
        return self.vocabulary.gather(self.lm_head(hidden_MD))

    @functools.cached_property
    def screened_head(self) -> ScreenedLinear | None:
        """``lm_head`` for drafts that ask for its best outputs alone, where that pays; made once,
        at the first draft that does.
        """
        return ScreenedLinear.of(self.lm_head) if self.group.world_size == 1 else None

    def _take_block(self, take: TensorSource, index: int) -> DecoderBlock:
        prefix = f"model.layers.{index}."

        def take_one(name: str) -> torch.Tensor:
            return take(prefix + name)

        take_local: TensorSource = take_one
        if isinstance(take, LinearSource):
            take_local = take.below(prefix)
        config, ops, make_linear = self.config, self.ops, self.make_linear
        share = share_layer(config, index, self.group, expert_parallel=self.expert_parallel)
        attention, mlp = sparse_parts(
            config.latent,
            config.experts if config.has_experts(index) else None,
            self.block_shape.num_heads,
            take_local,
            share.shapes,
            ops=ops,
            make_linear=make_linear,
            group=self.group,
        )
        return build_block(
            self.block_shape,
            take_local,
            share.shapes,
            ops=ops,
            make_linear=make_linear,
            group=self.group,
            plus_one_norms=self._plus_one,
            attention=attention,
            mlp=mlp,
        )


def check_layer_ids(layer_ids: Sequence[int], *, num_layers: int, field: str) -> None:
    """Raise ``ValueError`` unless these are k of ``S_k``: ascending, each once, from 1 to below
    ``num_layers`` (``S_0`` is the embedding, the last one is ``g`` before its norm).
    """
    is_ascending = all(a < b for a, b in pairwise(layer_ids))
    if not layer_ids or not is_ascending or layer_ids[0] < 1 or layer_ids[-1] >= num_layers:
        raise ValueError(
            f"{field}={list(layer_ids)}: name residual streams by the number of layers before "
            f"them, 1 to {num_layers - 1} with this target, ascending, each once"
        )
