"""Which attention backend a target gets, from what the user asked and what the machine has."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.attention.base import AttentionBackend
from runtime.attention.flashinfer import FlashInferBackend
from runtime.attention.sdpa import SdpaBackend
from runtime.config import AttentionChoice, AttentionKernel

logger = logging.getLogger(__name__)

_PACKAGE = "flashinfer"
_PREBUILT = "flashinfer_jit_cache"
_NVCC = Path("/usr/local/cuda/bin/nvcc")
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class GpuFacts:
    """What the choice depends on. ``capability`` is the device's, as (major, minor)."""

    capability: tuple[int, int]
    has_package: bool
    has_compiler: bool

    @classmethod
    def probe(cls, device: torch.device) -> GpuFacts:
        is_prebuilt = importlib.util.find_spec(_PREBUILT) is not None
        return cls(
            capability=torch.cuda.get_device_capability(device),
            has_package=importlib.util.find_spec(_PACKAGE) is not None,
            has_compiler=is_prebuilt or shutil.which("nvcc") is not None or _NVCC.is_file(),
        )

    def missing(self) -> str:
        """Why FlashInfer cannot run at all here; empty: it can."""
        if not self.has_package:
            return "flashinfer-python is not installed (make setup GPU=1 FLASHINFER=1)"
        if not self.has_compiler:
            return "nvcc is not there, and FlashInfer compiles its kernels when they are first used"
        if self.capability < (8, 0):
            major, minor = self.capability
            return f"compute capability {major}.{minor} is below 8.0"
        return ""


def choose_gpu_backend(
    choice: AttentionChoice,
    kernel: AttentionKernel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    facts: GpuFacts | None = None,
) -> AttentionBackend:
    """FlashInfer where it can run and serve this model, else SDPA, with a warning that says why.

    Raises ``ValueError`` when FlashInfer was asked for by name and cannot run on this machine; what
    its kernels do not compute (float32, other head widths) goes to SDPA even then.
    """
    if choice == "sdpa":
        return SdpaBackend()
    missing = (facts or GpuFacts.probe(device)).missing()
    if missing and choice == "flashinfer":
        raise ValueError(f"runtime.attention=flashinfer: {missing}; or use runtime.attention=sdpa")
    why = missing or _not_computed(dtype, head_dim)
    if why:
        logger.warning("attention through scaled_dot_product_attention: %s", why)
        return SdpaBackend()
    logger.info("attention through FlashInfer (runtime.attention_kernel=%s)", kernel)
    return FlashInferBackend(
        load_flashinfer(),
        device=device,
        new_event=torch.cuda.Event,
        kernel="auto" if kernel == "xqa" else kernel,
        use_xqa=kernel == "xqa",
    )


def load_flashinfer() -> Any:
    """Import the package. Raises ``ValueError`` saying what its import is missing."""
    try:
        return importlib.import_module(_PACKAGE)
    except ImportError as error:
        raise ValueError(
            f"runtime.attention=flashinfer: {_PACKAGE} cannot be imported ({error}); install it "
            "with its dependencies (make setup GPU=1 FLASHINFER=1) or use runtime.attention=sdpa"
        ) from error


def _not_computed(dtype: torch.dtype, head_dim: int) -> str:
    if dtype not in _DTYPES:
        return f"FlashInfer computes in float16 or bfloat16, the target is in {dtype}"
    if head_dim not in _HEAD_DIMS:
        return f"FlashInfer has kernels for heads of {_HEAD_DIMS}, the target's have {head_dim}"
    return ""
