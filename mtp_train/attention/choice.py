"""Which attention trains a head: the one place where a backend is chosen, or refused by name."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from mtp_train.attention.base import TrainingAttention
from mtp_train.attention.blockwise import BlockwiseAttention

AttentionName = Literal["auto", "blockwise", "flash"]

logger = logging.getLogger(__name__)

_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CUDA_MAX_WIDTH = 256  # of a head, in FlashAttention 2


def choose_attention(
    name: AttentionName, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> TrainingAttention:
    """``auto``: ``flash`` on a GPU where its kernel computes the head, else ``blockwise``.

    Raises ``ValueError`` for ``flash`` on a GPU in a dtype or head width that its kernel has not.
    """
    if name == "blockwise":
        return BlockwiseAttention()
    missing = _missing(device, dtype, head_dim)
    if name == "auto" and (device.type == "cpu" or missing):
        why = missing or "the device is a CPU"
        logger.info("attention: blockwise, because %s", why)
        return BlockwiseAttention()
    if missing:
        raise ValueError(
            f"trainer.attention=flash: {missing}; use trainer.attention=blockwise or auto"
        )
    from mtp_train.attention.flash import FlashAttention
    from mtp_train.attention.kernels import CpuFlashKernel, CudaFlashKernel

    logger.info("attention: flash on %s", device.type)
    return FlashAttention(CudaFlashKernel() if device.type == "cuda" else CpuFlashKernel())


def _missing(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why the flash kernel of ``device`` cannot be used; empty where it can."""
    if device.type != "cuda":
        return ""
    if dtype not in _CUDA_DTYPES:
        return f"its kernel computes bfloat16 and float16, training is in {str(dtype)[6:]}"
    if head_dim % 8 or head_dim > _CUDA_MAX_WIDTH:
        return (
            f"its kernel computes heads of a multiple of 8 up to {_CUDA_MAX_WIDTH}, this head has "
            f"head_dim={head_dim}"
        )
    return ""
