"""The configured target, opened: the loaded model."""

from __future__ import annotations

import torch

from mtp_train.config import TargetConfig
from mtp_train.features.target import cache_directory, target_dtype
from runtime.config import EngineConfig
from runtime.models.loader import Target, load_target


def open_target(config: TargetConfig, *, device: torch.device, runtime: EngineConfig) -> Target:
    """Load the target's weights, with the attention that ``runtime`` asks for.

    Raises ``ValueError`` naming what is wrong with it.
    """
    return load_target(
        config.path,
        dtype=target_dtype(config, device),
        device=device,
        attention=runtime.attention,
        attention_kernel=runtime.attention_kernel,
        cache_dir=cache_directory(config),
    )
