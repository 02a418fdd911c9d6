"""A guard against waiting for the device: inside it, reading a tensor's value raises.

On a CPU nothing ever waits, so a wait that would stall a GPU goes unseen; this makes it an error.
Python-level reads (``.item()``, ``.tolist()``, ``.numpy()``, ``.cpu()``, ``.to("cpu")``, truth
values, ints, text) are caught by a function mode, operators with data-dependent shapes by a
dispatch mode. On a GPU use ``torch.cuda.set_sync_debug_mode("error")`` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
        "__contains__",
        "__format__",
        "__repr__",
    }
)
_DATA_DEPENDENT = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::is_nonzero",
        "aten::nonzero",
        "aten::nonzero_numpy",
        "aten::argwhere",
        "aten::masked_select",
        "aten::_unique",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::unique_dim_consecutive",
        "aten::bincount",
        "aten::equal",
        "aten::allclose",
    }
)


class DeviceWaitError(RuntimeError):
    """Code under :func:`no_wait` tried to read a value from the device."""


@contextmanager
def no_wait() -> Iterator[None]:
    """Raise :class:`DeviceWaitError` on any operation that would wait for the device."""
    with _NoReads(), _NoDataDependentShapes():
        yield


class _NoReads(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise DeviceWaitError(f"{name} reads a value from the device")
        if name == "to" and _targets_cpu(args, kwargs or {}):
            raise DeviceWaitError(".to('cpu') reads a value from the device")
        return func(*args, **(kwargs or {}))


class _NoDataDependentShapes(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().split(".")[0]
        if name in _DATA_DEPENDENT:
            raise DeviceWaitError(f"{func.name()} has a data-dependent result")
        if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            raise DeviceWaitError("repeat_interleave without output_size waits for the device")
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                raise DeviceWaitError(f"{func.name()} with a boolean mask waits for the device")
        return func(*args, **kwargs)


def _targets_cpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    candidates = [*args[1:], *kwargs.values()]
    return any(
        (isinstance(value, torch.device) and value.type == "cpu") or value == "cpu"
        for value in candidates
        if isinstance(value, torch.device | str)
    )
