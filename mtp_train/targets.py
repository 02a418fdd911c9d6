"""The configured target, opened: the loaded model and the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mtp_train.config import TargetConfig
from mtp_train.features.target import cache_directory, target_dtype
from runtime.models.loader import Target, load_target


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
