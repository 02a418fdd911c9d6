from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_an_lm_head_spread_over_ranks_gives_the_loss_and_gradient_of_a_whole_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.loss_worker"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
