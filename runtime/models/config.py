"""Architecture of a target, read once from a Hugging Face directory.

Only what the runtime computes is accepted: an unknown family, activation or rope type is refused by
name, never approximated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.head_spec import RopeSpec, YarnSpec
from runtime.layer_parts import PLAIN_LAYER, ExpertSpec, LatentSpec, LayerParts, layer_shapes
from runtime.models.families import FAMILIES, describe_refusal, describe_supported, read_traits
from runtime.models.fields import number, positive
from runtime.models.quantisation import Quantisation, read_quantisation
from runtime.rope import yarn_attention_factor

ROPE_KINDS = ("default", "llama3", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder-only model. Lengths in tokens, widths in elements.

    ``norm_form``: whether a norm's stored weight is the weight or, as in Gemma, what is added to
    one; of all norms, and ``w`` in every family so far. ``sliding_window`` as in
    :class:`runtime.models.families.Traits`. With ``latent`` the key/value heads and ``head_dim``
    are those of the plain layers that a head of such a target has.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope: RopeSpec
    norm_eps: float
    tie_word_embeddings: bool
    layer_parts: LayerParts = PLAIN_LAYER
    norm_form: Literal["w", "1+w"] = "w"
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    latent: LatentSpec | None = None  # None: grouped-query attention
    experts: ExpertSpec | None = None  # None: a dense MLP in every layer
    num_native_heads: int = 0  # MTP modules in the checkpoint: no part of the model, not read
    quantisation: Quantisation | None = None  # how the checkpoint stores linears

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Cached values per token and layer."""
        return 2 * self.kv_dim if self.latent is None else self.latent.cache_width

    @property
    def rotary_dim(self) -> int:
        """Rotated elements of a query or key head."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def native_prefixes(self) -> tuple[str, ...]:
        """What the names of each MTP module's tensors begin with."""
        return tuple(map(self.native_prefix, range(self.num_native_heads)))

    def native_prefix(self, number: int) -> str:
        """Of the module of that number, whether there is one or not."""
        if self.architecture == "MiMoForCausalLM":
            return f"model.mtp_layers.{number}."
        return f"model.layers.{self.num_layers + number}."

    @property
    def rounds_inputs(self) -> bool:
        """Whether any linear rounds what it reads."""
        return self.quantisation is not None and self.quantisation.rounds_inputs

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def block_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Tensors of one decoder layer, named without the layer prefix."""
        return layer_shapes(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            parts=self.layer_parts,
            inputs=self.hidden_size,
            latent=self.latent,
            experts=self.experts if self.has_experts(layer) else None,
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The strict tensor list of the checkpoint: name -> shape (``lm_head`` only if untied)."""
        width = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, width)}
        for index in range(self.num_layers):
            for name, shape in self.block_shapes(index).items():
                shapes[f"model.layers.{index}.{name}"] = shape
        shapes["model.norm.weight"] = (width,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, width)
        return shapes


def load_config(path: Path) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json``, if any) of a Hugging Face directory.

    Raises ``ValueError`` naming the file or field that is missing or not supported.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(
            f"target={path}: config.json is missing; expected a Hugging Face directory"
        )
    raw = _read_json(file)
    generation = path / "generation_config.json"
    return parse_config(
        raw, generation=_read_json(generation) if generation.is_file() else {}, source=str(file)
    )


def parse_config(
    raw: Mapping[str, Any], *, generation: Mapping[str, Any], source: str
) -> ModelConfig:
    """Validate a Hugging Face configuration. ``source`` is used in error messages."""
    architectures = raw.get("architectures") or []
    names = architectures if isinstance(architectures, list) else []
    architecture = next((name for name in names if name in FAMILIES), None)
    if architecture is None:
        raise ValueError(
            f"{source}: architectures={architectures!r}{describe_refusal(names)}; supported: "
            f"{describe_supported()}"
        )
    traits = read_traits(architecture, raw, source=source)
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"{source}: hidden_act={activation!r}; supported: 'silu'")
    hidden_size = positive(raw, "hidden_size", source)
    num_heads = positive(raw, "num_attention_heads", source)
    num_kv_heads = (
        positive(raw, "num_key_value_heads", source)
        if raw.get("num_key_value_heads") is not None
        else num_heads
    )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{source}: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    if traits.latent is None and raw.get("head_dim") is not None:
        head_dim = positive(raw, "head_dim", source)
    else:
        if hidden_size % num_heads:
            raise ValueError(
                f"{source}: hidden_size={hidden_size} is not a multiple of "
                f"num_attention_heads={num_heads} and head_dim is not given"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ValueError(f"{source}: head_dim={head_dim}; rotary embedding needs an even width")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=positive(raw, "intermediate_size", source),
        num_layers=positive(raw, "num_hidden_layers", source),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=positive(raw, "vocab_size", source),
        max_position_embeddings=positive(raw, "max_position_embeddings", source),
        rope=parse_rope(raw, source),
        norm_eps=number(raw, "rms_norm_eps", source),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        layer_parts=traits.layer_parts,
        sliding_window=traits.sliding_window,
        eos_token_ids=_eos_ids(raw, generation),
        latent=traits.latent,
        experts=traits.experts,
        num_native_heads=traits.num_native_heads,
        quantisation=read_quantisation(raw, source),
    )


def parse_rope(raw: Mapping[str, Any], source: str) -> RopeSpec:
    """Both schemas: ``rope_theta`` + ``rope_scaling``, and ``rope_parameters`` (transformers 5)."""
    parameters = raw.get("rope_parameters")
    scaling = raw.get("rope_scaling")
    field = "rope_parameters" if parameters is not None else "rope_scaling"
    values = parameters if parameters is not None else scaling
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{source}: {field}={values!r}; expected an object")
    if "rope_theta" in values:
        theta = number(values, "rope_theta", f"{source}: {field}")
    else:
        theta = number({"rope_theta": 10000.0, **raw}, "rope_theta", source)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"{source}: {field}.rope_type={kind!r}; supported: {', '.join(ROPE_KINDS)}"
        )
    partial = values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"{source}: partial_rotary_factor={partial!r}; supported: 1.0")
    if kind == "default":
        return RopeSpec(theta=theta)
    where = f"{source}: {field}"
    if kind == "yarn":
        return _parse_yarn(values, theta, where)
    return RopeSpec(
        theta=theta,
        kind="llama3",
        factor=number(values, "factor", where),
        low_freq_factor=number(values, "low_freq_factor", where),
        high_freq_factor=number(values, "high_freq_factor", where),
        original_max_position=positive(values, "original_max_position_embeddings", where),
    )


def _parse_yarn(values: Mapping[str, Any], theta: float, where: str) -> RopeSpec:
    """transformers' defaults where a key is missing or null."""
    stated = {key: value for key, value in values.items() if value is not None}
    optional = {
        key: number(stated, key, where)
        for key in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
        if key in stated
    }
    factor = number(values, "factor", where)
    derived = yarn_attention_factor(
        factor, mscale=optional.get("mscale"), mscale_all_dim=optional.get("mscale_all_dim")
    )
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=positive(values, "original_max_position_embeddings", where),
        yarn=YarnSpec(
            attention_factor=optional.get("attention_factor", derived),
            beta_fast=optional.get("beta_fast", 32.0),
            beta_slow=optional.get("beta_slow", 1.0),
            truncate=bool(stated.get("truncate", True)),
        ),
    )


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for values in (generation, raw):
        value = values.get("eos_token_id")
        if value is not None:
            ids.extend(value if isinstance(value, list) else [value])
    return tuple(dict.fromkeys(ids))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: expected an object, got {type(raw).__name__}")
    return raw
