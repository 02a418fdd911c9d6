"""Fused CPU kernels: compiled once per machine with the local g++, called through ctypes.

They are an option: where there is no compiler, or the result fails its check against torch, the
runtime uses torch operators and says so in the log. The library is cached by a hash of source,
compiler and processor, and appears by atomic rename.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import torch
from torch.nn import functional as F

from runtime.ops import BlockOps, NormWeight, RotaryAngles, TorchOps

logger = logging.getLogger(__name__)

MAX_GROUP = 96  # query heads per key/value head that the attention kernel's tile holds

_SOURCE = Path(__file__).parent / "csrc" / "cpu_kernels.cpp"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-w")
_SUFFIXES = MappingProxyType({torch.float32: "f32", torch.bfloat16: "bf16"})
_TOLERANCES = MappingProxyType({torch.float32: 1e-5, torch.bfloat16: 3e-2})
_COMPILE_TIMEOUT_S = 120
_P, _L, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_SIGNATURES = MappingProxyType(
    {
        "add_rms_norm": (_P, _P, _P, _P, _L, _L, _F),
        "rotate": (_P, _P, _P, _L, _L, _L, _L, _L),
        "silu_mul": (_P, _P, _L, _L),
        "attend": (_P, _P, _P, _L, _L, _P, _L, _P, _P, _P, _L, _L, _L, _L, _F, _P),
    }
)


class CpuKernels(BlockOps):
    """The compiled library. Float32 and bfloat16, contiguous inner dimensions, CPU tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for name, arguments in _SIGNATURES.items():
            for dtype, suffix in _SUFFIXES.items():
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes = arguments
                function.restype = None
                self._functions[name, dtype] = function

    def add_rms_norm(
        self, x_ND: torch.Tensor, delta_ND: torch.Tensor | None, norm: NormWeight
    ) -> torch.Tensor:
        assert x_ND.is_contiguous(), "the residual stream must be contiguous"
        assert norm.weight_D.dtype is torch.float32, "norm weights are float32"
        out_ND = torch.empty_like(x_ND)
        delta = None
        if delta_ND is not None:
            assert delta_ND.is_contiguous(), "delta must be contiguous"
            assert delta_ND.dtype is x_ND.dtype, "delta must have the dtype of x"
            delta = delta_ND.data_ptr()
        self._functions["add_rms_norm", x_ND.dtype](
            x_ND.data_ptr(),
            delta,
            norm.weight_D.data_ptr(),
            out_ND.data_ptr(),
            *x_ND.shape,
            norm.eps,
        )
        return out_ND

    def rotate(self, qkv_NXC: torch.Tensor, num_rotated: int, angles: RotaryAngles) -> None:
        rows, _, width = qkv_NXC.shape
        assert qkv_NXC.is_contiguous(), "qkv must be contiguous"
        assert angles.cos_NC.dtype is qkv_NXC.dtype, "angles must have the dtype of qkv"
        sin_offset = width // 2 * angles.sin_NC.element_size()  # the positive half
        self._functions["rotate", qkv_NXC.dtype](
            qkv_NXC.data_ptr(),
            angles.cos_NC.data_ptr(),
            angles.sin_NC.data_ptr() + sin_offset,
            width,
            rows,
            num_rotated,
            qkv_NXC.stride(0),
            width,
        )

    def silu_mul(self, gate_up_N2I: torch.Tensor) -> torch.Tensor:
        assert gate_up_N2I.is_contiguous(), "gate_up must be contiguous"
        rows, columns = gate_up_N2I.shape
        out_NI = gate_up_N2I.new_empty(rows, columns // 2)
        self._functions["silu_mul", gate_up_N2I.dtype](
            gate_up_N2I.data_ptr(), out_NI.data_ptr(), rows, columns // 2
        )
        return out_NI

    def attend(
        self,
        q_NHC: torch.Tensor,
        k_NGC: torch.Tensor,
        v_NGC: torch.Tensor,
        *,
        write_slots_N: torch.Tensor,
        pool_k: torch.Tensor,
        pool_v: torch.Tensor,
        requests_B6: torch.Tensor,
    ) -> torch.Tensor:
        """Store ``k, v`` at ``write_slots``, then attend; ``[N, H, C]``, contiguous.

        ``requests_B6`` (int64, host): first row, number of rows, number of keys (new ones
        included), the address of an int64 array with the slots of these keys; then, for rows of a
        tree, how many of the keys (the last ones) are the block, and the address of its mask, one
        byte per row and block key. Without a block (0, 0) rows attend causally. Rows of q, k, v may
        be strided, their heads must be contiguous.
        """
        rows, num_heads, width = q_NHC.shape
        num_kv_heads = k_NGC.shape[1]
        for tensor in (q_NHC, k_NGC, v_NGC):
            assert tensor.stride(2) == 1, "head elements must be contiguous"
            assert tensor.stride(1) == width, "the heads of a row must be contiguous"
        assert k_NGC.stride(0) == v_NGC.stride(0), "k and v must have one row stride"
        assert num_heads // num_kv_heads <= MAX_GROUP, "too many query heads per key head"
        out_NHC = q_NHC.new_empty(rows, num_heads, width)
        self._functions["attend", q_NHC.dtype](
            q_NHC.data_ptr(),
            k_NGC.data_ptr(),
            v_NGC.data_ptr(),
            q_NHC.stride(0),
            k_NGC.stride(0),
            write_slots_N.data_ptr(),
            rows,
            pool_k.data_ptr(),
            pool_v.data_ptr(),
            requests_B6.data_ptr(),
            requests_B6.shape[0],
            num_heads,
            num_kv_heads,
            width,
            width**-0.5,
            out_NHC.data_ptr(),
        )
        return out_NHC


def load_kernels(cache_dir: Path) -> CpuKernels | None:
    """Compile (once per machine, seconds) and load; ``None``, with a warning, if that fails."""
    compiler = shutil.which("g++")
    if compiler is None:
        logger.warning("no g++ found: using torch operators instead of the fused CPU kernels")
        return None
    try:
        library = _compile(compiler, cache_dir / "kernels")
        kernels = CpuKernels(ctypes.CDLL(str(library)))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("fused CPU kernels did not compile, using torch operators: %s", detail)
        return None
    if not _agrees_with_torch(kernels):
        logger.warning("fused CPU kernels disagree with torch: using torch operators")
        return None
    return kernels


def _compile(compiler: str, directory: Path) -> Path:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    digest = hashlib.sha256()
    for part in (_SOURCE.read_text(), version, " ".join(_FLAGS), _processor()):
        digest.update(part.encode())
    library = directory / f"cpu_kernels-{digest.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    staged = directory / f".{library.name}.{os.getpid()}"
    logger.info("compiling the fused CPU kernels into %s (once)", library)
    try:
        subprocess.run(
            [compiler, *_FLAGS, str(_SOURCE), "-o", str(staged)],
            capture_output=True,
            text=True,
            check=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        os.replace(staged, library)
    finally:
        staged.unlink(missing_ok=True)
    return library


def _processor() -> str:
    """Name and feature flags: a library built with ``-march=native`` belongs to one processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({x for x in lines if x.startswith(wanted)})) or platform.processor()


def _agrees_with_torch(kernels: CpuKernels) -> bool:
    """Every kernel once per dtype on a few numbers, against torch (about a millisecond)."""
    for dtype, tolerance in _TOLERANCES.items():
        for got, wanted in _try_kernels(kernels, dtype):
            if not torch.allclose(got.float(), wanted.float(), rtol=tolerance, atol=tolerance):
                return False
    return True


def _try_kernels(
    kernels: CpuKernels, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (kernel's result, torch's). Widths are no multiples of a vector register."""
    reference = TorchOps()
    x = torch.linspace(-3, 3, 2 * 40).view(2, 40).to(dtype)
    norm = NormWeight(torch.linspace(0.5, 1.5, 40), 1e-5)
    yield kernels.silu_mul(x), reference.silu_mul(x)
    yield kernels.add_rms_norm(x.clone(), x, norm), reference.add_rms_norm(x.clone(), x, norm)

    # Two new rows of one request with five keys: 4 query heads over 2 key/value heads; causal, and
    # as the last two of three tree rows.
    width, num_rows, num_keys = 20, 2, 5
    generator = torch.Generator().manual_seed(0)
    rotated = torch.randn(num_rows, 8, width, generator=generator).to(dtype)
    angle = torch.linspace(0, 3, num_rows * width // 2).view(num_rows, -1)
    angles = RotaryAngles(
        torch.cat((angle, angle), -1).cos().to(dtype),
        torch.cat((-angle, angle), -1).sin().to(dtype),
    )
    wanted = rotated.clone()
    kernels.rotate(rotated, 6, angles)
    reference.rotate(wanted, 6, angles)
    yield rotated, wanted

    q, k, v = wanted.split((4, 2, 2), dim=1)
    pool_k, pool_v = torch.randn(2, 8, 2, width, generator=generator).to(dtype).unbind()
    slots = torch.tensor([6, 1, 2, 7, 3])
    expected_k = pool_k.index_copy(0, slots[-num_rows:], k)
    expected_v = pool_v.index_copy(0, slots[-num_rows:], v)
    causal = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
    in_block = torch.tensor([[False, True, False], [True, False, True]])
    in_tree = torch.cat([torch.ones(num_rows, num_keys - 3, dtype=torch.bool), in_block], 1)
    for is_visible, block in ((causal, (0, 0)), (in_tree, (3, in_block.data_ptr()))):
        out = kernels.attend(
            q,
            k,
            v,
            write_slots_N=slots[-num_rows:],
            pool_k=pool_k,
            pool_v=pool_v,
            requests_B6=torch.tensor([[0, num_rows, num_keys, slots.data_ptr(), *block]]),
        )
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1).float(),
            expected_k[slots].repeat_interleave(2, dim=1).transpose(0, 1).float(),
            expected_v[slots].repeat_interleave(2, dim=1).transpose(0, 1).float(),
            attn_mask=is_visible,
        )
        yield out, attended.transpose(0, 1)
    yield pool_k, expected_k
    yield pool_v, expected_v
