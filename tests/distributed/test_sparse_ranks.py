from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.tp(2)
@pytest.mark.parametrize("family", ["deepseekv2", "deepseekv3", "qwen3moe"])
def test_a_sparse_target_over_two_ranks_decodes_as_one_process_does(
    family: str, tmp_path: Path
) -> None:
    run_worker(tmp_path / "target", family, "decode")


@pytest.mark.tp(2)
def test_features_of_a_sparse_target_over_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    run_worker(tmp_path, "deepseekv3", "dump")


def run_worker(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.sparse_worker", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
