from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.tp(4)
def test_two_copies_over_two_ranks_each_decode_as_one_process_does(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.tensor_parallel_worker", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
