"""Ranks as threads of one process: every collective of a process group without starting processes.

A rank that fails takes the others along, so that a broken collective is an error and not a wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from runtime.parallel import ProcessGroup, ProcessMesh, ReduceOp, check_divides

T = TypeVar("T")
_TIMEOUT_S = 60


class Exchange:
    """Where the ranks meet."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=_TIMEOUT_S)
        self.values: list[Any] = [None] * world_size
        self.parts: dict[str, Any] = {}


class ThreadGroup(ProcessGroup):
    """One rank. ``calls`` counts its collectives by name."""

    def __init__(self, rank: int, world_size: int, exchange: Exchange) -> None:
        self.rank, self.world_size = rank, world_size
        self.local_world_size = world_size
        self.device = torch.device("cpu")
        self.calls: dict[str, int] = {}
        self._exchange = exchange

    def _swap(self, name: str, value: Any) -> list[Any]:
        self.calls[name] = self.calls.get(name, 0) + 1
        self._exchange.values[self.rank] = (name, value)
        self._exchange.barrier.wait()
        met = list(self._exchange.values)
        assert {other for other, _ in met} == {name}, f"ranks met in {[n for n, _ in met]}"
        return [other for _, other in met]

    def barrier(self) -> None:
        self._swap("barrier", None)
        self._exchange.barrier.wait()

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        values = self._swap("broadcast_object", value)
        self._exchange.barrier.wait()
        return values[source]

    def gather_objects(self, value: Any) -> list[Any]:
        values = self._swap("gather_objects", value)
        self._exchange.barrier.wait()
        return values

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        return self._broadcast("broadcast", tensor, source)

    def broadcast_host(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        return self._broadcast("broadcast_host", tensor, source)

    def _broadcast(self, name: str, tensor: torch.Tensor, source: int) -> torch.Tensor:
        assert tensor.is_contiguous(), "collectives take contiguous tensors"
        sent = self._swap(name, tensor)[source]
        assert sent.shape == tensor.shape, f"{name}: {list(sent.shape)} for {list(tensor.shape)}"
        assert sent.dtype == tensor.dtype, f"{name}: {sent.dtype} for {tensor.dtype}"
        if self.rank != source:
            tensor.copy_(sent)
        self._exchange.barrier.wait()
        return tensor

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum") -> torch.Tensor:
        assert tensor.is_contiguous(), "collectives take contiguous tensors"
        stacked = torch.stack(self._swap("all_reduce", tensor))
        self._exchange.barrier.wait()
        reduced = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]
        return tensor.copy_(reduced)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        stacked = torch.stack(self._swap("all_gather", tensor))
        self._exchange.barrier.wait()
        return stacked

    def split(self, width: int) -> ProcessMesh:
        check_divides(width, self.world_size)
        block, place = divmod(self.rank, width)
        if self.rank == 0:
            self._exchange.parts = {
                "tensor": [Exchange(width) for _ in range(self.world_size // width)],
                "data": [Exchange(self.world_size // width) for _ in range(width)],
            }
        self.barrier()
        parts = self._exchange.parts
        return ProcessMesh(
            data=ThreadGroup(block, self.world_size // width, parts["data"][place]),
            tensor=ThreadGroup(place, width, parts["tensor"][block]),
        )

    def close(self) -> None:
        return None


def run_ranks(world_size: int, function: Callable[[ThreadGroup], T]) -> list[T]:
    """``function`` on every rank at once; results in rank order, or the first failure."""
    exchange = Exchange(world_size)
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def live(rank: int) -> None:
        try:
            results[rank] = function(ThreadGroup(rank, world_size, exchange))
        except BaseException as error:
            failures.append(error)
            exchange.barrier.abort()
            for part in exchange.parts.values():
                for inner in part:
                    inner.barrier.abort()

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        first = [e for e in failures if not isinstance(e, threading.BrokenBarrierError)]
        raise (first or failures)[0]
    return results
