"""Which settings decide the steps of a training run: a run that goes on has to share them.

Settings that came later are left out where they are at their default, at which older runs did the
same: their records stay valid.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mtp_train.config import Config, HeadConfig, LossConfig, TrainerConfig
from mtp_train.features.target import target_dtype

# of `trainer`: these change no step, or only how it is computed
_FREE_TO_CHANGE = (
    "activation_checkpointing",
    "attention",
    "checkpoint_every",
    "compile",
    "keep_last",
    "log_every",
    "wandb",
    "tensorboard",
)
_LATER_KEYS = (
    "kind",
    "lk_eta",
    "feature_noise",
    "patience",
    "own_tokens",
    "sequence_parallel",
    "optimizer",
    "max_tokens",
    "compile",
)
_LATER_HEAD_KEYS = ("decoder", "num_blocks", "own_lm_heads")


def deciding_settings(config: Config, device: torch.device) -> dict[str, Any]:
    """Plain values, as they come back from JSON. ``device``: that of training."""
    trainer = _without_later_defaults(config.trainer)
    for name in _FREE_TO_CHANGE:
        trainer.pop(name, None)
    trainer["betas"] = list(trainer["betas"])
    return {
        "seed": config.seed,
        "trainer": trainer,
        "loss": _without_later_defaults(config.loss),
        "zero_stage": config.deepspeed.zero_stage,
        **({"offload": offload} if (offload := config.deepspeed.offload) != "none" else {}),
        **(_measured(config, device) if config.trainer.validate_every else {}),
    }


def head_settings(head: HeadConfig, layer_ids: tuple[int, ...]) -> dict[str, Any]:
    """Of the head, as plain values; ``layer_ids`` as chosen for the target."""
    return {**_without_later_defaults(head, _LATER_HEAD_KEYS), "layer_ids": list(layer_ids)}


def _measured(config: Config, device: torch.device) -> dict[str, Any]:
    """What decides which head is the best."""
    validate, runtime = config.validate, config.runtime
    return {
        "validate": {
            "k": validate.k,
            "num_prompts": validate.num_prompts,
            "max_tokens": validate.max_tokens,
            "temperature": validate.temperature,
            "dtype": str(target_dtype(config.target, device)),
        },
        "runtime": {"verify": runtime.verify, "draft_mode": runtime.draft_mode},
    }


def _without_later_defaults(
    section: HeadConfig | LossConfig | TrainerConfig, later: tuple[str, ...] = _LATER_KEYS
) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    return {
        name: value
        for name, value in dataclasses.asdict(section).items()
        if name not in later or value != defaults[name]
    }
