"""Process groups as objects: created once from torchrun's environment, then passed as arguments.

A single-process group implements the same interface, so callers never ask for the world size to
choose a code path. Every method but the properties is a collective: all ranks call it, in order.
"""

from __future__ import annotations

import datetime
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
ReduceOp = Literal["sum", "max", "min"]
Backend = Literal["auto", "gloo", "nccl"]
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class ProcessGroup(ABC):
    """What the stages may ask of the ranks they run on."""

    rank: int
    world_size: int
    local_world_size: int  # ranks that share this machine
    device: torch.device

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called."""

    @abstractmethod
    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        """The ``value`` of rank ``source``, on every rank (pickled; host memory)."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value`` in rank order, on every rank (pickled; host memory)."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` (on :attr:`device`) with that of rank ``source``; returns it."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce ``tensor`` (on :attr:`device`) in place over all ranks; returns it."""

    def all_reduce_ints(self, values: Sequence[int], *, op: ReduceOp = "sum") -> list[int]:
        """Reduce int64 counts element by element."""
        counts = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        return [int(value) for value in self.all_reduce(counts, op=op).tolist()]

    @abstractmethod
    def close(self) -> None:
        """Release what :func:`init_process_group` created."""


class SingleProcessGroup(ProcessGroup):
    """One process: every collective is the identity."""

    def __init__(self, device: torch.device) -> None:
        self.rank = 0
        self.world_size = 1
        self.local_world_size = 1
        self.device = device

    def barrier(self) -> None:
        return None

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        return tensor

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum") -> torch.Tensor:
        return tensor

    def close(self) -> None:
        return None


class TorchProcessGroup(ProcessGroup):
    """Ranks over ``torch.distributed`` (gloo or nccl)."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        local_world_size: int,
        owns_group: bool = False,
    ) -> None:
        self.group = group
        self.local_world_size = local_world_size
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._owns_group = owns_group

    def barrier(self) -> None:
        dist.barrier(self.group)

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        values = [value]
        source_rank = dist.get_global_rank(self.group, source)
        dist.broadcast_object_list(values, src=source_rank, group=self.group, device=self.device)
        return values[0]

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        dist.broadcast(tensor, src=dist.get_global_rank(self.group, source), group=self.group)
        return tensor

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum") -> torch.Tensor:
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        dist.all_reduce(tensor, op=reduce_op[op], group=self.group)
        return tensor

    def close(self) -> None:
        if self._owns_group:
            dist.destroy_process_group(self.group)


def init_process_group(
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    backend: Backend = "auto",
    timeout_s: float = 1800.0,
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
