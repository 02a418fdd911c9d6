from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtp_train.distributed import SingleProcessGroup, init_process_group, run_on_leader

REPOSITORY = Path(__file__).parents[2]


def test_collectives_over_two_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.group_worker"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    group = init_process_group(device="cpu")
    assert isinstance(group, SingleProcessGroup)
    assert (group.rank, group.world_size, group.is_leader) == (0, 1, True)
    assert group.broadcast_object("x") == "x"
    assert group.gather_objects("x") == ["x"]
    assert group.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    assert group.all_reduce_ints([3, 4], op="max") == [3, 4]
    assert run_on_leader(group, lambda: 5) == 5
    group.barrier()
    group.close()


def test_an_incomplete_environment_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing"):
        init_process_group(device="cpu")
