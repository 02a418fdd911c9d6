"""EAGLE-1, in two layouts, because vLLM and SGLang contradict each other about one tensor.

Both compute ``fc([e; g])``, one decoder layer without its first norm, and the target's ``lm_head``;
the state is recycled as it is. vLLM's ``fc`` has no bias and refuses a file that has one; SGLang's
has one, and what no file fills is left as it was made. Neither may hold an ``lm_head``: vLLM has no
such parameter and drafts with the target's. The embedding is a copy of the target's, for vLLM under
pipeline parallelism; else engines use the target's own.

Not written: ``bias``, which SGLang would read as that of the attention.

Shape legend: V vocabulary, H width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from mtp_train.export.layouts.base import (
    TARGET_EMBEDDING,
    Layout,
    Matches,
    TargetFacts,
    host_tensors,
    refuse_differing,
    sizes_and_rope,
    swap_halves,
)
from runtime.head_spec import DRAFT_VOCAB_NAME, HeadSpec

EMBEDDING_NAME = "embed_tokens.weight"
PROJECTION_NAME = "fc.weight"
BIAS_NAME = "fc.bias"
_RENAMED: Mapping[str, str] = MappingProxyType(
    {"eh_proj.weight": PROJECTION_NAME, "eh_proj.bias": BIAS_NAME}
)
# EAGLE_FIELDS of runtime.head_spec fixes the others.
_CARRIED: Mapping[str, Any] = MappingProxyType(
    {"block": "llama", "norm_form": "w", "embedding": "target", "lm_head": "target"}
)


class _EagleLayout(Layout):
    kind = "eagle"
    holds = "is one decoder layer behind a projection, with a single norm"
    sglang_algorithm = "EAGLE"
    carries_draft_vocab = False
    reserved_in_paths = ("eagle3", "dflash", "dspark")
    copies = MappingProxyType({EMBEDDING_NAME: TARGET_EMBEDDING})
    architecture: ClassVar[str]

    def served_spec(self, spec: HeadSpec) -> HeadSpec:
        """The whole vocabulary."""
        return replace(spec, draft_vocab=None)

    def tensor_shapes(self, spec: HeadSpec) -> dict[str, tuple[int, ...]]:
        native = self.served_spec(spec).tensor_shapes()
        shapes = {_RENAMED.get(name, name): shape for name, shape in native.items()}
        return shapes | {EMBEDDING_NAME: (spec.vocab_size, spec.hidden_size)}

    def to_layout(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        native = host_tensors({n: t for n, t in tensors.items() if n != DRAFT_VOCAB_NAME})
        return {_RENAMED.get(name, name): tensor for name, tensor in native.items()}

    def from_layout(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        native = self.served_spec(spec).tensor_shapes()
        return {name: written[_RENAMED.get(name, name)] for name in native}

    def config(self, spec: HeadSpec, target: TargetFacts) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            "num_hidden_layers": spec.num_layers,
            "attention_bias": False,
            "mlp_bias": False,
            **sizes_and_rope(spec, dtype=target.dtype),
        }

    def refuse_fields(self, spec: HeadSpec) -> None:
        refuse_differing(spec, _CARRIED, layout=self.name)

    def describe(self, spec: HeadSpec) -> str:
        return (
            "The embedding is a copy of the target's; engines use the target's `lm_head`, which is "
            "not in it."
        )

    def explain_change(self, name: str, tensor: torch.Tensor, matches: Matches) -> str:
        if name == PROJECTION_NAME and matches(swap_halves(tensor)):
            return "has its column halves exchanged: the embedding comes first in this layout"
        return ""


class EagleVllmLayout(_EagleLayout):
    """No bias of ``fc``."""

    name = "eagle"
    title = "EAGLE-1 (vLLM)"
    engines = ("vllm",)
    architecture = "LlamaForCausalLM"

    def refuse_fields(self, spec: HeadSpec) -> None:
        if spec.projection_bias:
            raise ValueError(
                "head projection_bias=true: fc of vLLM's EAGLE-1 head has no bias. Nearest: "
                "export.format=eagle_sglang, whose fc has one, or train with "
                "head.projection_bias=false"
            )
        super().refuse_fields(spec)


class EagleSglangLayout(_EagleLayout):
    """``fc.bias`` is the head's, or zeros."""

    name = "eagle_sglang"
    title = "EAGLE-1 (SGLang)"
    engines = ("sglang",)
    architecture = "LlamaForCausalLMEagle"

    def tensor_shapes(self, spec: HeadSpec) -> dict[str, tuple[int, ...]]:
        return super().tensor_shapes(spec) | {BIAS_NAME: (spec.hidden_size,)}

    def to_layout(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        written = super().to_layout(spec, tensors)
        zeros = torch.zeros(spec.hidden_size, dtype=written[PROJECTION_NAME].dtype)
        return {BIAS_NAME: zeros} | written

    def check_values(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor], *, source: str
    ) -> None:
        if not spec.projection_bias and bool(written[BIAS_NAME].any()):
            raise ValueError(f"{source}: tensor {BIAS_NAME} is not zero; the head has no bias")
