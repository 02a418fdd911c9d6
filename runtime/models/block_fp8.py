"""Weights in fp8 with one float32 scale per block, as DeepSeek-V3 publishes them, made plain when
they are read. Activations stay what they are: an engine that computes in fp8 rounds those too.

Shape legend: O output features, I input features, P and Q blocks of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

SCALE_SUFFIX = "_scale_inv"  # of the name of a weight; what the stored values are multiplied by

BlockSize = tuple[int, int]  # of outputs and inputs


def read_block_size(raw: Mapping[str, Any], source: str) -> BlockSize | None:
    """``None`` for an unquantised checkpoint. Raises ``ValueError`` for another quantisation."""
    stated = raw.get("quantization_config")
    if stated is None:
        return None
    values = stated if isinstance(stated, Mapping) else {}
    block = values.get("weight_block_size")
    if values.get("quant_method") == "fp8" and isinstance(block, list) and len(block) == 2:
        rows, columns = block
        if type(rows) is int and type(columns) is int:
            return rows, columns
    raise ValueError(
        f"{source}: quantization_config={stated!r}; supported: no quantisation, or "
        "quant_method='fp8' with a weight_block_size of two numbers (de-quantised when loaded)"
    )


def scale_shape(weight_shape: tuple[int, ...], block: BlockSize) -> tuple[int, ...]:
    return tuple(-(-size // part) for size, part in zip(weight_shape, block, strict=True))


def dequantise(weight_OI: torch.Tensor, scale_PQ: torch.Tensor, block: BlockSize) -> torch.Tensor:
    """float32 ``[O, I]``: each value times the scale of its block; the last blocks may be cut."""
    rows, columns = weight_OI.shape
    scale = scale_PQ.float().repeat_interleave(block[0], 0)[:rows]
    return weight_OI.float().mul_(scale.repeat_interleave(block[1], 1)[:, :columns])
