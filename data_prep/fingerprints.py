"""What a token set depends on, and how two such records are compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from data_prep.chat import ChatFormat
from data_prep.config import TRANSPORT, DataConfig
from data_prep.sources import resolve_source, source_files
from runtime.files import sha256_file


def fingerprint_inputs(
    config: DataConfig, chat: ChatFormat, *, seed: int, target_fingerprint: str
) -> dict[str, Any]:
    """Everything the rows depend on: settings, contents of the sources, tokenizer, template."""
    skipped = {"path", "chat_template", "chat_template_kwargs"}  # the template's hash covers two
    settings = {
        item.name: getattr(config, item.name) for item in fields(config) if item.name not in skipped
    }
    options = config.regenerate
    settings["regenerate"] = (
        {key: value for key, value in asdict(options).items() if key not in TRANSPORT}
        if options.enabled
        else None
    )
    # Sources count by content, under the name that rows carry.
    settings["sources"] = {source: _source_hash(source) for source in config.sources}
    inputs = settings | {
        "seed": seed,
        "split_by": "prompt",  # what decides a conversation's split
        "tokenizer": tokenizer_hash(chat.tokenizer),
        "chat_template": chat.template_hash,
    }
    if target_fingerprint:
        inputs["target"] = target_fingerprint
    plain: dict[str, Any] = json.loads(json.dumps(inputs))
    return plain


def with_identity(
    inputs: Mapping[str, Any], saved: Mapping[str, Any], config: DataConfig
) -> dict[str, Any]:
    """``inputs`` with who answers, as far as that is known without asking an endpoint.

    What a finished set says of its model counts unless the configuration names another.
    """
    if not (config.regenerate.enabled and config.regenerate.url):
        return dict(inputs)
    answered_by = dict(saved.get("answered_by", {"model": "an endpoint's"}))
    if config.regenerate.model:
        answered_by["model"] = config.regenerate.model
    return dict(inputs) | {"answered_by": answered_by}


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of the whole tokenizer (normaliser, vocabulary, merges), template excluded."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        text = backend.to_str()
    else:
        text = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_same(folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """``ValueError`` that names every key in which the two differ."""
    differing = sorted(
        key for key in saved.keys() | wanted.keys() if saved.get(key) != wanted.get(key)
    )
    if differing:
        parts = [
            f"{key} ({_short(saved.get(key))} there, {_short(wanted.get(key))} now)"
            for key in differing
        ]
        raise ValueError(
            f"{folder} holds a token set made with other settings: {', '.join(parts)}; "
            "use another run or remove it"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "…"


def _source_hash(source: str) -> str:
    path = resolve_source(source)
    if path is None:
        return "datasets"  # only `datasets` knows its content
    files = source_files(path) or sorted(item for item in path.rglob("*") if item.is_file())
    digest = hashlib.sha256()
    for file in files:
        name = file.name if path.is_file() else str(file.relative_to(path))
        digest.update(name.encode() + b"\0")
        digest.update(bytes.fromhex(sha256_file(file)))
    return digest.hexdigest()
