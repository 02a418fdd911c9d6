"""The Medusa layout of vLLM's ``medusa`` model, whose names our head has from there.

Every block is one linear behind a row of the target, ``num_hidden_layers`` deep; vLLM makes as many
blocks as tokens are drafted, whatever ``num_heads`` says, and leaves those that no file fills as
they were made: K must not be above the number of blocks.

Choices that need a reason:

- no other key may have "num" and "heads" in its name: vLLM's configuration reads the last of them
  as ``num_heads``.
- over the target's frozen ``lm_head`` (``original_lm_head``) the directory holds a copy of it,
  because vLLM's draft model has no way to the target's.
- there is no draft vocabulary: vLLM 0.32.0 has ``token_map`` for one, and refuses a directory that
  holds it ("weights were not initialized from checkpoint").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from mtp_train.config import ExportFormat
from mtp_train.export.layouts.base import (
    METHODS_IN_PATHS,
    TARGET_LM_HEAD,
    Layout,
    TargetFacts,
    host_tensors,
    refuse_differing,
)
from runtime.head_spec import DRAFT_VOCAB_NAME, HeadSpec

LM_HEAD_NAME = "lm_head.weight"
# MEDUSA_FIELDS of runtime.head_spec fixes the others.
_CARRIED: Mapping[str, Any] = MappingProxyType({"block": "llama", "embedding": "target"})


class MedusaLayout(Layout):
    """For vLLM."""

    name: ClassVar[ExportFormat] = "medusa"
    title = "Medusa"
    kind = "medusa"
    holds = "is residual blocks behind one state of the target"
    engines: ClassVar[tuple[str, ...]] = ("vllm",)
    sglang_algorithm = ""
    carries_draft_vocab = False
    reserved_in_paths = METHODS_IN_PATHS
    copies: Mapping[str, str] = MappingProxyType({LM_HEAD_NAME: TARGET_LM_HEAD})

    def copied(self, spec: HeadSpec) -> Mapping[str, str]:
        return {} if spec.own_lm_heads else self.copies

    def served_spec(self, spec: HeadSpec) -> HeadSpec:
        """The whole vocabulary."""
        return replace(spec, draft_vocab=None)

    def tensor_shapes(self, spec: HeadSpec) -> dict[str, tuple[int, ...]]:
        shapes = self.served_spec(spec).tensor_shapes()
        for name in self.copied(spec):
            shapes[name] = (spec.vocab_size, spec.hidden_size)
        return shapes

    def to_layout(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return host_tensors({n: t for n, t in tensors.items() if n != DRAFT_VOCAB_NAME})

    def from_layout(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {name: written[name] for name in self.served_spec(spec).tensor_shapes()}

    def config(self, spec: HeadSpec, target: TargetFacts) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": spec.num_blocks,
            "num_hidden_layers": 1,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "truncated_vocab_size": spec.vocab_size,
            "max_position_embeddings": spec.max_position_embeddings,
            "medusa_fc_bias": spec.projection_bias,
            "original_lm_head": not spec.own_lm_heads,
            "logit_scale": 1.0,
            "tie_word_embeddings": False,
            "torch_dtype": target.dtype,
            "dtype": target.dtype,
        }

    def refuse_fields(self, spec: HeadSpec) -> None:
        refuse_differing(spec, _CARRIED, layout=self.name)
        if spec.own_lm_heads and spec.draft_vocab is not None:
            raise ValueError(
                f"head draft_vocab.size={spec.draft_vocab_size}: its own lm_heads have no rows for "
                "other tokens, and vLLM's Medusa head drafts from all of them"
            )

    def describe(self, spec: HeadSpec) -> str:
        reads = (
            "an `lm_head` of its own" if spec.own_lm_heads else "a copy of the target's `lm_head`"
        )
        return (
            f"Of its {spec.num_blocks} blocks, one per drafted token, each is read by {reads}; "
            f"`num_speculative_tokens` must not be above {spec.num_blocks}, or vLLM drafts with "
            "blocks that no file fills."
        )
