"""What chosen experts make of rows: a product per expert, or one grouped product for all of them.

Both sort rows by expert and put results back, so that what a row gets does not depend on the others
of its batch. A product per expert takes any form of linear (packed, quantised) and makes the host
wait for how many rows each expert has. A grouped product needs plain stacked weights, and the host
waits for nothing.

Shape legend: N rows, D model width, E experts chosen per row, P = N*E pairs of a row and an expert,
X experts here, I width of an expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from runtime.layers import GatedMlp
from runtime.linear import LinearSource, TensorSource
from runtime.ops import BlockOps

_ALIGNMENT = 16  # bytes of a row that grouped products want a multiple of


class ExpertProducts(ABC):
    """Experts of this rank, ``own``, which are neighbours."""

    def __init__(self, own: range, num_experts: int) -> None:
        self.own = own
        self._num_experts = num_experts

    @abstractmethod
    def __call__(self, x_ND: torch.Tensor, ids_NE: torch.Tensor) -> torch.Tensor:
        """``[N, E, D]``: of every row, what each of its experts (int64 ids) makes of it; zeros for
        experts that are not here.
        """

    @abstractmethod
    def num_bytes(self) -> int:
        """Of the weights."""


class LoopedExperts(ExpertProducts):
    """A gated MLP for each expert, called where it has rows."""

    def __init__(self, own: range, num_experts: int, mlps: Sequence[GatedMlp]) -> None:
        super().__init__(own, num_experts)
        self._mlps = mlps

    def __call__(self, x_ND: torch.Tensor, ids_NE: torch.Tensor) -> torch.Tensor:
        counts = _counts_on_host(ids_NE, self._num_experts)
        before, here = sum(counts[: self.own.start]), counts[self.own.start : self.own.stop]
        by_expert = ids_NE.flatten().argsort(stable=True)[before : before + sum(here)]
        inputs = x_ND.index_select(0, by_expert // ids_NE.shape[1])
        outputs_PD = x_ND.new_zeros(ids_NE.numel(), x_ND.shape[1])
        parts = [
            mlp.own_part(rows)
            for mlp, rows in zip(self._mlps, inputs.split(here), strict=True)
            if len(rows)
        ]
        if parts:
            outputs_PD.index_copy_(0, by_expert, torch.cat(parts))
        return outputs_PD.unflatten(0, ids_NE.shape)

    def num_bytes(self) -> int:
        return sum(mlp.gate_up.num_bytes() + mlp.down.linear.num_bytes() for mlp in self._mlps)


class GroupedExperts(ExpertProducts):
    """Two grouped products. ``gate_up_XOD``, O = 2I, and ``down_XDI``: one dtype and device."""

    def __init__(
        self,
        own: range,
        num_experts: int,
        gate_up_XOD: torch.Tensor,
        down_XDI: torch.Tensor,
        ops: BlockOps,
    ) -> None:
        super().__init__(own, num_experts)
        self._gate_up_XDO = gate_up_XOD.transpose(1, 2)
        self._down_XID = down_XDI.transpose(1, 2)
        self._ops = ops

    def __call__(self, x_ND: torch.Tensor, ids_NE: torch.Tensor) -> torch.Tensor:
        # Experts of this rank come first, so that the first group begins with the first row.
        ids_P = (ids_NE.flatten() - self.own.start) % self._num_experts
        sorted_P, order_P = ids_P.sort(stable=True)
        own_X = torch.arange(len(self.own), device=ids_P.device)
        ends_X = torch.searchsorted(sorted_P, own_X, right=True).int()
        inputs_PD = x_ND.index_select(0, order_P // ids_NE.shape[1])
        inner_PO = F.grouped_mm(inputs_PD, self._gate_up_XDO, offs=ends_X)
        found_PD = F.grouped_mm(self._ops.silu_mul(inner_PO), self._down_XID, offs=ends_X)
        # Rows behind the last group are not written.
        is_elsewhere_P = sorted_P >= len(self.own)
        outputs_PD = torch.empty_like(inputs_PD)
        outputs_PD.index_copy_(0, order_P, found_PD.masked_fill(is_elsewhere_P[:, None], 0.0))
        return outputs_PD.unflatten(0, ids_NE.shape)

    def num_bytes(self) -> int:
        return self._gate_up_XDO.nbytes + self._down_XID.nbytes


def prefers_grouped(device: torch.device, dtype: torch.dtype, *, width: int, inner: int) -> bool:
    """Whether plain experts of these widths are computed by grouped products.

    On a CPU they are not: torch's kernel there is a loop of its own, and was no faster (figures in
    ``docs/architecture.md``). On CUDA torch has a kernel for bfloat16 with aligned rows.
    """
    is_aligned = all(size * dtype.itemsize % _ALIGNMENT == 0 for size in (width, inner))
    return device.type == "cuda" and dtype == torch.bfloat16 and is_aligned


def stack_experts(
    own: range, take: TensorSource, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``gate_up_XOD`` and ``down_XDI`` of the experts ``own``; one tensor is taken at a time."""
    assert not isinstance(take, LinearSource), "stored forms of linears are not stacked"
    down_shape = shapes[f"mlp.experts.{own.start}.down_proj.weight"]
    width, inner = down_shape
    gate_up_XOD = down_XDI = torch.empty(0)
    for row, index in enumerate(own):
        for part, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            weight = take(f"mlp.experts.{index}.{name}.weight")
            if not row and not part:
                gate_up_XOD = weight.new_empty(len(own), 2 * inner, width)
                down_XDI = weight.new_empty(len(own), width, inner)
            place = down_XDI[row] if part == 2 else gate_up_XOD[row].unflatten(0, (2, inner))[part]
            place.copy_(weight)
    return gate_up_XOD, down_XDI


def _counts_on_host(ids_NE: torch.Tensor, num_experts: int) -> list[int]:
    """Rows per expert. Waits for the device: the host has to know what to multiply."""
    return ids_NE.flatten().bincount(minlength=num_experts).tolist()
