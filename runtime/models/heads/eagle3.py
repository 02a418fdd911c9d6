"""The head of EAGLE-3 (Li et al. 2025, arXiv:2503.01840): residual streams ``S_k`` of the target
are fused to ``x = fc(S_k, ...)``; query, key and value of one decoder layer read
``[input_layernorm(e); hidden_norm(x)]``, its residual stream is ``x`` (or ``hidden_norm(x)``); then
final norm and an ``lm_head`` of the head's own, over its draft vocabulary.

Row ``i`` takes the target's row ``i`` (``g`` and behind it the streams, of which it reads the
latter) and the already shifted id ``t_{i+1}``. On recycled rows ``x`` is the state that the head
returned itself; the two are told apart by their width, ``row_width`` against ``D``.

Shape legend: N rows, D width of the head, E = len(layer_ids) * target_width, V vocabulary.
"""

from __future__ import annotations

import torch

from runtime.batch import ForwardBatch
from runtime.head_spec import EMBEDDING_NAME
from runtime.kv_cache import KVPool, SlotTable
from runtime.linear import TensorSource
from runtime.models.heads.mtp import MtpHead
from runtime.models.llama import check_layer_ids
from runtime.ops import NormWeight


class Eagle3Head(MtpHead):
    """Shares the target's embedding, or has its own. With a draft vocabulary column ``j`` of the
    logits is token ``draft_vocab_ids[j]``.
    """

    def _take_inputs(self, take: TensorSource) -> None:
        spec = self.spec
        check_layer_ids(
            spec.layer_ids, num_layers=self._target.config.num_layers, field="head layer_ids"
        )
        self.layer_ids = spec.layer_ids
        self.own_embedding: torch.Tensor | None = None
        if spec.embedding == "own":
            self.own_embedding = self._target.vocabulary.shard.cut(take(EMBEDDING_NAME))
        self.fusion_norms: tuple[NormWeight, ...] = ()
        if spec.fusion_norm == "each":
            names = [f"fc_norm.{index}.weight" for index in range(len(spec.layer_ids))]
            self.fusion_norms = tuple(self._take_norm(take, name) for name in names)
        if spec.fusion_norm == "joined":
            self.fusion_norms = (self._take_norm(take, "input_norm.weight"),)
        self._take_projection(take("fc.weight"))
        self.stream_norm = self._take_norm(take, "layers.0.hidden_norm.weight")

    def _take_lm_head(self, take: TensorSource) -> None:
        self._own_lm_head(take("lm_head.weight"))

    @property
    def row_width(self) -> int:
        """Of the target's rows: ``g`` and the streams behind it."""
        return self.spec.target_width * (1 + len(self.layer_ids))

    def _embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        if self.own_embedding is None:
            return self._target.embed(ids_N)
        return self._target.vocabulary.lookup(self.own_embedding, ids_N)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, table: SlotTable, pool: KVPool) -> torch.Tensor:
        """The recycled state ``[N, D]``, un-normed unless ``spec.recycle`` is post-norm.

        ``batch.hidden_ND`` is ``[N, row_width]`` of the target or ``[N, D]`` of the head itself.
        """
        assert batch.hidden_ND is not None, "an EAGLE-3 head needs batch.hidden_ND"
        backend, ops = self._target.backend, self._target.ops
        (block,) = self.blocks
        assert block.input_norm is not None, "EAGLE-3 norms the embedding"
        plan = backend.plan_once(batch, table)
        x_ND = self._stream(batch.hidden_ND.to(self.dtype))
        embedding_ND = ops.add_rms_norm(self._embed(batch.input_ids_N), None, block.input_norm)
        normed_ND = ops.add_rms_norm(x_ND, None, self.stream_norm)
        joined = torch.cat((embedding_ND, normed_ND), dim=-1)
        if self.spec.residual == "normed":
            x_ND = normed_ND
        delta_ND = block.behind_first_norm(
            x_ND,
            joined,
            self.rotary.angles(batch.positions_N, self.dtype, end=batch.end),
            backend=backend,
            plan=plan,
            pool=pool,
            layer=0,
        )
        return self._recycled(x_ND, delta_ND)

    def _stream(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """``x``, in memory of its own: the block adds to it in place."""
        if hidden_ND.shape[1] == self.width:
            return hidden_ND.clone(memory_format=torch.contiguous_format)
        assert hidden_ND.shape[1] == self.row_width, (
            f"rows of {hidden_ND.shape[1]} columns: a target with layer_ids={self.layer_ids} gives "
            f"{self.row_width}"
        )
        streams_NE = hidden_ND[:, self.spec.target_width :]
        if self.fusion_norms:
            parts = streams_NE.tensor_split(len(self.fusion_norms), dim=1)
            streams_NE = torch.cat(
                [
                    self._target.ops.add_rms_norm(part.contiguous(), None, norm)
                    for part, norm in zip(parts, self.fusion_norms, strict=True)
                ],
                dim=1,
            )
        return self._project(streams_NE)
