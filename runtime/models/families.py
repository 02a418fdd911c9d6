"""The families of targets that the runtime computes, by the name in ``architectures``.

They are one decoder (:class:`runtime.models.llama.LlamaModel`); a family says which biases and
norms its layers have, which attention and MLP, and how its configuration states them. Defaults of
keys that are left out are those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from runtime.layer_parts import PLAIN_LAYER, ExpertSpec, LatentSpec, LayerParts
from runtime.models.fields import count, flag, only
from runtime.models.sparse import (
    read_deepseek_v2_experts,
    read_deepseek_v3_experts,
    read_latent,
    read_qwen3_experts,
)

_LINEAR_ATTENTION = ("Qwen3Next", "Qwen3_5", "Qwen3_6")  # what such names begin with


@dataclass(frozen=True)
class Traits:
    """What a family's configuration says beyond sizes. ``sliding_window``: the most tokens that a
    row attends to, itself included; ``None`` without a limit. ``latent``, ``experts`` and
    ``num_native_heads`` as in :class:`runtime.models.config.ModelConfig`.
    """

    layer_parts: LayerParts
    sliding_window: int | None = None
    latent: LatentSpec | None = None
    experts: ExpertSpec | None = None
    num_native_heads: int = 0


@dataclass(frozen=True)
class Family:
    """``members``: for messages. ``stated``: keys that ``config.json`` must have, because
    transformers' default for them is a number that does not follow from the others.
    """

    members: str
    read: Callable[[Mapping[str, Any], str], Traits]
    stated: tuple[str, ...] = ()


def read_traits(architecture: str, raw: Mapping[str, Any], *, source: str) -> Traits:
    """Of a configuration of one of :data:`FAMILIES`. Raises ``ValueError`` naming the field that is
    missing or asks for something that is not computed.
    """
    family = FAMILIES[architecture]
    for name in family.stated:
        if name not in raw:
            raise ValueError(f"{source}: {name} is missing; {architecture} has to state it")
    return family.read(raw, source)


def describe_refusal(architectures: Sequence[Any]) -> str:
    """Why one of these is known and not computed, for messages; else empty."""
    for name in architectures:
        if str(name).startswith(_LINEAR_ATTENTION):
            return (
                " (most of its layers are linear attention, which is not computed here; its mtp.* "
                "weights can be read, described and written back: mtp_train.native.qwen)"
            )
    return ""


def describe_supported() -> str:
    """The table in one line, for messages."""
    return ", ".join(f"{name} ({family.members})" for name, family in FAMILIES.items())


def _read_llama(raw: Mapping[str, Any], source: str) -> Traits:
    bias = flag(raw, "attention_bias", source)
    return Traits(LayerParts(qkv_bias=bias, out_bias=bias, mlp_bias=flag(raw, "mlp_bias", source)))


def _read_mistral(raw: Mapping[str, Any], source: str) -> Traits:
    window = raw.get("sliding_window", 4096)
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(
            f"{source}: sliding_window={window!r}; expected a positive integer or null"
        )
    return Traits(PLAIN_LAYER, sliding_window=window)


def _read_qwen2(raw: Mapping[str, Any], source: str) -> Traits:
    _refuse_windows(raw, source)
    return Traits(LayerParts(qkv_bias=True))


def _read_mimo(raw: Mapping[str, Any], source: str) -> Traits:
    """MiMo (arXiv:2505.07608) is Qwen2's decoder, and has an MTP module beside it."""
    only(raw, "use_mrope", source, supported=False)
    traits = _read_qwen2(raw, source)
    return replace(traits, num_native_heads=count(raw, "num_nextn_predict_layers", source))


def _read_qwen3(raw: Mapping[str, Any], source: str) -> Traits:
    _refuse_windows(raw, source)
    bias = flag(raw, "attention_bias", source)
    return Traits(LayerParts(qkv_bias=bias, out_bias=bias, qk_norm=True))


def _read_qwen3_moe(raw: Mapping[str, Any], source: str) -> Traits:
    return replace(_read_qwen3(raw, source), experts=read_qwen3_experts(raw, source))


def _read_deepseek_v2(raw: Mapping[str, Any], source: str) -> Traits:
    only(raw, "mlp_bias", source, supported=False)
    return Traits(
        PLAIN_LAYER,
        latent=read_latent(raw, source),
        experts=read_deepseek_v2_experts(raw, source),
        num_native_heads=count(raw, "num_nextn_predict_layers", source),
    )


def _read_deepseek_v3(raw: Mapping[str, Any], source: str) -> Traits:
    return Traits(
        PLAIN_LAYER,
        latent=read_latent(raw, source),
        experts=read_deepseek_v3_experts(raw, source),
        num_native_heads=count(raw, "num_nextn_predict_layers", source),
    )


def _refuse_windows(raw: Mapping[str, Any], source: str) -> None:
    """Qwen's windows are of some layers only."""
    if flag(raw, "use_sliding_window", source):
        raise ValueError(
            f"{source}: use_sliding_window=true; supported: false (all layers attend to all tokens)"
        )
    kinds = raw.get("layer_types")
    if kinds is not None and any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"{source}: layer_types={kinds!r}; supported: 'full_attention' only")
    if raw.get("dual_chunk_attention_config") is not None:
        raise ValueError(
            f"{source}: dual_chunk_attention_config is set; supported: attention without chunks. "
            "Without the key a model of this kind is right up to its chunk_size tokens"
        )


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family("Llama 2 to 3.3 and their kind", _read_llama),
        "MistralForCausalLM": Family("Mistral", _read_mistral, stated=("num_key_value_heads",)),
        "Qwen2ForCausalLM": Family("Qwen2, Qwen2.5", _read_qwen2, stated=("num_key_value_heads",)),
        "MiMoForCausalLM": Family("MiMo", _read_mimo, stated=("num_key_value_heads",)),
        "Qwen3ForCausalLM": Family(
            "Qwen3, dense", _read_qwen3, stated=("num_key_value_heads", "head_dim")
        ),
        "Qwen3MoeForCausalLM": Family(
            "Qwen3, experts", _read_qwen3_moe, stated=("num_key_value_heads", "head_dim")
        ),
        "DeepseekV2ForCausalLM": Family(
            "DeepSeek-V2 and V2-Lite",
            _read_deepseek_v2,
            stated=("q_lora_rank", "n_shared_experts", "first_k_dense_replace"),
        ),
        "DeepseekV3ForCausalLM": Family(
            "DeepSeek-V3 and R1",
            _read_deepseek_v3,
            stated=("q_lora_rank", "n_shared_experts", "first_k_dense_replace"),
        ),
    }
)
