"""The configured target, opened: the loaded model."""

from __future__ import annotations

import torch

from mtp_train.config import TargetConfig
from mtp_train.features.target import (
    cache_directory,
    check_quantisation,
    target_directory,
    target_dtype,
)
from runtime.config import EngineConfig
from runtime.models.loader import Target, load_target


def open_target(config: TargetConfig, *, device: torch.device, runtime: EngineConfig) -> Target:
    """Load the target's weights, with the attention that ``runtime`` asks for.

    Raises ``ValueError`` naming what is wrong with it.
    """
    check_quantisation(config, target_directory(config))
    return load_target(
        config.path,
        dtype=target_dtype(config, device),
        device=device,
        attention=runtime.attention,
        attention_kernel=runtime.attention_kernel,
        stored_weights=runtime.stored_weights,
        int8_grid=runtime.int8_grid,
        kv_cache=runtime.kv_cache,
        expert_parallel=runtime.expert_parallel,
        cache_dir=cache_directory(config),
    )
