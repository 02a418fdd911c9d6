"""The MTP head: ``eh_proj([enorm(e); hnorm(h)])`` → one decoder layer or two → final norm → the
target's ``lm_head``. Norms may be missing.

Row ``i`` of a batch takes hidden state ``g_i`` (``batch.hidden_ND``) and the *already shifted* id
``t_{i+1}`` (``batch.input_ids_N``) at position ``i``, and predicts ``t_{i+2}``. Everything that
differs between serving engines (concatenation order, norms, mask of the first embedding, what is
recycled) is read from the ``HeadSpec``.

Shape legend: N rows, M selected rows, D model width, V vocabulary, W draft vocabulary (V without
one).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from runtime.attention.base import AttentionBackend
from runtime.batch import ForwardBatch
from runtime.halves import plan_rows, run_rows
from runtime.head_spec import DRAFT_VOCAB_NAME, HeadSpec, check_head_tensors, layer_prefix
from runtime.kv_cache import KVPool, SlotTable
from runtime.layer_parts import CORRECTION_BIAS
from runtime.layers import (
    BlockShape,
    DecoderBlock,
    RotaryEmbedding,
    build_block,
    norm_weight,
)
from runtime.linear import Linear, TensorSource
from runtime.models.base import DraftModel
from runtime.models.llama import LlamaModel
from runtime.models.sparse_parts import check_backend, sparse_parts, why_not_recorded
from runtime.ops import NormWeight
from runtime.parallel_layers import RowParallelLinear, vocabulary_of
from runtime.screened_linear import ScreenedLinear
from runtime.sharding import portion_shard, share_block


class MtpHead(DraftModel):
    """Shares embedding, ``lm_head`` (packed as it is), dtype, device, backend and ranks with the
    target; ``tensors`` are whole on every rank.

    With a draft vocabulary ``logits`` has ``W`` columns; column ``j`` is token
    ``draft_vocab_ids[j]``. Its rows of the target's head are copied (``W * D`` elements).
    """

    backend: AttentionBackend

    def __init__(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor], target: LlamaModel
    ) -> None:
        check_head_tensors(spec, tensors, source=f"head {spec.kind}")
        _check_fits(spec, target)
        self.spec = spec
        self.group = target.group
        self.device = target.device
        self.dtype = target.dtype
        self.backend = target.backend
        self.vocab_size = target.vocab_size
        self.width = spec.hidden_size
        self.draft_vocab_size = spec.draft_vocab_size
        self._target = target

        self.not_recorded = why_not_recorded(spec.latent, spec.experts)

        def take(name: str) -> torch.Tensor:
            own = torch.float32 if name.endswith(CORRECTION_BIAS) else self.dtype
            return tensors[name].detach().to(device=self.device, dtype=own)

        self._take_inputs(take)
        self.final_norm = self._take_norm(take, "norm.weight") if spec.norms.final else None
        self.rotary = RotaryEmbedding(spec.rope, spec.rotary_dim, device=self.device)
        self.blocks = [
            _make_block(spec, take, target, prefix=layer_prefix(index))
            for index in range(spec.num_layers)
        ]
        self.draft_vocab_ids: torch.Tensor | None = None
        if spec.draft_vocab is not None:
            self.draft_vocab_ids = tensors[DRAFT_VOCAB_NAME].to(self.device)
        self._take_lm_head(take)

    def _take_inputs(self, take: TensorSource) -> None:
        """What comes before the decoder layers."""
        spec = self.spec
        norms = spec.norms
        self.embedding_norm = self._take_norm(take, "enorm.weight") if norms.enorm else None
        self.hidden_norm = self._take_norm(take, "hnorm.weight") if norms.hnorm else None
        self._take_projection(take("eh_proj.weight"))
        self.projection_bias = take("eh_proj.bias") if spec.projection_bias else None

    def _take_projection(self, weight_DI: torch.Tensor) -> None:
        """This rank's part of the linear that joins the inputs, cut by these."""
        self._joined_shard = portion_shard(1, weight_DI.shape[1], self.group)
        own = self._target.make_linear(self._joined_shard.cut(weight_DI), None)
        self.projection = RowParallelLinear(own, self.group)

    def _project(self, joined_NI: torch.Tensor) -> torch.Tensor:
        start, stop = self._joined_shard.runs[0]
        return self.projection(joined_NI[:, start:stop].contiguous())

    def _take_norm(self, take: TensorSource, name: str) -> NormWeight:
        plus_one = self.spec.norm_form == "1+w"
        return norm_weight(take(name), eps=self.spec.norm_eps, plus_one=plus_one)

    def _take_lm_head(self, take: TensorSource) -> None:
        target = self._target
        self.vocabulary, self.lm_head = target.vocabulary, target.lm_head
        if self.draft_vocab_ids is not None:
            self._own_lm_head(target.head_rows(self.draft_vocab_ids))

    def _own_lm_head(self, rows_WD: torch.Tensor) -> None:
        self.vocabulary = vocabulary_of(len(rows_WD), self.group)
        self.lm_head = self._target.make_linear(self.vocabulary.shard.cut(rows_WD), None)

    def new_pool(self, num_slots: int) -> KVPool:
        latent = self.spec.latent
        return KVPool(
            num_layers=len(self.blocks),
            num_slots=num_slots,
            num_kv_heads=1 if latent else self.blocks[0].shape.num_kv_heads,
            head_dim=latent.cache_width if latent else self.spec.head_dim,
            dtype=self.dtype,
            device=self.device,
            has_values=latent is None,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, table: SlotTable, pool: KVPool) -> torch.Tensor:
        """The recycled state ``[N, D]``: post- or pre-final-norm as ``spec.recycle`` says.

        Feed it back as ``hidden_ND`` of the next step, or give rows of it to :meth:`logits`.
        """
        assert batch.hidden_ND is not None, "an MTP head needs batch.hidden_ND"
        backend, ops = self._target.backend, self._target.ops
        plan = plan_rows(backend, batch, table)
        embedding_ND = self._target.embed(batch.input_ids_N)
        if self.spec.first_embedding_mask and batch.may_hold_first:
            is_first = (batch.positions_N == 0)[:, None]
            embedding_ND = embedding_ND.masked_fill_(is_first, 0.0)
        hidden_ND = batch.hidden_ND.to(self.dtype).contiguous()
        if self.embedding_norm is not None:
            embedding_ND = ops.add_rms_norm(embedding_ND, None, self.embedding_norm)
        if self.hidden_norm is not None:
            hidden_ND = ops.add_rms_norm(hidden_ND, None, self.hidden_norm)
        if self.spec.concat == "embedding_hidden":
            joined = torch.cat((embedding_ND, hidden_ND), dim=-1)
        else:
            joined = torch.cat((hidden_ND, embedding_ND), dim=-1)
        positions_N = batch.positions_N
        if self.spec.position_offset:
            positions_N = positions_N + self.spec.position_offset
        x_ND = self._project(joined)
        if self.projection_bias is not None:  # whole on every rank: added to the sum, once
            x_ND.add_(self.projection_bias)
        angles = self.rotary.angles(
            positions_N, self.dtype, end=batch.end + self.spec.position_offset
        )
        delta_ND = run_rows(self.blocks, x_ND, angles, backend=backend, plan=plan, pool=pool)
        return self._recycled(x_ND, delta_ND)

    def _recycled(self, x_ND: torch.Tensor, delta_ND: torch.Tensor | None) -> torch.Tensor:
        if self.spec.recycle == "post_norm" and self.final_norm is not None:
            return self._target.ops.add_rms_norm(x_ND, delta_ND, self.final_norm)
        return x_ND if delta_ND is None else x_ND.add_(delta_ND)

    @torch.inference_mode()
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """``[M, W]`` of rows that ``forward`` returned."""
        lm_head = self.lm_head_of(hidden_MD)
        return self.vocabulary.gather(lm_head(self.state_for_logits(hidden_MD)))

    def lm_head_of(self, hidden_MD: torch.Tensor) -> Linear:
        """What reads such rows of ``forward``."""
        del hidden_MD
        return self.lm_head

    @functools.cached_property
    def _screened(self) -> ScreenedLinear | None:
        if self.lm_head is self._target.lm_head:
            return self._target.screened_head
        return ScreenedLinear.of(self.lm_head) if self.group.world_size == 1 else None

    def _screen_of(self, hidden_MD: torch.Tensor) -> ScreenedLinear | None:
        del hidden_MD
        return self._screened

    def argmax(self, logits_MV: torch.Tensor) -> torch.Tensor:
        return self._target.argmax(logits_MV)

    @torch.inference_mode()
    def best_columns(self, hidden_MD: torch.Tensor, count: int) -> torch.Tensor:
        pays = ScreenedLinear.pays(len(hidden_MD), count)
        screened = self._screen_of(hidden_MD) if pays else None
        if screened is None:
            return super().best_columns(hidden_MD, count)
        return screened.best(self.state_for_logits(hidden_MD), count)

    def state_for_logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """What ``lm_head`` reads, from rows that ``forward`` returned.

        A state recycled pre-norm is normed here when ``spec.logits_from`` is post-norm.
        """
        is_normed = self.spec.recycle == "post_norm"
        if self.final_norm is None or is_normed or self.spec.logits_from == "pre_norm":
            return hidden_MD
        return self._target.ops.add_rms_norm(hidden_MD.contiguous(), None, self.final_norm)


def _make_block(
    spec: HeadSpec, take: TensorSource, target: LlamaModel, *, prefix: str
) -> DecoderBlock:
    """This rank's part of one decoder layer."""
    shapes = spec.tensor_shapes()
    share = share_block(
        {name.removeprefix(prefix): s for name, s in shapes.items() if name.startswith(prefix)},
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        group=target.group,
        latent=spec.latent,
        expert_parallel=target.expert_parallel and spec.experts is not None,
    )

    def take_share(name: str) -> torch.Tensor:
        whole = take(prefix + name)
        return share.shards[name].cut(whole) if name in share.shards else whole

    attention, mlp = sparse_parts(
        spec.latent,
        spec.experts,
        len(share.heads.query),
        take_share,
        share.shapes,
        ops=target.ops,
        make_linear=target.make_linear,
        group=target.group,
    )
    return build_block(
        BlockShape(
            num_heads=len(share.heads.query),
            num_kv_heads=len(share.heads.kv),
            head_dim=spec.head_dim,
            norm_eps=spec.norm_eps,
        ),
        take_share,
        share.shapes,
        ops=target.ops,
        make_linear=target.make_linear,
        group=target.group,
        plus_one_norms=spec.norm_form == "1+w",
        attention=attention,
        mlp=mlp,
    )


def _check_fits(spec: HeadSpec, target: LlamaModel) -> None:
    config = target.config
    for name, ours, theirs in (
        ("target_hidden_size", spec.target_width, config.hidden_size),
        ("vocab_size", spec.vocab_size, config.vocab_size),
    ):
        if ours != theirs:
            raise ValueError(f"head {name}={ours}: the target has {theirs}")
    check_backend(target.backend, spec.latent, f"a head of kind {spec.kind}")
    if spec.recycle == "post_norm" and spec.logits_from == "pre_norm" and spec.norms.final:
        raise ValueError(
            "head recycle=post_norm with logits_from=pre_norm: logits cannot be computed from the "
            "state that is recycled; use recycle=pre_norm or logits_from=post_norm"
        )
    if spec.draft_vocab is not None and spec.draft_vocab.size > config.vocab_size:
        raise ValueError(
            f"head draft_vocab.size={spec.draft_vocab.size}: the target has {config.vocab_size} ids"
        )
