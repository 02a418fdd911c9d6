"""What a layout has to say about itself, and what several have in common.

A layout is a contract: every tensor with its name and shape, every key of ``config.json`` with its
value. The writer is held to it and the reader reads by it; what a head has and a layout cannot say
is refused, with what would be nearest.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch

from mtp_train.config import ExportFormat
from runtime.head_spec import HeadSpec, RopeSpec

TARGET_EMBEDDING = "model.embed_tokens.weight"
TARGET_LM_HEAD = "lm_head.weight"
# vLLM takes the drafting method from these wherever they stand in the path, unless it is told one
# of EAGLE's.
METHODS_IN_PATHS = ("eagle-", "eagle3", "dflash", "dspark")

# What engines compute for an MTP head, whatever they call its tensors.
MTP_CARRIED: Mapping[str, Any] = MappingProxyType(
    {
        "num_layers": 1,
        "block": "llama",
        "hidden_source": "g",
        "norm_form": "w",
        "logits_from": "post_norm",
        "recycle": "post_norm",
        "residual": "standard",
        "first_embedding_mask": True,
        "projection_bias": False,
        "position_offset": 0,
        "embedding": "target",
        "lm_head": "target",
    }
)

HeadKind = Literal["mtp", "eagle", "eagle3", "medusa"]
Matches = Callable[[torch.Tensor], bool]

_CARRIED_BY: Mapping[HeadKind, str] = MappingProxyType(
    {
        "mtp": "export.format=mimo is the layout of MTP heads, deepseek that of DeepSeek targets",
        "eagle": "export.format=eagle (vLLM) and eagle_sglang are the layouts of EAGLE-1",
        "eagle3": "export.format=eagle3 (vLLM, SGLang) and speculators are the layouts of EAGLE-3",
        "medusa": "export.format=medusa (vLLM) is the layout of Medusa heads",
    }
)


@dataclass(frozen=True)
class TargetFacts:
    """What a configuration says of the target that the head's own contract does not hold.

    ``name`` is where it lay when the head was exported.
    """

    num_layers: int
    dtype: str
    name: str


class Layout(ABC):
    """One export format. Stateless; ``engines`` are those whose loader reads it."""

    name: ClassVar[ExportFormat]
    title: ClassVar[str]
    kind: ClassVar[HeadKind]  # the heads that it is for
    holds: ClassVar[str]  # what it is, said to somebody whose head is another kind
    engines: ClassVar[tuple[str, ...]]  # of "vllm", "sglang"
    sglang_algorithm: ClassVar[str]
    carries_draft_vocab: ClassVar[bool]
    reserved_in_paths: ClassVar[tuple[str, ...]]  # by which vLLM would read another method
    copies: Mapping[str, str]  # layout's name -> the target's tensor that it is a copy of

    def at(self, num_target_layers: int) -> Layout:
        """This layout for a target of so many layers, where names follow from that."""
        del num_target_layers
        return self

    @abstractmethod
    def served_spec(self, spec: HeadSpec) -> HeadSpec:
        """The head as an engine computes it from this layout."""

    @abstractmethod
    def tensor_shapes(self, spec: HeadSpec) -> dict[str, tuple[int, ...]]:
        """The strict tensor list of the directory: name -> shape."""

    @abstractmethod
    def to_layout(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Tensors of the directory but ``copies``, from native ones: their own dtypes, contiguous,
        on the host. Call :meth:`refuse_uncarried` first.
        """

    @abstractmethod
    def from_layout(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Native tensors of :meth:`served_spec`; no weight is permuted, only renamed."""

    @abstractmethod
    def config(self, spec: HeadSpec, target: TargetFacts) -> dict[str, Any]:
        """The content of ``config.json``: these keys, these values and no others."""

    @abstractmethod
    def refuse_fields(self, spec: HeadSpec) -> None:
        """Raise ``ValueError`` naming the field of a head of ``kind`` that is not carried, with the
        nearest that is.
        """

    @abstractmethod
    def describe(self, spec: HeadSpec) -> str:
        """What the directory holds beside a decoder layer, in a sentence or two."""

    def copied(self, spec: HeadSpec) -> Mapping[str, str]:
        """What of ``copies`` the directory of such a head holds."""
        del spec
        return self.copies

    def check_values(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor], *, source: str
    ) -> None:
        """Raise ``ValueError`` naming a tensor whose values this layout fixes and that has others.

        The tensors have their names and shapes already.
        """
        del spec, written, source

    def explain_change(self, name: str, tensor: torch.Tensor, matches: Matches) -> str:
        """What was done to a tensor, if that is a mistake which is known; else empty.

        ``matches`` says whether values are those that were written.
        """
        del name, tensor, matches
        return ""

    def drops_draft_vocab(self, spec: HeadSpec) -> bool:
        """Whether the directory drafts from more tokens than the head was trained for."""
        return spec.draft_vocab is not None and not self.carries_draft_vocab

    def refuse_uncarried(self, spec: HeadSpec, *, drop_draft_vocab: bool) -> None:
        """Raise ``ValueError`` naming the field of the head that this layout cannot carry."""
        if spec.kind != self.kind:
            raise ValueError(
                f"head kind={spec.kind}: the {self.name} layout {self.holds}; "
                f"{_CARRIED_BY[spec.kind]}"
            )
        self.refuse_fields(spec)
        if self.drops_draft_vocab(spec) and not drop_draft_vocab:
            assert spec.draft_vocab is not None
            raise ValueError(
                f"head draft_vocab.size={spec.draft_vocab.size}: engines that read the {self.name} "
                "layout use the target's whole lm_head; export.draft_vocab=drop leaves the list "
                "out, and then acceptance has to be measured again"
            )

    def refuse_path(self, directory: Path) -> None:
        """Raise ``ValueError`` for a path in which vLLM would read another drafting method."""
        path = str(directory.absolute()).lower()
        for part in self.reserved_in_paths:
            if part in path:
                raise ValueError(
                    f"export directory {directory.absolute()}: vLLM takes a path with {part!r} in "
                    "it for a head of another kind; choose another run.name or run.root "
                    "(validate.head names the head)"
                )


def refuse_differing(spec: HeadSpec, carried: Mapping[str, Any], *, layout: str) -> None:
    """Raise ``ValueError`` naming the first field that is not what engines compute."""
    for field, wanted in carried.items():
        value = getattr(spec, field)
        if value != wanted:
            raise ValueError(
                f"head {field}={json.dumps(value)}: engines that read the {layout} layout compute "
                f"{field}={json.dumps(wanted)}, whatever the files say"
            )


def swap_halves(weight: torch.Tensor) -> torch.Tensor:
    """``[H, 2H]`` with its column halves exchanged."""
    left, right = weight.chunk(2, dim=1)
    return torch.cat((right, left), dim=1)


def sizes_and_rope(spec: HeadSpec, *, dtype: str) -> dict[str, Any]:
    """Keys that every layout has: sizes, norms, dtype in both notations, RoPE in both.

    Nothing is left to an engine's defaults. ``tie_word_embeddings`` is false wherever the target
    ties: SGLang leaves an ``lm_head`` unloaded when told that it is tied.
    """
    config: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        "rope_theta": spec.rope.theta,
        "rope_parameters": {"rope_theta": spec.rope.theta, "rope_type": spec.rope.kind},
    }
    scaling = _rope_scaling(spec.rope)
    if scaling:
        config["rope_scaling"] = scaling
        config["rope_parameters"] = {"rope_theta": spec.rope.theta, **scaling}
    return config


def _rope_scaling(rope: RopeSpec) -> dict[str, Any]:
    """The scaling in Hugging Face's names, nothing left to an engine's defaults; {} without one."""
    if rope.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    if rope.yarn is not None:
        return {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
            "attention_factor": rope.yarn.attention_factor,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
            "truncate": rope.yarn.truncate,
        }
    return {}


def check_config(found: Mapping[str, Any], expected: Mapping[str, Any], *, source: str) -> None:
    """Raise ``ValueError`` naming the first key that is missing, wrong or unknown."""
    for key, value in expected.items():
        if key not in found:
            raise ValueError(f"{source}: {key} is missing; expected {json.dumps(value)}")
        if json.dumps(found[key], sort_keys=True) != json.dumps(value, sort_keys=True):
            raise ValueError(
                f"{source}: {key}={json.dumps(found[key])}, expected {json.dumps(value)}"
            )
    for key in found:
        if key not in expected:
            raise ValueError(f"{source}: {key}={json.dumps(found[key])} does not belong here")


def host_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Detached, on the host, contiguous."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
