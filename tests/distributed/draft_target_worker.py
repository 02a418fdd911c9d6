"""Draft-target speculation over gloo: the target on two ranks, the draft on the leader alone; exits
0 when all holds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from mtp_train.distributed import init_process_group
from runtime.models.layer_drop import keep_layers
from runtime.models.loader import Target, load_target
from runtime.spec.draft_target import OnLeader
from tests.distributed.ranks import run_ranks
from tests.unit.runtime.engine_fixtures import (
    VOCAB,
    make_engine,
    make_requests,
    run_stepwise,
)
from tests.unit.runtime.model_fixtures import save_llama
from tests.unit.runtime.test_draft_target_tp import assert_no_draft, check_leader

WORLD_SIZE = 2
SETTINGS: list[dict[str, Any]] = [
    {"num_draft_tokens": 3, "page_size": 1, "num_pages": 256},
    {"num_draft_tokens": 2, "verify": "rejection", "draft_mode": "sampled"},
]


def exercise(rank: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        save_llama(Path(place), vocab_size=VOCAB)  # before there are ranks: one of them would save
        group = init_process_group(device="cpu", timeout_s=60)
        options: dict[str, Any] = {"dtype": torch.float32, "device": group.device}
        spread = load_target(place, group=group, **options)
        whole = load_target(place, **options) if group.is_leader else None
    for settings in SETTINGS:
        if whole is not None:
            lead(spread, whole, settings)
        else:
            engine = make_engine(spread, OnLeader(), **settings)
            engine.follow()
            assert_no_draft(engine)
    group.close()


def lead(spread: Target, whole: Target, settings: dict[str, Any]) -> None:
    draft = keep_layers(whole.model, [0])
    engine = make_engine(spread, draft, **settings)
    for temperature in (0.0, 0.9):
        requests = make_requests(5, temperature=temperature, ignore_eos=True)
        got = run_stepwise(engine, requests, late=True, after_step=check_leader)
        alone = make_engine(whole, draft, **settings)
        assert got == run_stepwise(alone, requests, late=True)
    engine.dismiss()


if __name__ == "__main__":
    run_ranks(exercise, WORLD_SIZE)
