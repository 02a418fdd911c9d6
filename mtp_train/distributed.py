"""The process group of a command, from torchrun's environment, and work for its leader alone.

The groups themselves live in :mod:`runtime.parallel`.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

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
    "run_on_leader",
    "without_launcher",
]

T = TypeVar("T")
Backend = Literal["auto", "gloo", "nccl"]
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


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that a rank starts and that is no rank itself."""
    return {name: value for name, value in environment.items() if name not in _LAUNCHER_VARIABLES}
