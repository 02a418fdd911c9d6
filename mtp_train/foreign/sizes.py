"""Sizes, RoPE, dtype and quantisation scope as ``config.json`` states them.

What is missing is said, together with what an engine would take instead; nothing is taken silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_train.foreign.findings import Finding
from runtime.head_spec import CONFIG_NAME, RopeSpec
from runtime.layer_parts import LayerParts, layer_shapes
from runtime.models.config import parse_rope

_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_UNREADABLE = RopeSpec(theta=1.0)  # where only shapes are asked for


@dataclass(frozen=True)
class Sizes:
    """Of the head's decoder layer. ``rope`` is ``None`` where it is of a kind that is not
    computed, and ``rope_note`` says which.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeSpec | None
    rope_note: str
    dtype: str  # as config.json says; empty = it does not

    def spec_fields(self) -> dict[str, Any]:
        """For :class:`HeadSpec`; with a RoPE that cannot be read, good for shapes only."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "norm_eps": self.norm_eps,
            "rope": self.rope or _UNREADABLE,
            "target_fingerprint": "",
        }

    def layer_shapes(
        self, parts: LayerParts, *, inputs: int | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Of a plain decoder layer, by name; ``inputs`` of its attention are ``hidden_size``."""
        return layer_shapes(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            parts=parts,
            inputs=self.hidden_size if inputs is None else inputs,
        )


@dataclass(frozen=True)
class TargetShape:
    """What of a target's ``config.json`` a head depends on, of any architecture."""

    directory: Path
    architecture: str
    model_type: str
    num_layers: int
    sizes: Sizes
    is_tied: bool
    quantisation: str  # empty = none


def read_sizes(raw: Mapping[str, Any], *, source: str) -> tuple[Sizes | None, list[Finding]]:
    """``None`` where a size is missing that nothing stands for. ``raw``: the object that holds the
    decoder layer's keys; ``source`` names it in front of a key.
    """
    findings: list[Finding] = []
    found: dict[str, int] = {}
    for name in _REQUIRED:
        value = raw.get(name)
        if type(value) is int and value > 0:
            found[name] = value
        else:
            findings.append(
                Finding(
                    "error",
                    "config-key",
                    source + name,
                    _shown(value),
                    "a whole number above 0",
                    "write what the tensors have",
                )
            )
    if len(found) < len(_REQUIRED):
        return None, findings
    heads, width = found["num_attention_heads"], found["hidden_size"]
    rope, note = _read_rope(raw, source, findings)
    sizes = Sizes(
        hidden_size=width,
        intermediate_size=found["intermediate_size"],
        num_heads=heads,
        num_kv_heads=_stated(raw, "num_key_value_heads", heads, source, findings),
        head_dim=_optional(raw, "head_dim") or max(1, width // heads),
        vocab_size=found["vocab_size"],
        max_position_embeddings=_stated(raw, "max_position_embeddings", 2048, source, findings),
        norm_eps=_eps(raw, source, findings),
        rope=rope,
        rope_note=note,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch."),
    )
    return sizes, findings


def read_target(directory: Path) -> TargetShape:
    """Raises ``ValueError`` naming the key that a target's ``config.json`` lacks."""
    file = directory / CONFIG_NAME
    if not file.is_file():
        raise ValueError(f"target={directory}: {CONFIG_NAME} is missing")
    raw = json.loads(file.read_text())
    text = raw.get("text_config", raw)
    sizes, findings = read_sizes(text, source="")
    num_layers = text.get("num_hidden_layers")
    if sizes is None or type(num_layers) is not int:
        first = next((str(f) for f in findings if f.severity == "error"), "num_hidden_layers")
        raise ValueError(f"target={directory}: {file}: {first}")
    architectures = raw.get("architectures") or [""]
    return TargetShape(
        directory=directory,
        architecture=str(architectures[0]),
        model_type=str(text.get("model_type", "")),
        num_layers=num_layers,
        sizes=sizes,
        is_tied=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        quantisation=describe_quantisation(raw),
    )


def describe_quantisation(raw: Mapping[str, Any]) -> str:
    """The scope that ``config.json`` states, in a line; empty without one."""
    settings = raw.get("quantization_config") or raw.get("compression_config")
    if not isinstance(settings, Mapping):
        return ""
    method = settings.get("quant_method", "?")
    parts = [str(method)]
    for name in ("format", "fmt", "bits", "weight_block_size", "group_size"):
        if settings.get(name) is not None:
            parts.append(f"{name}={settings[name]}")
    ignored = settings.get("ignore") or settings.get("modules_to_not_convert")
    if ignored:
        parts.append(f"all but {', '.join(map(str, ignored))}")
    return ", ".join(parts)


def describe_rope(sizes: Sizes) -> str:
    if sizes.rope is None:
        return sizes.rope_note
    rope = sizes.rope
    if rope.kind == "default":
        return f"theta {rope.theta:g}"
    values = {
        key: value
        for key, value in asdict(rope).items()
        if key not in ("theta", "kind", "yarn") and value not in (0, 1.0)
    }
    return f"theta {rope.theta:g}, {rope.kind} " + ", ".join(
        f"{key} {value:g}" for key, value in values.items()
    )


def _read_rope(
    raw: Mapping[str, Any], source: str, findings: list[Finding]
) -> tuple[RopeSpec | None, str]:
    nested = raw.get("rope_parameters")
    is_stated = "rope_theta" in raw or (isinstance(nested, Mapping) and "rope_theta" in nested)
    if not is_stated:
        findings.append(
            Finding(
                "warning",
                "rope-theta",
                source + "rope_theta",
                "missing",
                "the base that the head was trained with",
                "engines take 10000; write the target's",
            )
        )
    try:
        rope = parse_rope(raw, source or "config.json")
    except ValueError as error:
        note = str(error).partition(": ")[2]
        findings.append(
            Finding(
                "warning",
                "rope-kind",
                source + "rope_parameters",
                note,
                "",
                "this runtime cannot compute it; engines may",
            )
        )
        return None, note
    _check_both_schemas(raw, rope, source, findings)
    return rope, ""


def _check_both_schemas(
    raw: Mapping[str, Any], rope: RopeSpec, source: str, findings: list[Finding]
) -> None:
    """``rope_theta`` + ``rope_scaling`` and ``rope_parameters``: engines read one or the other."""
    if raw.get("rope_parameters") is None or "rope_theta" not in raw:
        return
    try:
        other = parse_rope({k: v for k, v in raw.items() if k != "rope_parameters"}, source)
    except ValueError:
        return
    if other != rope:
        findings.append(
            Finding(
                "error",
                "rope-schemas",
                source + "rope_theta, rope_scaling",
                f"{other}",
                f"{rope}, as rope_parameters says",
                "make both the same: transformers below 5 reads one, from 5 on the other",
            )
        )


def _stated(
    raw: Mapping[str, Any], name: str, default: int, source: str, findings: list[Finding]
) -> int:
    value = _optional(raw, name)
    if value is not None:
        return value
    findings.append(
        Finding(
            "warning",
            "config-default",
            source + name,
            _shown(raw.get(name)),
            "a whole number above 0",
            f"engines take {default}; write it",
        )
    )
    return default


def _optional(raw: Mapping[str, Any], name: str) -> int | None:
    value = raw.get(name)
    return value if type(value) is int and value > 0 else None


def _eps(raw: Mapping[str, Any], source: str, findings: list[Finding]) -> float:
    value = raw.get("rms_norm_eps")
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    findings.append(
        Finding(
            "warning",
            "config-default",
            source + "rms_norm_eps",
            _shown(value),
            "a number above 0",
            "engines take 1e-06; write the target's",
        )
    )
    return 1e-6


def _shown(value: object) -> str:
    return "missing" if value is None else json.dumps(value)
