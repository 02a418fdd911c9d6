"""How far a fine-tune has moved away from the checkpoint that it was tuned from.

Shape legend: V rows of a vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runtime.models.checkpoint import Checkpoint
from runtime.models.config import load_config

_ROWS = 8192  # compared at once


@dataclass(frozen=True)
class Drift:
    """``|base - target| / |target|`` (Frobenius) of what every MTP head is tied to."""

    embedding: float
    lm_head: float
    final_norm: float

    def parts(self) -> dict[str, float]:
        """By name, for messages."""
        return {name.replace("_", " "): value for name, value in asdict(self).items()}


def measure_drift(base: Path, target: Path) -> Drift:
    """Of two Hugging Face directories of one shape. Raises ``ValueError`` for other shapes."""
    pairs = {
        "embedding": "model.embed_tokens.weight",
        "lm_head": "lm_head.weight",
        "final_norm": "model.norm.weight",
    }
    found: dict[str, float] = {}
    for field, name in pairs.items():
        there, here = (_read(directory, name) for directory in (base, target))
        if there.shape != here.shape:
            raise ValueError(
                f"{base}: {name} is {list(there.shape)}, the target's is {list(here.shape)}; a "
                "base checkpoint has the target's sizes"
            )
        found[field] = relative_difference(there, here)
    return Drift(**found)


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """``|ours - theirs| / |theirs|`` in float64 sums over blocks of rows."""
    difference = total = 0.0
    for a, b in zip(ours.split(_ROWS), theirs.split(_ROWS), strict=True):
        wide = b.float()
        difference += float((a.float() - wide).square().sum(dtype=torch.float64))
        total += float(wide.square().sum(dtype=torch.float64))
    return float((difference / total) ** 0.5) if total else float(difference > 0)


def _read(directory: Path, name: str) -> torch.Tensor:
    config = load_config(directory)
    if name == "lm_head.weight" and config.tie_word_embeddings:
        name = "model.embed_tokens.weight"
    return Checkpoint.of(directory, config).read_stored(name)
