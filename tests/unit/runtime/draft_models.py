"""Draft models for the draft-target schedule: a tiny random Llama, the target with layers left out,
and a stub that knows the answers."""

from __future__ import annotations

from pathlib import Path

import torch

from runtime.models.llama import LlamaModel
from runtime.models.loader import load_target
from tests.unit.runtime.engine_fixtures import VOCAB, Oracle
from tests.unit.runtime.model_fixtures import save_llama


def tiny_draft(path: Path, *, seed: int = 5, vocab_size: int = VOCAB) -> LlamaModel:
    """One layer, another width and other heads than the tiny target's."""
    save_llama(
        path,
        seed=seed,
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return load_target(str(path), dtype=torch.float32, device=torch.device("cpu")).model


class StubModel(Oracle):
    """An oracle as a whole model, whose rows take their own token."""

    ahead = 1
