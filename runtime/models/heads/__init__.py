"""Inference heads, one file per kind, and the registry that builds them from a ``HeadSpec``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from runtime.head_spec import HeadSpec
from runtime.models.heads.eagle import EagleHead
from runtime.models.heads.eagle3 import Eagle3Head
from runtime.models.heads.medusa import MedusaHead
from runtime.models.heads.mtp import MtpHead
from runtime.models.llama import LlamaModel

HEADS: Mapping[str, type[MtpHead]] = MappingProxyType(
    {"mtp": MtpHead, "eagle": EagleHead, "eagle3": Eagle3Head, "medusa": MedusaHead}
)


def build_head(
    spec: HeadSpec, tensors: Mapping[str, torch.Tensor], target_model: LlamaModel
) -> MtpHead:
    """The inference head for ``spec.kind`` over ``target_model``'s embedding and ``lm_head``.

    Raises ``ValueError`` for an unknown kind, a wrong tensor list, or shapes that do not fit the
    target.
    """
    if spec.kind not in HEADS:
        raise ValueError(f"head kind={spec.kind!r}; supported: {', '.join(HEADS)}")
    return HEADS[spec.kind](spec, tensors, target_model)
