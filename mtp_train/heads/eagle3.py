"""The differentiable head of EAGLE-3 (arXiv:2503.01840): the training twin of
``runtime.models.heads.eagle3``.

``x = fc(S_k, ...)`` -> one decoder layer whose query, key and value read
``[input_layernorm(e); hidden_norm(x)]`` -> final norm -> an ``lm_head`` of its own. Step k >= 1 of
the unroll (the paper's training-time test) takes the state that step k - 1 recycled in the place of
``x``, as decoding does.

An embedding of the head's own is read, never trained, as the target's is.

Shape legend: S packed rows, N query rows of one step, D width of the head, E = len(layer_ids) *
target_width, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from mtp_train.heads.mtp import DecoderLayer, MtpHead
from mtp_train.heads.parts import RMSNorm
from mtp_train.packing import HeadBatch
from runtime.head_spec import DRAFT_VOCAB_NAME, HeadSpec


class _Layer(DecoderLayer):
    def __init__(self, spec: HeadSpec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype, inputs=2 * spec.hidden_size, has_input_norm=True)
        self.hidden_norm = _norm(spec, spec.hidden_size, dtype)


class _Embedding(nn.Module):
    """A buffer under the name of its tensor."""

    weight: torch.Tensor

    def __init__(self, spec: HeadSpec, dtype: torch.dtype) -> None:
        super().__init__()
        weight_VD = torch.zeros(spec.vocab_size, spec.hidden_size, dtype=dtype)
        self.register_buffer("weight", weight_VD)


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
        if spec.embedding == "own":
            self.embed_tokens = _Embedding(spec, dtype)
        if spec.fusion_norm == "each":
            norms = [_norm(spec, spec.target_width, dtype) for _ in spec.layer_ids]
            self.fc_norm = nn.ModuleList(norms)
        if spec.fusion_norm == "joined":
            self.input_norm = _norm(spec, spec.input_size, dtype)
        self.fc = nn.Linear(spec.input_size, width, bias=False, dtype=dtype)
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
        """``with_lm_head`` adds a copy of the ``lm_head``'s weight ``[W, D]`` behind the states,
        through which its gradient flows: the loss lies outside of this module, and ZeRO 3 shows a
        parameter to its own module only.
        """
        assert draft_lm_head_VD is None, "a head with an lm_head of its own drafts with that"
        states = super().forward(batch, embedding_VD)
        return (*states, self.lm_head.weight.clone()) if with_lm_head else states

    def _read(self, hidden_SI: torch.Tensor) -> torch.Tensor:
        """``fc`` of the residual streams."""
        if self.spec.fusion_norm == "each":
            parts = hidden_SI.tensor_split(len(self.fc_norm), dim=1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden_SI = torch.cat(normed, dim=1)
        if self.spec.fusion_norm == "joined":
            hidden_SI = self.input_norm(hidden_SI)
        out: torch.Tensor = self.fc(hidden_SI)
        return out

    def _enter(
        self,
        ids_N: torch.Tensor,
        hidden_ND: torch.Tensor,
        positions_N: torch.Tensor,
        embedding_VD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = cast(_Layer, self.layers[0])
        if self.spec.embedding == "own":
            embedding_VD = self.embed_tokens.weight
        e_ND = F.embedding(ids_N, embedding_VD).to(hidden_ND.dtype)
        normed_ND = layer.hidden_norm(hidden_ND)
        joined_N2D = torch.cat((layer.input_layernorm(e_ND), normed_ND), dim=-1)
        return (normed_ND if self.spec.residual == "normed" else hidden_ND), joined_N2D
