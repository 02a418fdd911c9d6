"""The process group of a command, from torchrun's environment, and work for its leader alone.

The groups themselves live in :mod:`runtime.parallel`.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from mtp_train.errors import StageRefusedError
from runtime.parallel import (
    DEFAULT_TIMEOUT_S,
    ProcessGroup,
    ProcessMesh,
    SingleProcessGroup,
    TorchProcessGroup,
)

__all__ = [
    "ProcessGroup",
    "ProcessMesh",
    "SingleProcessGroup",
    "TorchProcessGroup",
    "init_process_group",
    "run_alone",
    "run_on_leader",
]

T = TypeVar("T")
Backend = Literal["auto", "gloo", "nccl"]
_ERROR_CHARACTERS = 2000  # of what a process said last
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def init_process_group(
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    backend: Backend = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ProcessGroup:
    """The group of this process, from torchrun's environment; without it, a single process.

    ``auto`` picks CUDA (and nccl) where a device exists. An already initialised default group is
    wrapped, not created again. Raises ``ValueError`` when the environment is incomplete.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    present = [name for name in _ENVIRONMENT if name in os.environ]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return SingleProcessGroup(
            torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        )
    if len(present) != len(_ENVIRONMENT):
        missing = ", ".join(name for name in _ENVIRONMENT if name not in present)
        raise ValueError(
            f"environment: {', '.join(present)} set but {missing} missing; start with torchrun"
        )
    local_device = torch.device("cpu")
    if device == "cuda":
        local_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local_device)
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    owns_group = not dist.is_initialized()
    if owns_group:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    world = dist.group.WORLD
    assert world is not None, "the default group was just initialised"
    return TorchProcessGroup(
        world,
        device=local_device,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])),
        owns_group=owns_group,
        timeout_s=timeout_s,
    )


def run_on_leader(group: ProcessGroup, function: Callable[[], T]) -> T:
    """Call ``function`` on the leader only; its result, or its error, is everybody's (pickled)."""
    outcome: tuple[T | None, Exception | None] = (None, None)
    if group.is_leader:
        try:
            outcome = (function(), None)
        except (ValueError, OSError, RuntimeError) as failure:
            outcome = (None, failure)
    result, failed = group.broadcast_object(outcome)
    if failed is not None:
        raise failed
    return result


def run_alone(module: str, *arguments: str, work: str) -> None:
    """``python -m module`` in a process that is no rank, whoever starts it; waits for its end.

    Raises :class:`StageRefusedError` with the process's last words where ``work`` failed.
    """
    environment = {n: value for n, value in os.environ.items() if n not in _LAUNCHER_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise StageRefusedError(
            f"{work} failed in its process (exit {done.returncode}): "
            f"{done.stderr[-_ERROR_CHARACTERS:].strip()}"
        )
