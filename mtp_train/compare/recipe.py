"""What makes two runs the same experiment: every recorded setting, but those that may differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from data_prep.config import DataConfig
from mtp_train.compare.facts import RunRecords
from mtp_train.config import (
    DeepSpeedConfig,
    FeaturesConfig,
    HeadConfig,
    LossConfig,
    TrainerConfig,
    ValidateConfig,
)
from mtp_train.events import to_jsonable
from mtp_train.overrides import leaves
from runtime.config import EngineConfig

_SECTIONS = {
    "data": DataConfig,
    "head": HeadConfig,
    "loss": LossConfig,
    "trainer": TrainerConfig,
    "deepspeed": DeepSpeedConfig,
    "features": FeaturesConfig,
    "validate": ValidateConfig,
    "runtime": EngineConfig,
}
# Change no head and no figure, or only where something lies. An entry that ends with a dot is a
# whole section.
_NEVER_MATTER = frozenset(
    {
        "features.path",
        "trainer.checkpoint_every",
        "trainer.keep_last",
        "trainer.log_every",
        "trainer.wandb",
        "trainer.tensorboard",
        "export.",
        "hot_vocab.",
        "engine.",
    }
)


def compared_settings(records: RunRecords, *, free: Collection[str]) -> dict[str, str]:
    """Settings as text by their dotted key, without those that are ``free`` to differ.

    A setting that came after the run counts as its default, at which older runs did the same.
    """
    known = {**_defaults(), **dict(leaves(records.settings))}
    skipped = {*_NEVER_MATTER, *free}
    sections = tuple(name for name in skipped if name.endswith("."))
    return {
        key: repr(value)
        for key, value in known.items()
        if key not in skipped and not key.startswith(sections)
    }


@cache
def _defaults() -> Mapping[str, Any]:
    return dict(leaves({name: to_jsonable(asdict(kind())) for name, kind in _SECTIONS.items()}))
