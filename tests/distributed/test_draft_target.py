"""The draft model lives on the leader of the target's group; the other ranks do without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.kv_cache import SlotTable
from runtime.spec.base import Runner
from runtime.spec.draft_target import DraftTargetSchedule
from runtime.transfer import ImmediateTransfer
from tests.unit.runtime.engine_fixtures import tiny_target

REPOSITORY = Path(__file__).parents[2]


def test_two_ranks_with_the_draft_on_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.draft_target_worker"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


class Group:
    def __init__(self, *, is_leader: bool) -> None:
        self.is_leader = is_leader

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("is_leader", [True, False])
def test_a_draft_anywhere_else_is_a_broken_invariant(is_leader: bool, tmp_path: Path) -> None:
    model = tiny_target(tmp_path).model
    table = SlotTable(num_rows=2, max_len=32, page_size=16, num_pages=4)
    runner = Runner(model, model.new_pool(64), table)
    with pytest.raises(AssertionError, match="the draft lives on the leader, only there"):
        DraftTargetSchedule(
            runner,
            None if is_leader else runner,
            group=Group(is_leader=is_leader),
            announce=lambda plan: None,
            num_rows=2,
            transfer=ImmediateTransfer(),
            verify="keyed",
            draft_mode="argmax",
        )
