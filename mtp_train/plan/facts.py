"""What a plan needs of a target, from its ``config.json`` alone: weights, K/V, the head's shape.

Counts more families than the runtime loads: a plan needs no weights. Facts of a few well-known
targets lie in ``known_targets.json``, as published in their ``config.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_train.config import HeadConfig
from mtp_train.heads.init import make_head_spec, unknown_draft_vocab
from runtime.head_spec import DRAFT_VOCAB_NAME, HeadSpec, RopeSpec
from runtime.layer_parts import PLAIN_LAYER, LayerParts, layer_shapes
from runtime.models.config import ModelConfig
from runtime.models.families import FAMILIES, read_traits

KNOWN_TARGETS = Path(__file__).with_name("known_targets.json")
_DENSE = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)
MODEL_TYPES = (*_DENSE, "deepseek_v2")


@dataclass(frozen=True)
class TargetFacts:
    """Sizes of one target. Weights are counts; ``kv_width`` is values per token and layer."""

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tie_word_embeddings: bool
    num_weights: int
    num_active_weights: int  # that one token passes through, both embeddings included
    kv_width: int
    head_inner: int  # MLP width of a head
    head_heads: int
    head_kv_heads: int
    head_dim: int
    layer_parts: LayerParts  # of the target's layers; a head follows them

    @property
    def is_runnable(self) -> bool:
        """Whether this build's runtime loads such a target."""
        return self.architecture in FAMILIES

    @property
    def num_embedding_weights(self) -> int:
        """Of the embedding and, where it is not the same tensor, ``lm_head``."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def head_kv_width(self) -> int:
        return 2 * self.head_kv_heads * self.head_dim


def known_targets() -> dict[str, dict[str, Any]]:
    """Published ``config.json`` facts by model name."""
    facts: dict[str, dict[str, Any]] = json.loads(KNOWN_TARGETS.read_text(encoding="utf-8"))
    return facts


def find_known(name: str) -> tuple[str, dict[str, Any]] | None:
    """The known target that ``name`` means: case, owner and ``-Instruct`` or ``-Chat`` aside."""
    wanted = name.rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-chat")
    for known, raw in known_targets().items():
        if known.lower() == wanted:
            return known, raw
    return None


def parse_facts(raw: Mapping[str, Any], *, name: str, source: str) -> TargetFacts:
    """Facts of a Hugging Face configuration.

    Raises ``ValueError`` naming ``source`` and the field that is missing or not known.
    """
    family = raw.get("model_type")
    if family not in MODEL_TYPES:
        raise ValueError(
            f"{source}: model_type={family!r}; a plan can be made for {', '.join(MODEL_TYPES)}"
        )
    if raw.get("quantization_config") is not None:
        raise ValueError(
            f"{source}: quantization_config is set; plans are for unquantised targets only"
        )
    width, heads = _whole(raw, "hidden_size", source), _whole(raw, "num_attention_heads", source)
    kv_heads = _whole(raw, "num_key_value_heads", source, default=heads)
    head_dim = _whole(raw, "head_dim", source, default=width // heads)
    layers, vocab = _whole(raw, "num_hidden_layers", source), _whole(raw, "vocab_size", source)
    inner = _whole(raw, "intermediate_size", source)
    tied = bool(raw.get("tie_word_embeddings", False))
    parts = PLAIN_LAYER
    if family == "deepseek_v2":
        blocks, active_blocks, kv_width = _deepseek_blocks(raw, source)
    else:
        parts = read_traits(_DENSE[family], raw, source=source).layer_parts
        layer = layer_shapes(
            hidden_size=width,
            intermediate_size=inner,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            parts=parts,
            inputs=width,
        )
        blocks = active_blocks = layers * _count(layer)
        kv_width = 2 * kv_heads * head_dim
    outside = vocab * width * (1 if tied else 2) + width
    architectures = raw.get("architectures") or [f"{family} without architectures"]
    return TargetFacts(
        name=name,
        architecture=str(architectures[0]),
        hidden_size=width,
        num_layers=layers,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        num_weights=blocks + outside,
        num_active_weights=active_blocks + outside,
        kv_width=kv_width,
        head_inner=inner,
        head_heads=heads,
        head_kv_heads=kv_heads,
        head_dim=head_dim,
        layer_parts=parts,
    )


def read_facts(path: Path) -> TargetFacts:
    """Facts of a ``config.json`` or of the directory that it lies in."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"target.path={path}: {file} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: expected an object, got {type(raw).__name__}")
    return parse_facts(raw, name=file.parent.name, source=str(file))


def plan_head_spec(facts: TargetFacts, head: HeadConfig) -> HeadSpec:
    """The head that would be trained for such a target: decoder layers of its width and kind.

    A target with latent attention or experts gets a head with as many ordinary heads and its dense
    MLP. Rotary settings and the ids of a draft vocabulary do not matter to sizes. Raises
    ``ValueError`` as :func:`make_head_spec` does.
    """
    shape = ModelConfig(
        architecture=facts.architecture,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.head_inner,
        num_layers=facts.num_layers,
        num_heads=facts.head_heads,
        num_kv_heads=facts.head_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        max_position_embeddings=131072,
        rope=RopeSpec(theta=10000.0),
        norm_eps=1e-5,
        tie_word_embeddings=facts.tie_word_embeddings,
        layer_parts=facts.layer_parts,
    )
    return make_head_spec(
        head, shape, fingerprint="", draft_vocab=unknown_draft_vocab(head.draft_vocab_size)
    )


def count_weights(spec: HeadSpec) -> int:
    """Parameters; the list of a draft vocabulary holds none."""
    shapes = spec.tensor_shapes()
    return _count({name: shape for name, shape in shapes.items() if name != DRAFT_VOCAB_NAME})


def _deepseek_blocks(raw: Mapping[str, Any], source: str) -> tuple[int, int, int]:
    """Weights of all layers, those that a token passes through, and K/V values per layer.

    Latent attention and experts as in transformers' ``deepseek_v2``.
    """
    width, heads = _whole(raw, "hidden_size", source), _whole(raw, "num_attention_heads", source)
    latent, rope = _whole(raw, "kv_lora_rank", source), _whole(raw, "qk_rope_head_dim", source)
    nope, value = _whole(raw, "qk_nope_head_dim", source), _whole(raw, "v_head_dim", source)
    q_dim = heads * (nope + rope)
    q_latent = raw.get("q_lora_rank")
    query = width * q_dim if q_latent is None else width * q_latent + q_latent * (1 + q_dim)
    attention = query + width * (latent + rope) + latent
    attention += latent * heads * (nope + value) + heads * value * width
    expert = 3 * width * _whole(raw, "moe_intermediate_size", source)
    routed, shared = _whole(raw, "n_routed_experts", source), raw.get("n_shared_experts") or 0
    chosen, router = _whole(raw, "num_experts_per_tok", source), routed * width
    layers, dense = _whole(raw, "num_hidden_layers", source), raw.get("first_k_dense_replace") or 0
    every = _whole(raw, "moe_layer_freq", source, default=1)
    with_experts = sum(1 for i in range(layers) if i >= dense and i % every == 0)
    plain = layers * (attention + 2 * width)
    plain += (layers - with_experts) * 3 * width * _whole(raw, "intermediate_size", source)
    return (
        plain + with_experts * (router + (routed + shared) * expert),
        plain + with_experts * (router + (chosen + shared) * expert),
        latent + rope,
    )


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _whole(raw: Mapping[str, Any], name: str, source: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: {name}={value!r}; expected a positive integer")
    return value
