"""The configured target: its directory, its tokenizer, and the loaded model.

The only place that turns ``target.*`` of the configuration into the runtime's loading arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mtp_train.config import TargetConfig
from runtime.cpu import best_dtype
from runtime.models.loader import Target, default_cache_dir, load_target, resolve_target


def cache_directory(config: TargetConfig) -> Path:
    """Where converted targets and fingerprints are kept."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()


def target_directory(config: TargetConfig) -> Path:
    """The Hugging Face directory of the target; a GGUF file is converted first (once).

    Raises ``ValueError`` when nothing is there.
    """
    return resolve_target(config.path, cache_dir=cache_directory(config))


def target_dtype(config: TargetConfig, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU and where the processor computes in it, else float32."""
    if config.dtype == "auto":
        return best_dtype() if device.type == "cpu" else torch.bfloat16
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def open_target(config: TargetConfig, *, device: torch.device) -> Target:
    """Load the target's weights. Raises ``ValueError`` naming what is wrong with it."""
    return load_target(
        config.path,
        dtype=target_dtype(config, device),
        device=device,
        cache_dir=cache_directory(config),
    )


def load_tokenizer(config: TargetConfig, directory: Path) -> Any:
    """The tokenizer that lies in the target's directory, without asking any hub.

    Raises ``ValueError`` when there is none, or it wants to run code and may not.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"target.path={config.path}: no usable tokenizer ({error})") from error
