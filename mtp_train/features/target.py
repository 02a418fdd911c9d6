"""The target as the feature store sees it: its directory, its dtype and what identifies it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.chat import hash_template, read_template
from data_prep.fingerprints import tokenizer_hash
from mtp_train.config import Config, TargetConfig
from mtp_train.features.manifest import Fingerprint
from mtp_train.layer_ids import choose_layer_ids
from runtime.cpu import best_dtype
from runtime.models.loader import default_cache_dir, fingerprint_target, resolve_target
from runtime.models.quantisation import Quantisation, read_quantisation

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TargetShape:
    """What precompute needs of ``config.json``, any architecture."""

    hidden_size: int
    max_position_embeddings: int
    num_layers: int


def cache_directory(target: TargetConfig) -> Path:
    return Path(target.cache_dir) if target.cache_dir else default_cache_dir()


def target_directory(target: TargetConfig) -> Path:
    """The target's Hugging Face directory; a GGUF file is converted first."""
    return resolve_target(target.path, cache_dir=cache_directory(target))


def target_dtype(target: TargetConfig, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 on a GPU and where the processor has it, else float32."""
    if target.dtype != "auto":
        return _DTYPES[target.dtype]
    return torch.bfloat16 if device.type == "cuda" else best_dtype()


def read_shape(directory: Path) -> TargetShape:
    """Raises ``ValueError`` naming the key that is missing."""
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    raw = raw.get("text_config", raw)
    keys = ("hidden_size", "max_position_embeddings", "num_hidden_layers")
    for key in keys:
        if not isinstance(raw.get(key), int):
            raise ValueError(f"{file}: {key}={raw.get(key)!r}: expected an integer")
    return TargetShape(*(raw[key] for key in keys))


def fingerprint_features(config: Config, directory: Path, *, device: torch.device) -> Fingerprint:
    """What the states dumped under ``config`` depend on. Hashes the weights without loading them;
    tokenizer and template count as in the token set (`data_prep`).

    Raises ``ValueError`` when the directory lacks a weights, configuration or tokenizer file.
    """
    tokenizer = load_tokenizer(config.target, directory)
    template, arguments = read_template(config.data.chat_template, config.data.chat_template_kwargs)
    shape = read_shape(directory)
    check_quantisation(config.target, directory)
    return Fingerprint(
        target_weights=fingerprint_target(directory, cache_dir=cache_directory(config.target)),
        tokenizer=tokenizer_hash(tokenizer),
        chat_template=hash_template(tokenizer, template=template, kwargs=arguments),
        hidden_size=shape.hidden_size,
        codec=config.features.codec,
        layer_ids=choose_layer_ids(config.head, num_layers=shape.num_layers),
        settings=(
            ("source", config.features.source),
            ("dtype", str(target_dtype(config.target, device)).removeprefix("torch.")),
            ("device", device.type),
            *_rounding(config, directory),
        ),
    )


def check_quantisation(target: TargetConfig, directory: Path) -> Quantisation | None:
    """How the linears in ``directory`` are stored; ``None`` where they are plain.

    Raises ``ValueError`` where ``target.quantization`` says something else.
    """
    file = directory / "config.json"
    quantisation = read_quantisation(json.loads(file.read_text()), str(file))
    kinds = sorted(quantisation.kinds) if quantisation else []
    if target.quantization not in ("any", "+".join(kinds) or "none"):
        stated = quantisation.label if quantisation else "no quantization_config"
        raise ValueError(
            f"target.quantization={target.quantization}: {file} says {stated}; allowed for this "
            f"target: any{', ' + kinds[0] if len(kinds) == 1 else ', none' if not kinds else ''}"
        )
    return quantisation


def _rounding(config: Config, directory: Path) -> list[tuple[str, str]]:
    """Settings of a fingerprint, where the target's weights, inputs, keys or values are rounded;
    stores of others have none.
    """
    found = []
    quantisation = check_quantisation(config.target, directory)
    if quantisation is not None:
        found.append(("quantization", quantisation.label))
        if quantisation.rounds_inputs and config.runtime.int8_grid != "library":
            found.append(("int8_grid", config.runtime.int8_grid))
    if config.runtime.kv_cache != "model" and config.features.source == "runtime":
        found.append(("kv_cache", config.runtime.kv_cache))
    return found


def load_tokenizer(config: TargetConfig, directory: Path) -> Any:
    """The tokenizer that lies in the target's directory, without asking any hub.

    Raises ``ValueError`` when there is none, or it wants to run code and may not.
    """
    from transformers import AutoTokenizer

    for names in (("config.json",), ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        if not any((directory / name).is_file() for name in names):
            raise ValueError(
                f"target.path={config.path}: {directory} has no {' or '.join(names)}; expected a "
                "Hugging Face model directory with its tokenizer"
            )
    try:
        return AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"target.path={config.path}: no usable tokenizer ({first_line})"
        ) from error
