"""Differentiable heads, one file per kind, and the registry that builds them from a spec."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from mtp_train.attention import BLOCKWISE, TrainingAttention
from mtp_train.heads.base import TrainingHead
from mtp_train.heads.eagle import EagleHead
from mtp_train.heads.eagle3 import Eagle3Head
from mtp_train.heads.medusa import MedusaHead
from mtp_train.heads.mtp import MtpHead
from mtp_train.sequence_parallel import ALONE, HeadExchange
from runtime.head_spec import HeadSpec

DECODER_HEADS: Mapping[str, type[MtpHead]] = MappingProxyType(
    {"mtp": MtpHead, "eagle": EagleHead, "eagle3": Eagle3Head}
)


def build_training_head(
    spec: HeadSpec,
    *,
    dtype: torch.dtype,
    attention: TrainingAttention = BLOCKWISE,
    activation_checkpointing: bool = False,
    exchange: HeadExchange = ALONE,
    compiled: bool = False,
) -> TrainingHead:
    """The differentiable head for ``spec.kind``, not yet initialised (``heads.init``).

    A Medusa head has neither attention nor anything worth computing twice, or compiling:
    ``compiled`` is for the others (:meth:`MtpHead.compile_parts`). Raises ``ValueError``
    for an unknown kind.
    """
    if spec.kind == "medusa":
        return MedusaHead(spec, dtype=dtype)
    if spec.kind not in DECODER_HEADS:
        supported = ", ".join((*DECODER_HEADS, "medusa"))
        raise ValueError(f"head kind={spec.kind!r}; supported: {supported}")
    head = DECODER_HEADS[spec.kind](
        spec,
        dtype=dtype,
        attention=attention,
        activation_checkpointing=activation_checkpointing,
        exchange=exchange,
    )
    if compiled:
        head.compile_parts()
    return head
