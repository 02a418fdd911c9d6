"""A tiny target and head on disk, and prompts for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mtp_train.validate.subject import Subject
from runtime.config import EngineConfig
from runtime.draft_vocab import reduce_head
from runtime.head_spec import save_head
from tests.unit.runtime.engine_fixtures import VOCAB, head_spec, random_head_tensors, tiny_target
from tests.unit.runtime.model_fixtures import random_ids

RUNTIME = EngineConfig(
    page_size=16,
    num_pages=64,
    max_running=4,
    max_model_len=96,
    max_batch_tokens=64,
    num_threads=1,
)


def make_subject(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    kind: type[Subject] = Subject,
    family: str = "llama",
    **spec: Any,
) -> Subject:
    """A random head for a random target of eleven tokens; ``spec`` overrides fields of the head."""
    target = tiny_target(path / "target", family=family)
    head = head_spec(target, **spec)
    save_head(path / "head", head, random_head_tensors(head))
    return kind(
        target_path=path / "target",
        head_path=path / "head",
        runtime_dtype=dtype,
        engine_config=RUNTIME,
    )


def make_reduced_subject(path: Path, ids: tuple[int, ...]) -> Subject:
    """The same, drafting from ``ids`` only."""
    subject = make_subject(path)
    spec, tensors = reduce_head(subject.spec, subject.tensors, torch.tensor(ids), coverage=0.5)
    save_head(path / "reduced", spec, tensors)
    return replace(subject, head_path=path / "reduced", _contract=None, _heads={})


def make_prompts(lengths: tuple[int, ...] = (5, 1, 19, 33, 2, 12)) -> list[list[int]]:
    return [random_ids(n, seed=index, vocab_size=VOCAB) for index, n in enumerate(lengths)]
