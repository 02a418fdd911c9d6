"""Getting results to the host: enqueue a copy, go on, wait for it later.

The order is a contract (docs/architecture.md): the copy of a step's token ids is enqueued *before*
the draft extension and the host waits for it *after*, so that the wait hides behind the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class HostTransfer(ABC):
    """Copies device tensors to the host without blocking until asked."""

    is_async: bool  # the device goes on working while the host does something else

    @abstractmethod
    def enqueue(self, *tensors: torch.Tensor) -> Any:
        """Start copying; the result is an opaque handle. Never waits."""

    @abstractmethod
    def wait(self, handle: Any) -> tuple[list[Any], ...]:
        """Wait for one handle's copies: each tensor as (nested) Python lists."""

    def mark(self, name: str) -> None:  # noqa: B027 - optional for implementations
        """Called when a piece of device work named ``name`` has been enqueued (for order tests)."""


class ImmediateTransfer(HostTransfer):
    """For devices that execute synchronously (CPU)."""

    is_async = False

    def enqueue(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    def wait(self, handle: tuple[torch.Tensor, ...]) -> tuple[list[Any], ...]:
        return tuple(tensor.tolist() for tensor in handle)


class CudaTransfer(HostTransfer):
    """Pinned buffers and an event on the current stream."""

    is_async = True

    def enqueue(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        copies = []
        for tensor in tensors:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(pinned.copy_(tensor, non_blocking=True))
        event = torch.cuda.Event()
        event.record()
        return copies, event

    def wait(self, handle: tuple[list[torch.Tensor], torch.cuda.Event]) -> tuple[list[Any], ...]:
        copies, event = handle
        event.synchronize()
        return tuple(copy.tolist() for copy in copies)


def transfer_for(device: torch.device) -> HostTransfer:
    return CudaTransfer() if device.type == "cuda" else ImmediateTransfer()
