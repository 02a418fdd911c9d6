"""Weights as quantised checkpoints store them, and what they stand for.

A weight is int8 or fp8 (e4m3) with one scale per block of outputs and inputs: the whole tensor, a
row (a channel), a run of inputs within a row (a group), or a rectangle. What it stands for is
``(value - zero point) * scale``, computed in float32 and rounded once.

Shape legend: O output features, I input features, P and Q blocks of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

BlockSize = tuple[int, int]  # of outputs and inputs


@dataclass(frozen=True)
class StoredWeight:
    """``values`` int8 or float8_e4m3fn ``[O, I]``; ``scale`` float32 ``[P, Q]``; ``zero_point``
    int8 ``[P, Q]``, or ``None`` for zeros. ``block`` values share a scale; the last ones may be
    cut.
    """

    values_OI: torch.Tensor
    scale_PQ: torch.Tensor
    block: BlockSize
    zero_point_PQ: torch.Tensor | None = None

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """``[O, I]`` on the same device."""
        weight_OI = self.values_OI.float()
        if self.zero_point_PQ is not None:
            weight_OI -= self._per_value(self.zero_point_PQ)
        return weight_OI.mul_(self._per_value(self.scale_PQ)).to(dtype)

    def rows(self, start: int, stop: int) -> StoredWeight:
        """Outputs ``start`` to ``stop``, a view. Blocks must be of single rows."""
        assert self.block[0] == 1, "rows of a block share a scale"
        zero_point = self.zero_point_PQ
        return replace(
            self,
            values_OI=self.values_OI[start:stop],
            scale_PQ=self.scale_PQ[start:stop],
            zero_point_PQ=None if zero_point is None else zero_point[start:stop],
        )

    def by_rows(self) -> StoredWeight:
        """The same with scales for every output: a block is then ``(1, block[1])``."""
        zero_point = self.zero_point_PQ
        return replace(
            self,
            scale_PQ=self._per_output(self.scale_PQ),
            zero_point_PQ=None if zero_point is None else self._per_output(zero_point),
            block=(1, self.block[1]),
        )

    def num_bytes(self) -> int:
        """Of values, scales and zero points."""
        tensors = [self.values_OI, self.scale_PQ]
        if self.zero_point_PQ is not None:
            tensors.append(self.zero_point_PQ)
        return sum(tensor.nbytes for tensor in tensors)

    def to(self, device: torch.device) -> StoredWeight:
        zero_point = self.zero_point_PQ
        return replace(
            self,
            values_OI=self.values_OI.to(device),
            scale_PQ=self.scale_PQ.to(device),
            zero_point_PQ=None if zero_point is None else zero_point.to(device),
        )

    def _per_output(self, blocks_PQ: torch.Tensor) -> torch.Tensor:
        return blocks_PQ.repeat_interleave(self.block[0], 0)[: self.values_OI.shape[0]]

    def _per_value(self, blocks_PQ: torch.Tensor) -> torch.Tensor:
        """float32, to be multiplied with ``[O, I]``; one column where rows have a single one."""
        per_output_OQ = self._per_output(blocks_PQ).float()
        if per_output_OQ.shape[1] == 1:
            return per_output_OQ
        columns = self.values_OI.shape[1]
        return per_output_OQ.repeat_interleave(self.block[1], 1)[:, :columns]


def stack_weights(parts: Sequence[StoredWeight]) -> StoredWeight | None:
    """One weight whose outputs are those of ``parts``, one after the other; ``None`` where they are
    stored differently.
    """
    if len(parts) == 1:
        return parts[0]
    rows = [part.by_rows() for part in parts]
    kinds = {(w.values_OI.dtype, w.block[1], w.zero_point_PQ is None) for w in rows}
    if len(kinds) > 1:
        return None
    zero_points = [w.zero_point_PQ for w in rows if w.zero_point_PQ is not None]
    return StoredWeight(
        _stack([w.values_OI for w in rows]),
        torch.cat([w.scale_PQ for w in rows]),
        rows[0].block,
        torch.cat(zero_points) if zero_points else None,
    )


def scale_shape(weight_shape: Sequence[int], block: BlockSize) -> tuple[int, ...]:
    """``(P, Q)``."""
    return tuple(-(-size // part) for size, part in zip(weight_shape, block, strict=True))


def unpack_int8(packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """int8 ``[O, I]`` from int32 ``[O, ceil(I / 4)]``: four values in a word, the first in its
    lowest byte, each with 128 added (``pack-quantized`` of compressed-tensors at eight bits).
    """
    bytes_OI = packed.contiguous().view(torch.uint8)[:, : shape[1]]
    return (bytes_OI.to(torch.int16) - 128).to(torch.int8)


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.cat`` of fp8 too."""
    merged = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
    return merged.view(parts[0].dtype)
