"""A recorder of graphs for the CPU: it notes every operator and its tensors, and replays them.

As with a CUDA graph, a replay runs no Python of the recorded function: whatever was a number on the
host stays what it was, and every operator reads and writes the memory that it had when recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.cuda_graph import GraphRecorder
from runtime.no_wait import no_wait


class OperatorRecorder(GraphRecorder):
    """``num_recorded`` and ``num_replays`` count graphs and replays of any of them."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0

    def record(self, body: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        body()
        noted = _Notes()
        with no_wait(), noted:
            result = body()
        result.zero_()  # recording computes nothing
        self.num_recorded += 1

        def replay() -> None:
            self.num_replays += 1
            noted.replay()

        return result, replay


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        own = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        fresh = [
            leaf if torch.is_tensor(leaf) and _memory(leaf) not in own else None
            for leaf in tree_leaves(result)
        ]
        self._calls.append((func, args, kwargs, fresh))
        return result

    def replay(self) -> None:
        for func, args, kwargs, places in self._calls:
            results = tree_leaves(func(*args, **kwargs))
            for place, result in zip(places, results, strict=True):
                if place is not None:
                    place.copy_(result)


def _memory(tensor: torch.Tensor) -> int:
    is_packed_weight = tensor.layout is torch._mkldnn  # type: ignore[attr-defined]
    return id(tensor) if is_packed_weight else tensor.untyped_storage().data_ptr()
