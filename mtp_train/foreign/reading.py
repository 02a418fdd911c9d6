"""What a format's reader says of a directory, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtp_train.config import ForeignConfig
from mtp_train.foreign.contract import Contract
from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.findings import Finding, OpenChoice
from mtp_train.foreign.sizes import Sizes, TargetShape, describe_quantisation, describe_rope
from runtime.head_spec import HeadSpec


@dataclass(frozen=True)
class Given:
    """What is known beside the directory. Without a target some questions stay open."""

    target: TargetShape | None
    choices: ForeignConfig


@dataclass(frozen=True)
class Copy:
    """A tensor of the directory that ought to be the target's: ``target_name`` there.

    ``may_be_own``: the head's kind can have an embedding of its own in its place.
    """

    name: str
    target_name: str
    may_be_own: bool = False


@dataclass(frozen=True)
class Reading:
    """``spec``: the head as one of our kinds, without the target's fingerprint; ``None`` where
    ``why_not`` says that it is none or cannot be told. ``contract`` is ``None`` where sizes are
    missing. ``facts``: what the head expects, in words.
    """

    contract: Contract | None = None
    spec: HeadSpec | None = None
    why_not: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()
    open_choices: tuple[OpenChoice, ...] = ()
    copies: tuple[Copy, ...] = ()
    reads_width: int = 0  # of one hidden state of the target; 0 = unknown
    sizes: Sizes | None = None


class FormatReader(ABC):
    """One format. Stateless."""

    @abstractmethod
    def read(self, files: HeadFiles, given: Given) -> Reading:
        """Names, shapes and keys only, and the values of the few tensors that decide something."""

    def native_tensors(
        self, spec: HeadSpec, files: HeadFiles, given: Given
    ) -> dict[str, torch.Tensor]:
        """Under native names, of a directory without differences from its contract.

        Only for formats that can be read.
        """
        raise NotImplementedError(f"{type(self).__name__} reads no weights")


def layer_block(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The object that holds the decoder layer's keys, and what stands in front of their names."""
    for name in ("transformer_layer_config", "text_config"):
        block = config.get(name)
        if isinstance(block, Mapping):
            return block, f"{name}."
    return config, ""


def common_facts(files: HeadFiles, sizes: Sizes) -> list[tuple[str, str]]:
    """What every decoder layer expects."""
    dtypes = sorted({header.dtype for header in files.headers.values()})
    scope = describe_quantisation(files.config)
    return [
        ("width", f"{sizes.hidden_size}, MLP {sizes.intermediate_size}"),
        ("attention", f"{sizes.num_heads} query and {sizes.num_kv_heads} key/value heads"),
        ("head_dim", str(sizes.head_dim)),
        ("vocabulary", str(sizes.vocab_size)),
        ("RoPE", describe_rope(sizes)),
        ("max_position_embeddings", str(sizes.max_position_embeddings)),
        ("norm eps", f"{sizes.norm_eps:g}"),
        ("dtype", f"{sizes.dtype or 'not stated'}; tensors {', '.join(dtypes) or 'none'}"),
        ("quantisation", scope or "none of its own"),
    ]


def describe_attention_bias(names: Mapping[str, object], prefix: str) -> bool:
    """Whether query, key or value of the layer have biases."""
    return any(f"{prefix}self_attn.{part}_proj.bias" in names for part in "qkv")


def renamed(names: Mapping[str, str], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """``tensors`` under the names that ``names`` gives them; others keep theirs."""
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def join_reasons(*reasons: tuple[bool, str]) -> str:
    """Those that hold, in a line; empty where none does."""
    return "; ".join(text for holds, text in reasons if holds)
