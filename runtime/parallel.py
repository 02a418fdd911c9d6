"""Process groups as objects: created once, then passed as arguments.

A single-process group implements the same interface, so callers never ask for the world size to
choose a code path. Every method but the properties is a collective: all ranks call it, in order.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

ReduceOp = Literal["sum", "max", "min"]
DEFAULT_TIMEOUT_S = 1800.0


class PendingSum(ABC):
    """A sum over ranks that has been started."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """The sum. On a GPU the stream waits for it, not the host."""


@dataclass(frozen=True)
class FinishedSum(PendingSum):
    """Of a group that does not go on by itself."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True)
class RunningSum(PendingSum):
    """What the backend of ``torch.distributed`` works on."""

    work: dist.Work
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.tensor


class ProcessGroup(ABC):
    """What models, engines and stages may ask of the ranks they run on."""

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
    def broadcast_host(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        """As :meth:`broadcast`, of a tensor in host memory whatever :attr:`device` is.

        Never touches the device, so nobody waits for it.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce ``tensor`` (on :attr:`device`) in place over all ranks; returns it.

        The result is the same, bit for bit, on every rank.
        """

    def start_all_reduce(self, tensor: torch.Tensor) -> PendingSum:
        """:meth:`all_reduce` with ``sum``, on its way where the group can: nobody may touch
        ``tensor`` until it has been waited for. All ranks start and wait in the same order.
        """
        return FinishedSum(self.all_reduce(tensor))

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Equal shapes from every rank (on :attr:`device`), stacked in rank order: ``[W, …]``."""

    @abstractmethod
    def split(self, width: int) -> ProcessMesh:
        """Cut the ranks into blocks of ``width`` neighbours.

        Raises ``ValueError`` when ``width`` does not divide the number of ranks.
        """

    def all_reduce_ints(self, values: Sequence[int], *, op: ReduceOp = "sum") -> list[int]:
        """Reduce int64 counts element by element."""
        counts = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        return [int(value) for value in self.all_reduce(counts, op=op).tolist()]

    @abstractmethod
    def close(self) -> None:
        """Release the group, where this object owns it."""


@dataclass(frozen=True)
class ProcessMesh:
    """This rank's two groups: ``tensor`` (its block of neighbours, which share one copy of the
    weights) and ``data`` (the ranks at the same place in every block).
    """

    data: ProcessGroup
    tensor: ProcessGroup


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

    def broadcast_host(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        return tensor

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum") -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[None]

    def split(self, width: int) -> ProcessMesh:
        check_divides(width, self.world_size)
        return ProcessMesh(data=self, tensor=self)

    def close(self) -> None:
        return None


class TorchProcessGroup(ProcessGroup):
    """Ranks over ``torch.distributed``: gloo, or nccl with a gloo group beside it for the host."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        local_world_size: int,
        owns_group: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.group = group
        self.local_world_size = local_world_size
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._owns_group = owns_group
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._host_group = group if device.type == "cpu" else None

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

    def broadcast_host(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        assert tensor.device.type == "cpu", "broadcast_host is for host memory"
        if self._host_group is None:
            ranks = dist.get_process_group_ranks(self.group)
            self._host_group = dist.new_group(
                ranks, backend="gloo", timeout=self._timeout, use_local_synchronization=True
            )
        group = self._host_group
        assert isinstance(group, dist.ProcessGroup), "this rank is not in its own group"
        dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)
        return tensor

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum") -> torch.Tensor:
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        dist.all_reduce(tensor, op=reduce_op[op], group=self.group)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> PendingSum:
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None, "this rank is not in its own group"
        return RunningSum(work, tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        dist.all_gather(list(gathered.unbind()), tensor.contiguous(), group=self.group)
        return gathered

    def split(self, width: int) -> ProcessMesh:
        check_divides(width, self.world_size)
        ranks = dist.get_process_group_ranks(self.group)
        blocks = [ranks[start : start + width] for start in range(0, len(ranks), width)]
        tensor = self._subgroup(blocks, min(width, self.local_world_size))
        places = [list(place) for place in zip(*blocks, strict=True)]
        data = self._subgroup(places, max(1, self.local_world_size // width))
        return ProcessMesh(data=data, tensor=tensor)

    def _subgroup(self, parts: Sequence[list[int]], local_world_size: int) -> TorchProcessGroup:
        """The part that this rank is in; all ranks create all parts, in the same order."""
        mine = None
        for ranks in parts:
            group = dist.new_group(ranks, timeout=self._timeout)
            if dist.get_rank() in ranks:
                mine = group
        assert isinstance(mine, dist.ProcessGroup), "this rank is in none of the parts"
        return TorchProcessGroup(
            mine,
            device=self.device,
            local_world_size=local_world_size,
            timeout_s=self._timeout.total_seconds(),
        )

    def close(self) -> None:
        if self._owns_group:
            dist.destroy_process_group(self.group)


def check_divides(width: int, world_size: int) -> None:
    """Raise ``ValueError`` unless ``world_size`` ranks can be cut into blocks of ``width``."""
    if width < 1 or world_size % width:
        raise ValueError(
            f"{world_size} process(es) cannot be cut into groups of {width}; start a multiple of "
            f"{width} with torchrun --nproc-per-node"
        )
