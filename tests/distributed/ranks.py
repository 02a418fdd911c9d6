"""Ranks as forked processes with torchrun's environment, for workers that tests start."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells one of ``world_size`` ranks of this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_ranks(exercise: Callable[[int], None], world_size: int) -> None:
    """Call ``exercise(rank)`` in a process per rank; exits with the worst of their codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            os.environ |= torchrun_environment(rank, world_size, port)
            exercise(rank)
            sys.exit(0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(map(abs, codes)))
