"""What is special about a CPU: which dtype is fast, how many threads, and which linears.

All private torch operators of the runtime are used here and nowhere else, behind :func:`can_pack`,
which runs them once on a small product and compares. Where they are missing or wrong, plain
``F.linear`` is used and the choice is logged.

Shape legend: M rows, O output features, I input features.
"""

from __future__ import annotations

import logging
import os

import torch
from torch.nn import functional as F

from runtime.cpu_kernels import CpuKernels
from runtime.huge_pages import HugePageArena
from runtime.linear import Linear, LinearMaker, PlainLinear
from runtime.panel_linear import PanelLinear
from runtime.processor import count_physical_cores, processor_flags

logger = logging.getLogger(__name__)

# oneDNN picks the block layout from the row count it is told to expect. One layout serves every
# row count, so that one row and K+1 rows go through the same kernel family.
_PACK_ROWS = 16

# Shapes whose bf16 kernels oneDNN and torch's wrapper around it keep, 1,024 each by default. A
# shape takes 0.7 MB, and training has new ones in every step.
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_KEPT_KERNELS = 64


def has_fast_bf16() -> bool:
    """Whether the processor multiplies bfloat16 natively (AVX-512 BF16 or AMX)."""
    probes = []
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        probe = getattr(torch.cpu, name, None)
        if probe is None:
            logger.info("torch.cpu.%s is missing: reading the processor's flags instead", name)
            return not processor_flags().isdisjoint(("avx512_bf16", "amx_bf16"))
        probes.append(probe)
    return any(probe() for probe in probes)


def best_dtype() -> torch.dtype:
    """bfloat16 where the processor has it, else float32 (emulated bfloat16 is slower than that)."""
    return torch.bfloat16 if has_fast_bf16() else torch.float32


def set_threads(num_threads: int) -> int:
    """Set torch's intra-op threads for this process; 0 means one per physical core.

    Returns the number set. Call once, before the first forward.
    """
    if num_threads < 0:
        raise ValueError(f"runtime.num_threads={num_threads}: must not be negative")
    wanted = num_threads or count_physical_cores()
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
    logger.info("CPU: %d threads, bfloat16 %s", wanted, "native" if has_fast_bf16() else "emulated")
    return wanted


def limit_kernel_caches() -> None:
    """Keep the kernels of few shapes, for a process whose shapes change all the time.

    Call before the first product: the capacities are read once. What the user has set stays.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KEPT_KERNELS))


class OneDnnLinear(Linear):
    """Packed for oneDNN; :func:`can_pack` says whether that works here."""

    is_packed = True

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__(weight_OI, bias_O)
        self._weight = _reorder(weight_OI)

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        return _packed_linear(x_MI, self._weight, self._bias)

    def dense_weight(self) -> torch.Tensor:
        return self._weight.to_dense()


def choose_linear(
    dtype: torch.dtype, device: torch.device, kernels: CpuKernels | None = None
) -> LinearMaker:
    """The fastest form of a linear here: our kernels' panels, else oneDNN's packing, else plain.

    Costs one tiny product; callers ask once per model.
    """
    otherwise = OneDnnLinear if can_pack(dtype, device) else PlainLinear
    if kernels is None or device.type != "cpu" or not kernels.has_products(dtype):
        return otherwise

    arena = HugePageArena()

    def make(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> Linear:
        if PanelLinear.can_hold(weight_OI):
            return PanelLinear(weight_OI, bias_O, kernels=kernels, arena=arena)
        return otherwise(weight_OI, bias_O)

    return make


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed weights work here: the operators exist, agree with ``F.linear`` and unpack.

    Costs one tiny product.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return False
    if dtype is torch.bfloat16 and not has_fast_bf16():
        logger.warning("CPU has no native bfloat16: weights stay unpacked; float32 is faster here")
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    x = torch.randn(3, 32, generator=generator).to(dtype)
    try:
        packed = _reorder(weight)
        got = _packed_linear(x, packed, None)
        unpacked = packed.to_dense()
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.warning("oneDNN weight packing is not available, using F.linear: %s", error)
        return False
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    is_close = torch.allclose(got, F.linear(x, weight), rtol=tolerance, atol=tolerance)
    if not is_close or not torch.equal(unpacked, weight):
        logger.warning("oneDNN weight packing gives other results than F.linear, using F.linear")
        return False
    return True


def _reorder(weight_OI: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _PACK_ROWS)


def _packed_linear(
    x_MI: torch.Tensor, packed: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x_MI, packed, bias_O, "none", [], "")
