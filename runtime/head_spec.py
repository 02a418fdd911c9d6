"""The weights contract of a draft head: read by the trainer's twin and by the inference head alike.

``HeadSpec`` is versioned, strict JSON and the only thing that writes a native ``config.json``. The
native directory is ``config.json`` + ``model.safetensors`` (embedding and ``lm_head`` are the
target's, never stored, but for EAGLE-3, which has its own ``lm_head`` and may have its own
embedding, and Medusa, which may have an ``lm_head`` per block).

Alignment, stated once: row ``i`` takes the target's hidden state ``g_i`` (EAGLE-3: residual streams
``S_k`` of row ``i``) and the embedding of token ``t_{i+1}``, sits at rotary position ``i``, stores
K/V at slot ``i``, predicts ``t_{i+2}`` (and ``g_{i+1}``, where the head is trained to). Block ``k``
of Medusa takes ``g_i`` alone and predicts ``t_{i+2+k}``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from runtime.files import replace_atomic, write_atomic
from runtime.layer_parts import PLAIN_LAYER, ExpertSpec, LatentSpec, LayerParts, layer_shapes

SPEC_VERSION = 4  # 2: projection_bias; 3: EAGLE-3; 4: Medusa
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
DRAFT_VOCAB_NAME = "draft_vocab_ids"
EMBEDDING_NAME = "embed_tokens.weight"  # of a head with an embedding of its own


@dataclass(frozen=True)
class YarnSpec:
    """What only ``yarn`` has; ``attention_factor`` is resolved, whatever it was derived from."""

    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class RopeSpec:
    """RoPE parameters, named as in transformers. ``llama3`` uses the four fields behind ``kind``,
    ``yarn`` uses ``factor``, ``original_max_position`` and ``yarn``.
    """

    theta: float
    kind: Literal["default", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    yarn: YarnSpec | None = None

    def __post_init__(self) -> None:
        if (self.kind == "yarn") != (self.yarn is not None):
            raise ValueError(f"rope kind={self.kind!r} with yarn={self.yarn}: one needs the other")


@dataclass(frozen=True)
class NormPlacement:
    """Which RMSNorms exist."""

    enorm: bool = True
    hnorm: bool = True
    input: bool = True
    post_attention: bool = True
    final: bool = True


EAGLE_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "norms": NormPlacement(enorm=False, hnorm=False, input=False, final=False),
        "concat": "embedding_hidden",
        "recycle": "pre_norm",
        "logits_from": "pre_norm",
        "first_embedding_mask": False,
        "position_offset": 0,
        "num_layers": 1,
        "layer_parts": PLAIN_LAYER,
    }
)
"""What ``kind=eagle`` means; its projection may have a bias or none."""


EAGLE3_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "norms": NormPlacement(input=False),
        "concat": "embedding_hidden",
        "logits_from": "post_norm",
        "first_embedding_mask": False,
        "projection_bias": False,
        "position_offset": 0,
        "num_layers": 1,
        "norm_form": "w",
        "hidden_source": "layers",
        "lm_head": "own",
        "layer_parts": PLAIN_LAYER,
    }
)
"""What ``kind=eagle3`` means. Open: ``layer_ids``, ``fusion_norm``, ``residual``, ``recycle``, the
draft vocabulary, ``target_hidden_size`` and ``embedding``. ``enorm`` is
``layers.0.input_layernorm``, ``hnorm`` ``layers.0.hidden_norm``.
"""

MEDUSA_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "norms": NormPlacement(
            enorm=False, hnorm=False, input=False, post_attention=False, final=False
        ),
        "concat": "embedding_hidden",
        "recycle": "pre_norm",
        "logits_from": "pre_norm",
        "first_embedding_mask": False,
        "position_offset": 0,
        "num_layers": 0,
        "norm_form": "w",
        "layer_parts": PLAIN_LAYER,
    }
)
"""What ``kind=medusa`` means. Open: ``num_blocks``, ``projection_bias`` (of every block's linear),
``lm_head`` (the target's frozen one, or one of its own per block) and the draft vocabulary.
"""


_ADDED: Mapping[int, Mapping[str, Any]] = MappingProxyType(
    {
        2: {"projection_bias": False},
        3: {"layer_ids": [], "fusion_norm": "none"},
        4: {"num_blocks": 0},
    }
)
"""Fields that a version brought, with what every head of an older one meant."""


@dataclass(frozen=True)
class DraftVocab:
    """A reduced draft vocabulary; its ids are tensor ``draft_vocab_ids``, int64, strictly
    ascending. They are ids, not offsets.
    """

    size: int
    coverage: float  # share of answer tokens of the training set whose id is in the list
    ids_sha256: str


@dataclass(frozen=True)
class HeadSpec:
    """Everything a runtime must know to compute what the trainer computed.

    ``mtp`` leaves the choices open; ``eagle`` is the head of EAGLE-1 (Li et al. 2024,
    arXiv:2401.15077) as published: no norms but the one before the MLP, states recycled as they
    are. ``eagle3`` is that of EAGLE-3 (Li et al. 2025, arXiv:2503.01840): ``x = fc(S_k, ...)``, one
    decoder layer whose query, key and value read ``[input_layernorm(e); hidden_norm(x)]``, and an
    ``lm_head`` of its own. On recycled rows ``x`` is the head's own state. ``medusa`` is Medusa-1
    (Cai et al. 2024, arXiv:2401.10774): block ``k`` drafts from ``g + SiLU(W_k g + b_k)``, without
    embedding, attention or K/V, through the target's frozen ``lm_head`` or one of its own per
    block.
    """

    kind: Literal["mtp", "eagle", "eagle3", "medusa"]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope: RopeSpec
    norm_eps: float
    target_fingerprint: str
    version: int = SPEC_VERSION
    num_layers: int = 1  # decoder layers
    num_blocks: int = 0  # residual blocks of Medusa, one per drafted token
    block: Literal["llama"] = "llama"
    layer_parts: LayerParts = PLAIN_LAYER  # biases and head norms of the decoder layers
    latent: LatentSpec | None = None  # in the place of grouped attention: kind=mtp only
    experts: ExpertSpec | None = None  # in the place of a dense MLP: kind=mtp only
    concat: Literal["embedding_hidden", "hidden_embedding"] = "embedding_hidden"
    hidden_source: Literal["g", "layers"] = "g"
    target_hidden_size: int | None = None  # D of a target wider than the head; None: hidden_size
    layer_ids: tuple[int, ...] = ()  # k of S_k, the residual stream after k of the target's layers
    fusion_norm: Literal["none", "each", "joined"] = "none"  # of the S_k before fc
    norms: NormPlacement = NormPlacement()
    norm_form: Literal["w", "1+w"] = "w"
    logits_from: Literal["post_norm", "pre_norm"] = "post_norm"
    recycle: Literal["post_norm", "pre_norm"] = "post_norm"
    residual: Literal["standard", "normed"] = "standard"  # x, or hidden_norm(x): EAGLE-3 only
    first_embedding_mask: bool = True
    projection_bias: bool = False  # of eh_proj, of Medusa's blocks
    position_offset: int = 0
    embedding: Literal["target", "own"] = "target"
    lm_head: Literal["target", "own"] = "target"
    draft_vocab: DraftVocab | None = None

    def __post_init__(self) -> None:
        if self.version != SPEC_VERSION:
            raise ValueError(
                f"head version={self.version}: this build reads version {SPEC_VERSION}"
            )
        if self.kind == "eagle":
            self._check_fixed(EAGLE_FIELDS, "EAGLE-1 as published")
        if self.kind == "eagle3":
            self._check_fixed(EAGLE3_FIELDS, "the head of EAGLE-3")
        if self.kind == "medusa":
            self._check_fixed(MEDUSA_FIELDS, "Medusa-1 as published")
        elif self.num_layers not in (1, 2):
            raise ValueError(f"head num_layers={self.num_layers}: must be 1 or 2")
        self._check_blocks()
        self._check_sources()
        self._check_sparse()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"head num_heads={self.num_heads}: must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )

    def _check_fixed(self, fields: Mapping[str, Any], meaning: str) -> None:
        for name, value in fields.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"head {name}={getattr(self, name)!r}: kind={self.kind} is {meaning}, "
                    f"{name}={value!r}; kind=mtp lets you choose"
                )

    def _check_blocks(self) -> None:
        if self.kind == "medusa" and self.num_blocks < 1:
            raise ValueError(
                f"head num_blocks={self.num_blocks}: kind=medusa has one block per drafted token, "
                "at least 1"
            )
        if self.kind != "medusa" and self.num_blocks:
            raise ValueError(
                f"head num_blocks={self.num_blocks}: only kind=medusa has that, not "
                f"kind={self.kind}"
            )

    def _check_sparse(self) -> None:
        for name in ("latent", "experts"):
            if getattr(self, name) is not None and self.kind != "mtp":
                raise ValueError(f"head {name} is set: only kind=mtp has that, not {self.kind}")
        if self.experts is not None and self.experts.dense_layers:
            raise ValueError(
                f"head experts.dense_layers={list(self.experts.dense_layers)}: all layers of a "
                "head are of one kind"
            )
        if self.latent is not None and self.norm_form != "w":
            raise ValueError(
                f"head norm_form={self.norm_form!r}: the norms of latent attention are plain, w"
            )
        if self.latent is not None and self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"head num_kv_heads={self.num_kv_heads}: with latent attention every query head "
                f"has keys of its own, num_kv_heads={self.num_heads}"
            )

    def _check_sources(self) -> None:
        if self.kind == "eagle3":
            if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
                raise ValueError(
                    f"head layer_ids={list(self.layer_ids)}: kind=eagle3 names the residual "
                    "streams that it reads, ascending, each once"
                )
            self._check_width()
            return
        for name, value in (
            ("target_hidden_size", None),
            ("embedding", "target"),
            ("hidden_source", "g"),
            ("layer_ids", ()),
            ("fusion_norm", "none"),
            ("residual", "standard"),
        ):
            if getattr(self, name) != value:
                raise ValueError(
                    f"head {name}={getattr(self, name)!r}: only kind=eagle3 has that, not "
                    f"kind={self.kind}"
                )
        if self.lm_head != "target" and self.kind != "medusa":
            raise ValueError(
                f"head lm_head={self.lm_head!r}: only kind=eagle3 and kind=medusa have that, not "
                f"kind={self.kind}"
            )

    def _check_width(self) -> None:
        if self.target_hidden_size is None:
            return
        if self.target_hidden_size <= self.hidden_size:
            raise ValueError(
                f"head target_hidden_size={self.target_hidden_size}: must be above "
                f"hidden_size={self.hidden_size}; null stands for the same width"
            )
        if self.embedding != "own":
            raise ValueError(
                f"head embedding={self.embedding!r}: the target's is {self.target_hidden_size} "
                f"wide and the head {self.hidden_size}; it needs an embedding of its own"
            )

    @property
    def target_width(self) -> int:
        """Columns of ``g`` and of each residual stream."""
        return self.target_hidden_size or self.hidden_size

    @property
    def own_lm_heads(self) -> tuple[str, ...]:
        """Names of the ``lm_head`` weights that are the head's own: none, one for every step of a
        chain, or one per step.
        """
        if self.lm_head == "target":
            return ()
        if self.kind == "medusa":
            return tuple(f"lm_heads.{index}.weight" for index in range(self.num_blocks))
        return ("lm_head.weight",)

    @property
    def draft_vocab_size(self) -> int:
        return self.draft_vocab.size if self.draft_vocab else self.vocab_size

    @property
    def rotary_dim(self) -> int:
        """Rotated elements of a query or key head."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def attention_width(self) -> int:
        """Elements of a head that attention in training multiplies: keys and values of latent
        attention are expanded there, and filled up to one width.
        """
        if self.latent is None:
            return self.head_dim
        return max(self.latent.query_dim, self.latent.value_dim)

    @property
    def reads_layers(self) -> bool:
        """Whether the head reads residual streams of the target, not ``g``."""
        return self.hidden_source == "layers"

    @property
    def input_size(self) -> int:
        """Columns of what it reads of the target."""
        return self.target_width * max(1, len(self.layer_ids))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The strict tensor list: name -> shape. Linear weights are ``[out, in]``."""
        width = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.kind == "eagle3":
            joined = self.input_size
            if self.embedding == "own":
                shapes[EMBEDDING_NAME] = (self.vocab_size, width)
            if self.fusion_norm == "each":
                for index in range(len(self.layer_ids)):
                    shapes[f"fc_norm.{index}.weight"] = (self.target_width,)
            if self.fusion_norm == "joined":
                shapes["input_norm.weight"] = (joined,)
            shapes["fc.weight"] = (width, joined)
            shapes["layers.0.hidden_norm.weight"] = (width,)
            shapes |= self._layer_shapes(0, inputs=2 * width, has_input_norm=True)
        elif self.kind == "medusa":
            for index in range(self.num_blocks):
                shapes[f"blocks.{index}.layers.0.weight"] = (width, width)
                if self.projection_bias:
                    shapes[f"blocks.{index}.layers.0.bias"] = (width,)
        else:
            shapes["eh_proj.weight"] = (width, 2 * width)
            if self.projection_bias:
                shapes["eh_proj.bias"] = (width,)
            if self.norms.enorm:
                shapes["enorm.weight"] = (width,)
            if self.norms.hnorm:
                shapes["hnorm.weight"] = (width,)
            for index in range(self.num_layers):
                has_norm = self.norms.input
                shapes |= self._layer_shapes(index, inputs=width, has_input_norm=has_norm)
        for name in self.own_lm_heads:
            shapes[name] = (self.draft_vocab_size, width)
        if self.norms.final:
            shapes["norm.weight"] = (width,)
        if self.draft_vocab is not None:
            shapes[DRAFT_VOCAB_NAME] = (self.draft_vocab.size,)
        return shapes

    def _layer_shapes(
        self, index: int, *, inputs: int, has_input_norm: bool
    ) -> dict[str, tuple[int, ...]]:
        shapes = layer_shapes(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            parts=self.layer_parts,
            inputs=inputs,
            has_input_norm=has_input_norm,
            has_post_attention_norm=self.norms.post_attention,
            latent=self.latent,
            experts=self.experts,
        )
        return {layer_prefix(index) + name: shape for name, shape in shapes.items()}

    def to_json(self) -> str:
        raw = dataclasses.asdict(self)
        # Left out where a head has none, so that others keep the files and hashes they had.
        if self.rope.yarn is None:
            del raw["rope"]["yarn"]
        if self.layer_parts == PLAIN_LAYER:
            del raw["layer_parts"]
        for name in ("latent", "experts", "target_hidden_size"):
            if raw[name] is None:
                del raw[name]
        return json.dumps(raw, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "head config") -> HeadSpec:
        """Strict inverse of :meth:`to_json`; reads older versions too. Raises ``ValueError`` naming
        the key.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}: not valid JSON ({error})") from error
        version = raw.get("version") if isinstance(raw, dict) else None
        if type(version) is int and 1 <= version < SPEC_VERSION:
            for added in range(version + 1, SPEC_VERSION + 1):
                raw = raw | _ADDED[added]
            raw = raw | {"version": SPEC_VERSION}
        if isinstance(raw, dict):
            left_out: dict[str, Any] = {"layer_parts": dataclasses.asdict(PLAIN_LAYER)}
            left_out |= {"latent": None, "experts": None, "target_hidden_size": None}
            raw = left_out | raw
            if isinstance(raw.get("rope"), dict):
                raw = raw | {"rope": {"yarn": None} | raw["rope"]}
        return _from_mapping(cls, raw, source)


def layer_prefix(index: int) -> str:
    """What the names of decoder layer ``index``'s tensors begin with."""
    return f"layers.{index}."


def _from_mapping(cls: type[Any], raw: Any, where: str) -> Any:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}: expected an object, got {type(raw).__name__}")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for key in raw:
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown key; allowed: {', '.join(sorted(known))}")
    missing = known - set(raw)
    if missing:
        raise ValueError(f"{where}: missing key(s) {', '.join(sorted(missing))}")
    values = {key: _convert(hints[key], raw[key], f"{where}.{key}") for key in raw}
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where}={value!r}: allowed are {', '.join(map(repr, args))}")
        return value
    if args and type(None) in args:
        inner = next(a for a in args if a is not type(None))
        return None if value is None else _convert(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}={value!r}: expected a list, got {type(value).__name__}")
        return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return _from_mapping(typing.cast(type[Any], hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where}={value!r}: expected {hint.__name__}, got {type(value).__name__}")
    return value


def hash_vocab_ids(ids: torch.Tensor) -> str:
    """sha256 of the int64 little-endian bytes of a draft vocabulary's id list."""
    return hashlib.sha256(ids.to(torch.int64).cpu().numpy().tobytes()).hexdigest()


def check_head_tensors(spec: HeadSpec, tensors: Mapping[str, torch.Tensor], *, source: str) -> None:
    """Raise ``ValueError`` naming the first missing, unexpected or mis-shaped tensor."""
    check_tensor_list(spec.tensor_shapes(), tensors, source=source)
    if spec.draft_vocab is not None:
        ids_W = tensors[DRAFT_VOCAB_NAME]
        check_draft_ids(ids_W, vocab_size=spec.vocab_size, source=f"{source}: {DRAFT_VOCAB_NAME}")
        if hash_vocab_ids(ids_W) != spec.draft_vocab.ids_sha256:
            raise ValueError(f"{source}: {DRAFT_VOCAB_NAME} does not match draft_vocab.ids_sha256")


def check_draft_ids(ids_W: torch.Tensor, *, vocab_size: int, source: str) -> None:
    """Raise ``ValueError`` unless ``ids_W`` lists token ids: int64, strictly ascending, known."""
    if ids_W.dtype != torch.int64 or ids_W.dim() != 1 or not len(ids_W):
        raise ValueError(
            f"{source}: expected a list of int64 ids, got {ids_W.dtype} {list(ids_W.shape)}"
        )
    if len(ids_W) > 1 and int(ids_W.diff().min()) < 1:
        raise ValueError(f"{source}: ids must be strictly ascending, each named once")
    lowest, highest = int(ids_W[0]), int(ids_W[-1])
    if lowest < 0 or highest >= vocab_size:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"{source}: id {outside} is outside of 0..{vocab_size - 1}")


def check_tensor_list(
    shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor], *, source: str
) -> None:
    """Raise ``ValueError`` naming the first missing, mis-shaped or unexpected tensor."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"{source}: tensor {name} {list(shape)} is missing")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{source}: tensor {name} has shape {list(tensors[name].shape)}, "
                f"expected {list(shape)}"
            )
    for name in tensors:
        if name not in shapes:
            raise ValueError(f"{source}: unexpected tensor {name}")


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, on the host. Raises ``ValueError`` for a damaged one."""
    try:
        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged safetensors file ({error})") from error


def save_head(path: Path, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the native directory; each file appears durably, by rename (weights first)."""
    check_head_tensors(spec, tensors, source=str(path))
    path.mkdir(parents=True, exist_ok=True)
    contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    # One entry only: safetensors writes several in random order, and equal heads must hash equal.
    metadata = {"format": "pt"}
    replace_atomic(path / WEIGHTS_NAME, lambda file: save_file(contiguous, file, metadata=metadata))
    write_atomic(path / CONFIG_NAME, spec.to_json())


def load_head_spec(path: Path) -> HeadSpec:
    """The contract of a native directory. Raises ``ValueError`` naming the file or key."""
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (path / name).is_file():
            raise ValueError(
                f"head={path}: {name} is missing; expected a directory written by mtp train"
            )
    return HeadSpec.from_json((path / CONFIG_NAME).read_text(), source=str(path / CONFIG_NAME))


def load_head(path: Path) -> tuple[HeadSpec, dict[str, torch.Tensor]]:
    """Read a native directory, strictly. Raises ``ValueError`` naming the file, key or tensor."""
    spec = load_head_spec(path)
    tensors = read_tensors(path / WEIGHTS_NAME)
    check_head_tensors(spec, tensors, source=str(path / WEIGHTS_NAME))
    return spec, tensors
