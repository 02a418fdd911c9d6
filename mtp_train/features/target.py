"""The target as the feature store sees it: its directory, its dtype and what identifies it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from mtp_train.config import Config, TargetConfig
from mtp_train.features.manifest import Fingerprint
from runtime.cpu import best_dtype
from runtime.models.loader import default_cache_dir, fingerprint_target, resolve_target

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_TEMPLATE_FILE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TargetShape:
    """What precompute needs of ``config.json``, any architecture."""

    hidden_size: int
    max_position_embeddings: int


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
    for key in ("hidden_size", "max_position_embeddings"):
        if not isinstance(raw.get(key), int):
            raise ValueError(f"{file}: {key}={raw.get(key)!r}: expected an integer")
    return TargetShape(raw["hidden_size"], raw["max_position_embeddings"])


def fingerprint_features(config: Config, directory: Path, *, device: torch.device) -> Fingerprint:
    """What the states dumped under ``config`` depend on. Hashes the weights, loads nothing.

    Raises ``ValueError`` when the directory lacks a weights, configuration or tokenizer file.
    """
    return Fingerprint(
        target_weights=fingerprint_target(directory, cache_dir=cache_directory(config.target)),
        tokenizer=_hash_tokenizer(directory),
        chat_template=_hash_chat_template(directory, config.data.chat_template),
        hidden_size=read_shape(directory).hidden_size,
        codec=config.features.codec,
        settings=(
            ("source", config.features.source),
            ("dtype", str(target_dtype(config.target, device)).removeprefix("torch.")),
            ("device", device.type),
        ),
    )


def _hash_tokenizer(directory: Path) -> str:
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not files:
        raise ValueError(f"target={directory}: none of {', '.join(_TOKENIZER_FILES)} is there")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _hash_chat_template(directory: Path, override: str) -> str:
    """sha256 of the template that rendered the tokens; empty text when there is none."""
    text = ""
    if override:
        text = Path(override).read_text()
    elif (directory / _TEMPLATE_FILE).is_file():
        text = (directory / _TEMPLATE_FILE).read_text()
    elif (directory / _TOKENIZER_CONFIG).is_file():
        raw = json.loads((directory / _TOKENIZER_CONFIG).read_text())
        template = raw.get("chat_template", "")
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
