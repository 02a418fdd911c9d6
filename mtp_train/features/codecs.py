"""Codecs of the feature store: how hidden states lie on disk.

``fp8_e4m3`` keeps one fp32 scale per token, ``amax / 448``; everything else is a plain cast.
Residual streams beside ``g`` have a scale each. Torch's cast to fp8 does not saturate (449 and
above become NaN), so values are clamped first.
Shape legend: N rows, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mtp_train.config import Codec

FP8_MAX = 448.0  # largest finite float8_e4m3fn
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny

STORED_DTYPES: dict[Codec, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp32": torch.float32,
}
# Largest magnitude that stays finite. A float32 above bf16's maximum may round to infinity.
_LARGEST: dict[Codec, float] = {
    "bf16": torch.finfo(torch.bfloat16).max,
    "fp8_e4m3": torch.finfo(torch.float32).max,
    "fp32": torch.finfo(torch.float32).max,
}


@dataclass(frozen=True)
class EncodedRows:
    """Rows as stored: ``hidden_ND`` in the codec's dtype, ``scale_N`` fp32 (``fp8_e4m3`` only)."""

    hidden_ND: torch.Tensor = field(repr=False)
    scale_N: torch.Tensor | None = field(repr=False, default=None)


def has_scale(codec: Codec) -> bool:
    return codec == "fp8_e4m3"


def bytes_per_row(codec: Codec, hidden_size: int) -> int:
    """Bytes of one encoded row, its scale included."""
    return hidden_size * STORED_DTYPES[codec].itemsize + (4 if has_scale(codec) else 0)


def storable_rows(hidden_ND: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Bool ``[N]``: true where the row is finite and stays finite in the codec."""
    if hidden_ND.shape[1] == 0:
        return torch.ones(hidden_ND.shape[0], dtype=torch.bool)
    # NaN propagates through amax and fails the comparison, infinity exceeds the bound.
    return hidden_ND.float().abs().amax(dim=1) <= _LARGEST[codec]


def encode_layers(layers_NE: torch.Tensor, codec: Codec, *, width: int) -> EncodedRows:
    """As :func:`encode`, every ``width`` columns with a scale of their own, ``[N, E / width]``."""
    rows = encode(layers_NE.reshape(-1, width), codec)
    scale = None if rows.scale_N is None else rows.scale_N.view(len(layers_NE), -1)
    return EncodedRows(rows.hidden_ND.view(layers_NE.shape), scale)


def decode_layers(rows: EncodedRows, *, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`encode_layers`, ``[N, E]``."""
    scale = None if rows.scale_N is None else rows.scale_N.reshape(-1)
    flat = EncodedRows(rows.hidden_ND.reshape(-1, width), scale)
    return decode(flat, dtype=dtype).view(rows.hidden_ND.shape)


def encode(hidden_ND: torch.Tensor, codec: Codec) -> EncodedRows:
    """Encode rows ``[N, D]`` (any float dtype, CPU). Rows must be storable."""
    if not has_scale(codec):
        return EncodedRows(hidden_ND.to(STORED_DTYPES[codec]).contiguous())
    rows_ND = hidden_ND.float()
    amax_N = rows_ND.abs().amax(dim=1)
    scale_N = torch.where(amax_N > 0, (amax_N / FP8_MAX).clamp_min(_SMALLEST_SCALE), 1.0)
    scaled_ND = (rows_ND / scale_N[:, None]).clamp_(-FP8_MAX, FP8_MAX)
    return EncodedRows(scaled_ND.to(torch.float8_e4m3fn), scale_N)


def decode(rows: EncodedRows, *, dtype: torch.dtype) -> torch.Tensor:
    """Decode to ``[N, D]`` in ``dtype``; a new tensor that shares no memory with ``rows``."""
    if rows.scale_N is None:
        return rows.hidden_ND.to(dtype, copy=True)
    decoded_ND = rows.hidden_ND.float().mul_(rows.scale_N[:, None])
    return decoded_ND.to(dtype)
