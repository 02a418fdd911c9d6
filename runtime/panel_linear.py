"""Linear layers through the fused CPU kernels, and decoder blocks made of them.

Weights lie in panels of sixteen outputs, in the order in which the kernel reads them. Every output
is summed over the inputs in order, whatever the number of rows: one row and K+1 rows of a step give
the same bits.

Shape legend: M rows, O output features, I input features, P panels, W words of 32 bits per row.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from runtime.cpu_kernels import CpuKernels
from runtime.huge_pages import HugePageArena
from runtime.linear import Linear

PANEL = 16  # outputs of one panel: lanes of a vector


class PanelLinear(Linear):
    """Float32 and bfloat16 on a CPU; :meth:`CpuKernels.has_products` says whether it is at home."""

    is_packed = True

    def __init__(
        self,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None = None,
        *,
        kernels: CpuKernels,
        arena: HugePageArena | None = None,
    ) -> None:
        """``arena``: where a model's panels lie together (default: an allocation of their own)."""
        super().__init__(weight_OI, None if bias_O is None else bias_O.float())
        self._kernels = kernels
        self._panels_PW16 = _to_panels(weight_OI, arena or HugePageArena(0))

    @staticmethod
    def can_hold(weight_OI: torch.Tensor) -> bool:
        """Whether rows are whole words."""
        return weight_OI.shape[1] % _per_word(weight_OI.dtype) == 0

    @property
    def kernels(self) -> CpuKernels:
        return self._kernels

    @property
    def panels(self) -> torch.Tensor:
        return self._panels_PW16

    @property
    def bias_O(self) -> torch.Tensor | None:
        return self._bias

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        return self._kernels.linear(
            x_MI.contiguous(), self._panels_PW16, self._bias, outputs=self.out_features
        )

    def dense_weight(self) -> torch.Tensor:
        words = self._panels_PW16.view(self.dtype).unflatten(-1, (PANEL, -1))
        return words.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features].contiguous()


def _per_word(dtype: torch.dtype) -> int:
    return 4 // dtype.itemsize


def _to_panels(weight_OI: torch.Tensor, arena: HugePageArena) -> torch.Tensor:
    """int32 ``[P, W, 16]``; zeros behind the last output."""
    outputs, _ = weight_OI.shape
    padded = F.pad(weight_OI, (0, 0, 0, -outputs % PANEL)) if outputs % PANEL else weight_OI
    words = padded.contiguous().view(-1, PANEL, padded.shape[1]).view(torch.int32).transpose(1, 2)
    return arena.empty(words.shape, torch.int32).copy_(words)
