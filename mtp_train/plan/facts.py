"""What a plan needs of a target, from its ``config.json`` alone: weights, K/V, the head's shape.

Facts of a few well-known
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
from mtp_train.heads.init import follows_target, make_head_spec, unknown_draft_vocab
from runtime.head_spec import DRAFT_VOCAB_NAME, HeadSpec, RopeSpec
from runtime.layer_parts import ExpertSpec, LatentSpec, LayerParts
from runtime.models.config import ModelConfig
from runtime.models.families import FAMILIES, read_traits
from runtime.models.quantisation import read_quantisation
from runtime.stored_weight import scale_shape

KNOWN_TARGETS = Path(__file__).with_name("known_targets.json")
_FAMILIES = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
    }
)
MODEL_TYPES = tuple(_FAMILIES)


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
    latent: LatentSpec | None = None  # the same
    experts: ExpertSpec | None = None
    quantisation: str = ""  # how the checkpoint stores its linears; empty: plainly
    num_stored_weights: int = 0  # of one byte each
    num_scales: int = 0  # of four bytes each, beside them
    multiplies_int8: bool = False  # int8 inputs meet int8 weights in all of its quantised linears

    @property
    def is_runnable(self) -> bool:
        """Whether this build's runtime loads such a target."""
        return self.architecture in FAMILIES

    def weight_bytes(self, width: int, *, stored: bool) -> float:
        """Of all weights in a dtype of ``width`` bytes; ``stored``: quantised ones as they are."""
        if not stored:
            return float(self.num_weights * width)
        plain = self.num_weights - self.num_stored_weights
        return float(plain * width + self.num_stored_weights + 4 * self.num_scales)

    @property
    def num_embedding_weights(self) -> int:
        """Of the embedding and, where it is not the same tensor, ``lm_head``."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    def head_kv_width(self, head: HeadConfig) -> int:
        """Of a head that follows the target's layers, or of a plain one."""
        if self.latent is not None and follows_target(head):
            return self.latent.cache_width
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
    model = _read_shape(raw, architecture=_FAMILIES[family], source=source)
    num_weights = _count(model.tensor_shapes())
    num_stored, num_scales = _count_stored(model)
    architectures = raw.get("architectures") or [f"{family} without architectures"]
    return TargetFacts(
        name=name,
        architecture=str(architectures[0]),
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        vocab_size=model.vocab_size,
        tie_word_embeddings=model.tie_word_embeddings,
        num_weights=num_weights,
        num_active_weights=num_weights - _count_idle(model),
        kv_width=model.kv_width,
        head_inner=model.intermediate_size,
        head_heads=model.num_heads,
        head_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        layer_parts=model.layer_parts,
        latent=model.latent,
        experts=model.experts,
        quantisation=model.quantisation.label if model.quantisation else "",
        num_stored_weights=num_stored,
        num_scales=num_scales,
        multiplies_int8=model.quantisation is not None and model.quantisation.multiplies_int8,
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

    Rotary settings and the ids of a draft vocabulary do not matter to sizes. Raises
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
        latent=facts.latent,
        experts=facts.experts,
    )
    return make_head_spec(
        head, shape, fingerprint="", draft_vocab=unknown_draft_vocab(head.draft_vocab_size)
    )


def count_weights(spec: HeadSpec) -> int:
    """Parameters; the list of a draft vocabulary holds none."""
    shapes = spec.tensor_shapes()
    return _count({name: shape for name, shape in shapes.items() if name != DRAFT_VOCAB_NAME})


def _read_shape(raw: Mapping[str, Any], *, architecture: str, source: str) -> ModelConfig:
    """Sizes of the target; what does not matter to them is made up."""
    traits = read_traits(architecture, raw, source=source)
    width, heads = _whole(raw, "hidden_size", source), _whole(raw, "num_attention_heads", source)
    has_latent = traits.latent is not None  # head_dim is then of its rotated part
    return ModelConfig(
        architecture=architecture,
        hidden_size=width,
        intermediate_size=_whole(raw, "intermediate_size", source),
        num_layers=_whole(raw, "num_hidden_layers", source),
        num_heads=heads,
        num_kv_heads=_whole(raw, "num_key_value_heads", source, default=heads),
        head_dim=width // heads
        if has_latent
        else _whole(raw, "head_dim", source, default=width // heads),
        vocab_size=_whole(raw, "vocab_size", source),
        max_position_embeddings=131072,
        rope=RopeSpec(theta=10000.0),
        norm_eps=1e-5,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        layer_parts=traits.layer_parts,
        latent=traits.latent,
        experts=traits.experts,
        quantisation=read_quantisation(raw, source),
    )


def _count_stored(model: ModelConfig) -> tuple[int, int]:
    """Weights that are stored in one byte, and their scales.

    Of checkpoints that do not list theirs (``quant_method=fp8``): all linears but routers and
    ``lm_head``, as they are published.
    """
    weights, scales, quantisation = 0, 0, model.quantisation
    if quantisation is None:
        return weights, scales
    for name, shape in model.tensor_shapes().items():
        scheme = quantisation.scheme_of(name) if len(shape) == 2 else None
        is_plain = name == "lm_head.weight" or name.endswith("mlp.gate.weight")
        if scheme is None or (quantisation.by_stored_dtype and is_plain):
            continue
        weights += math.prod(shape)
        scales += math.prod(scale_shape(shape, scheme.weights.block_of(shape)))
    return weights, scales


def _count_idle(model: ModelConfig) -> int:
    """Weights of the experts that one token does not pass."""
    experts = model.experts
    if experts is None:
        return 0
    layers = sum(map(model.has_experts, range(model.num_layers)))
    idle = experts.num_experts - experts.num_chosen
    return layers * idle * 3 * model.hidden_size * experts.inner


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _whole(raw: Mapping[str, Any], name: str, source: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: {name}={value!r}; expected a positive integer")
    return value
