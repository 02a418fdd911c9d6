"""The differentiable head of EAGLE-3 (arXiv:2503.01840): the training twin of
``runtime.models.heads.eagle3``.

``x = fc(S_k, ...)`` -> one decoder layer whose query, key and value read
``[input_layernorm(e); hidden_norm(x)]`` -> final norm -> an ``lm_head`` of its own. Step k >= 1 of
the unroll (the paper's training-time test) takes the state that step k - 1 recycled in the place of
``x``, as decoding does.

Shape legend: S packed rows, N query rows of one step, D model width, E = len(layer_ids) * D, V
vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from mtp_train.heads.mtp import Cache, DecoderLayer, MtpHead, RMSNorm
from mtp_train.packing import HeadBatch
from mtp_train.rows import take_rows
from runtime.head_spec import DRAFT_VOCAB_NAME, HeadSpec, check_head_tensors


class _Layer(DecoderLayer):
    def __init__(self, spec: HeadSpec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype, inputs=2 * spec.hidden_size, has_input_norm=True)
        self.hidden_norm = _norm(spec, spec.hidden_size, dtype)


def _norm(spec: HeadSpec, width: int, dtype: torch.dtype) -> RMSNorm:
    return RMSNorm(width, eps=spec.norm_eps, one_plus=spec.norm_form == "1+w", dtype=dtype)


class Eagle3Head(MtpHead):
    """As :class:`MtpHead`, over ``batch.hidden_SD`` of the residual streams, ``[S, E]``.

    The states are normed, for the head's own ``lm_head``; that is left to the caller, who computes
    the loss in chunks. The draft vocabulary's ids are a buffer.
    """

    draft_vocab_ids: torch.Tensor

    def _make_inputs(self, dtype: torch.dtype) -> None:
        spec, width = self.spec, self.spec.hidden_size
        count = len(spec.layer_ids)
        if spec.fusion_norm == "each":
            self.fc_norm = nn.ModuleList([_norm(spec, width, dtype) for _ in range(count)])
        if spec.fusion_norm == "joined":
            self.input_norm = _norm(spec, count * width, dtype)
        self.fc = nn.Linear(count * width, width, bias=False, dtype=dtype)
        self.layers = nn.ModuleList([_Layer(spec, dtype)])
        self.lm_head = nn.Linear(width, spec.draft_vocab_size, bias=False, dtype=dtype)
        if spec.draft_vocab is not None:
            ids_W = torch.zeros(spec.draft_vocab.size, dtype=torch.int64)
            self.register_buffer(DRAFT_VOCAB_NAME, ids_W)

    def forward(
        self,
        batch: HeadBatch,
        embedding_VD: torch.Tensor,
        draft_lm_head_VD: torch.Tensor | None = None,
        *,
        with_lm_head: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """The states of ``len(batch.steps)`` steps. ``with_lm_head`` adds a copy of the
        ``lm_head``'s weight ``[W, D]`` behind them, through which its gradient flows: the loss lies
        outside of this module, and ZeRO 3 shows a parameter to its own module only.
        """
        assert draft_lm_head_VD is None, "a head with an lm_head of its own drafts with that"
        layer, cache = cast(_Layer, self.layers[0]), Cache()
        positions_S = batch.positions_S
        fused_SD = self._fuse(batch.hidden_SD)
        x_SD, joined_S2D = self._join(layer, batch.next_ids_S, fused_SD, embedding_VD)
        cache.k_SGC, cache.v_SGC = self._keys_values(layer, joined_S2D, positions_S, batch.layout)
        states: list[torch.Tensor] = []
        recycled = fused_SD
        for number, step in enumerate(batch.steps):
            positions_N = positions_S[step.rows_N] + number
            if number == 0:
                x_ND, joined_N2D = (take_rows(t, step.rows_N) for t in (x_SD, joined_S2D))
            else:
                x_ND, joined_N2D = self._join(
                    layer, step.ids_N, take_rows(recycled, step.parent_N), embedding_VD
                )
                k_NGC, v_NGC = self._keys_values(layer, joined_N2D, positions_N, step.layout)
                cache.extend(step.chain_parent_N, k_NGC, v_NGC)
            x_ND = self._block(layer, x_ND, joined_N2D, positions_N, step, cache)
            normed_ND = self.norm(x_ND)
            states.append(normed_ND)
            recycled = normed_ND if self.spec.recycle == "post_norm" else x_ND
        if with_lm_head:
            states.append(self.lm_head.weight.clone())
        return tuple(states)

    def export_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {name: t.detach() for name, t in self.state_dict().items()}
        check_head_tensors(self.spec, tensors, source="training head")
        return tensors

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().load_tensors(tensors)
        if self.spec.draft_vocab is not None:
            self.draft_vocab_ids.copy_(tensors[DRAFT_VOCAB_NAME])

    def _fuse(self, streams_SE: torch.Tensor) -> torch.Tensor:
        if self.spec.fusion_norm == "each":
            parts = streams_SE.tensor_split(len(self.fc_norm), dim=1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            streams_SE = torch.cat(normed, dim=1)
        if self.spec.fusion_norm == "joined":
            streams_SE = self.input_norm(streams_SE)
        out: torch.Tensor = self.fc(streams_SE)
        return out

    def _join(
        self,
        layer: _Layer,
        ids_N: torch.Tensor,
        x_ND: torch.Tensor,
        embedding_VD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream, and what query, key and value read, ``[N, 2 D]``."""
        e_ND = F.embedding(ids_N, embedding_VD).to(x_ND.dtype)
        normed_ND = layer.hidden_norm(x_ND)
        joined_N2D = torch.cat((layer.input_layernorm(e_ND), normed_ND), dim=-1)
        return (normed_ND if self.spec.residual == "normed" else x_ND), joined_N2D
