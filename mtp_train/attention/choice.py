"""Which attention trains a head: the one place where a backend is chosen, or refused by name."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import torch

from mtp_train.attention.base import TrainingAttention
from mtp_train.attention.blockwise import BlockwiseAttention

AttentionName = Literal["auto", "blockwise", "flash", "flex"]

logger = logging.getLogger(__name__)

_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CUDA_MAX_WIDTH = 256  # of a head, in FlashAttention 2
_FLEX_MIN_WIDTH = 16  # of a head, in compiled flex attention


@dataclass(frozen=True)
class AttentionChoice:
    """A backend by name, and why this one."""

    backend: Literal["blockwise", "flash", "flex"]
    why: str


def decide_attention(
    name: AttentionName, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionChoice:
    """``auto``: ``flash`` on a GPU where its kernel computes the head, else ``blockwise``.

    Raises ``ValueError`` for ``flash`` and ``flex`` on a GPU in a dtype or head width that their
    kernels have not.
    """
    if name == "blockwise":
        return AttentionChoice("blockwise", "as trainer.attention says")
    if name == "flex":
        return _decide_flex(device, head_dim)
    missing = _missing(device, dtype, head_dim)
    if name == "auto" and (device.type == "cpu" or missing):
        return AttentionChoice("blockwise", missing or "the device is a CPU")
    if missing:
        raise ValueError(
            f"trainer.attention=flash: {missing}; use trainer.attention=blockwise or auto"
        )
    kernel = "variable lengths in one call" if device.type == "cuda" else "sample by sample"
    return AttentionChoice("flash", f"torch's kernel on {device.type}, {kernel}")


def choose_attention(
    name: AttentionName, *, device: torch.device, dtype: torch.dtype, head_dim: int
) -> TrainingAttention:
    """The backend of :func:`decide_attention`, which raises; which and why is logged."""
    choice = decide_attention(name, device=device, dtype=dtype, head_dim=head_dim)
    logger.info("attention: %s, %s", choice.backend, choice.why)
    if choice.backend == "blockwise":
        return BlockwiseAttention()
    if choice.backend == "flex":
        from mtp_train.attention.flex import FlexAttention

        return FlexAttention.on(device)
    from mtp_train.attention.flash import FlashAttention
    from mtp_train.attention.kernels import CpuFlashKernel, CudaFlashKernel

    return FlashAttention(CudaFlashKernel() if device.type == "cuda" else CpuFlashKernel())


def _decide_flex(device: torch.device, head_dim: int) -> AttentionChoice:
    if device.type == "cpu":
        return AttentionChoice(
            "flex",
            "un-compiled over dense scores on a CPU, to compare with; "
            "trainer.attention=blockwise is faster and linear in memory",
        )
    if head_dim < _FLEX_MIN_WIDTH:
        raise ValueError(
            f"trainer.attention=flex: compiled, it computes heads from {_FLEX_MIN_WIDTH} columns "
            f"on, this head has head_dim={head_dim}; use trainer.attention=blockwise or auto"
        )
    return AttentionChoice("flex", "compiled at its first step, as trainer.attention says")


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
