"""Counts what operators do, on any device: bytes of living tensors, their peak, and operations.

On ``meta`` tensors those are memory and arithmetic of a computation that is not carried out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry


class OperatorMeter(TorchDispatchMode):
    """While active: ``now`` and ``peak`` bytes of storages made by operators, and the ``flops`` of
    matrix products (as torch counts them: two per multiply-add).

    Storages of ``known`` tensors are left out, and so is what an operator needs inside and frees
    before it returns.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.flops = 0
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self._remember(tensor, 0)

    def restart_peak(self) -> None:
        """Forget the peak so far: it becomes what is alive now."""
        self.peak = self.now

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        tree_map_only(torch.Tensor, self._note, out)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage()._cdata not in self._sizes:
            self._remember(tensor, tensor.untyped_storage().nbytes())
            self.peak = max(self.peak, self.now)

    def _remember(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        self._sizes[storage._cdata] = size
        self.now += size
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
