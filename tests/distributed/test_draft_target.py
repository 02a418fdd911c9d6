"""The draft model lives on the leader of the target's group; the other ranks do without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
