"""The Medusa layout of vLLM's ``medusa`` model, whose names our head has from there.

Every block is one linear behind a row of the target, ``num_hidden_layers`` deep; vLLM makes as many
blocks as tokens are drafted, whatever ``num_heads`` says, and leaves those that no file fills as
they were made: K must not be above the number of blocks.

Choices that need a reason:

- no other key may have "num" and "heads" in its name: vLLM's configuration reads the last of them
  as ``num_heads``.
- over the target's frozen ``lm_head`` (``original_lm_head``) the directory holds a copy of it,
  because vLLM's draft model has no way to the target's.
- a draft vocabulary is ``token_map`` (ids) and ``truncated_vocab_size``; vLLM then cuts the rows
  out of the whole ``lm_head``. With ``lm_head``s of the head's own it has the whole vocabulary only.

Shape legend: V vocabulary, W draft vocabulary, H width.
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
from runtime.head_spec import DRAFT_VOCAB_NAME, HeadSpec, check_draft_ids

LM_HEAD_NAME = "lm_head.weight"
IDS_NAME = "token_map"
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
    carries_draft_vocab = True
    reserved_in_paths = METHODS_IN_PATHS
    copies: ClassVar[Mapping[str, str]] = MappingProxyType({LM_HEAD_NAME: TARGET_LM_HEAD})

    def copied(self, spec: HeadSpec) -> Mapping[str, str]:
        return {} if spec.own_lm_heads else self.copies

    def served_spec(self, spec: HeadSpec) -> HeadSpec:
        """A draft vocabulary that lists every token is none."""
        whole = spec.draft_vocab_size == spec.vocab_size
        return replace(spec, draft_vocab=None if whole else spec.draft_vocab)

    def tensor_shapes(self, spec: HeadSpec) -> dict[str, tuple[int, ...]]:
        shapes = self.served_spec(spec).tensor_shapes()
        if shapes.pop(DRAFT_VOCAB_NAME, None) is not None:
            shapes[IDS_NAME] = (spec.draft_vocab_size,)
        for name in self.copied(spec):
            shapes[name] = (spec.vocab_size, spec.hidden_size)
        return shapes

    def to_layout(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        written = host_tensors(tensors)
        ids_W = written.pop(DRAFT_VOCAB_NAME, None)
        if self.served_spec(spec).draft_vocab is not None:
            assert ids_W is not None, "a draft vocabulary without ids"
            written[IDS_NAME] = ids_W
        return written

    def from_layout(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        names = self.served_spec(spec).tensor_shapes()
        return {name: written[IDS_NAME if name == DRAFT_VOCAB_NAME else name] for name in names}

    def config(self, spec: HeadSpec, target: TargetFacts) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": spec.num_blocks,
            "num_hidden_layers": 1,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "truncated_vocab_size": spec.draft_vocab_size,
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
        if spec.own_lm_heads and self.served_spec(spec).draft_vocab is not None:
            raise ValueError(
                f"head draft_vocab.size={spec.draft_vocab_size}: vLLM's Medusa head has a list of "
                "draft ids over the target's lm_head only, this one has its own. Nearest: train "
                "with head.own_lm_heads=false"
            )

    def describe(self, spec: HeadSpec) -> str:
        listed = self.served_spec(spec).draft_vocab
        reads = "the copy of the target's `lm_head`"
        if spec.own_lm_heads:
            reads = "an `lm_head` of its own"
        ids = "" if listed is None else f", cut to the {listed.size} ids of `token_map`"
        return (
            f"Of its {spec.num_blocks} blocks, one per drafted token, each is read by {reads}{ids}; "
            f"`num_speculative_tokens` must not be above {spec.num_blocks}, or vLLM drafts "
            "with blocks that no file fills."
        )

    def check_values(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor], *, source: str
    ) -> None:
        if self.served_spec(spec).draft_vocab is not None:
            check_draft_ids(
                written[IDS_NAME],
                vocab_size=spec.vocab_size,
                source=f"{source}: tensor {IDS_NAME}",
            )
