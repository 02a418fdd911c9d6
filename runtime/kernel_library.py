"""Compiles the fused CPU kernels once per machine with the local g++, loads and checks them.

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
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch.nn import functional as F

from runtime.cpu_kernels import CpuKernels
from runtime.fused_block import fuse_block
from runtime.ops import NormWeight, RotaryAngles, TorchOps
from runtime.panel_linear import PanelLinear
from runtime.screened_linear import ScreenedLinear
from runtime.verify_tree import walk_tree

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_MAIN = _SOURCES / "cpu_kernels.cpp"
_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-w",
)
_TOLERANCES = MappingProxyType({torch.float32: 1e-5, torch.bfloat16: 3e-2})
_COMPILE_TIMEOUT_S = 120


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
    sources = [path.read_text() for path in sorted(_SOURCES.iterdir())]
    for part in (*sources, version, " ".join(_FLAGS), _processor()):
        digest.update(part.encode())
    library = directory / f"cpu_kernels-{digest.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    staged = directory / f".{library.name}.{os.getpid()}"
    logger.info("compiling the fused CPU kernels into %s (once)", library)
    try:
        subprocess.run(
            [compiler, *_FLAGS, str(_MAIN), "-o", str(staged)],
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
    yield kernels.argmax(x.flip(1).view(5, 16)), reference.argmax(x.flip(1).view(5, 16))
    yield kernels.add_rms_norm(x.clone(), x, norm), reference.add_rms_norm(x.clone(), x, norm)
    tokens, drafts = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 2], [4, 6]])
    accepted = kernels.accept_chain(tokens, drafts), reference.accept_chain(tokens, drafts)
    yield accepted[0].ids_BK1, accepted[1].ids_BK1
    ends = accepted[1].last_ids_B, accepted[1].num_emitted_B
    yield kernels.shift_inputs(tokens, *ends).ids_N, reference.shift_inputs(tokens, *ends).ids_N
    normed, wanted = x.view(2, 4, 10).clone(), x.view(2, 4, 10).clone()
    of_heads = NormWeight(norm.weight_D[:10].clone(), norm.eps)
    for ops, heads in ((kernels, normed), (reference, wanted)):
        ops.norm_heads(heads[:, 1:3], of_heads)
    yield normed, wanted
    nodes, parents = torch.tensor([[2, 1, 6], [5, 4, 9]]), torch.tensor([[0, 0, 1], [0, 0, 2]])
    rows = torch.tensor([[2, 6, 7, 8], [4, 1, 2, 9]])
    walked = kernels.walk_tree(rows, nodes, parents, 2), walk_tree(rows, nodes, parents, 2)
    yield walked[0].path_BE, walked[1].path_BE
    yield from _try_attention(kernels, dtype)
    if kernels.has_products(dtype):
        weight = torch.linspace(-0.3, 0.2, 37 * 40).view(37, 40).to(dtype)
        bias = torch.linspace(-1, 1, 37)
        linear = PanelLinear(weight, bias, kernels=kernels)
        yield linear(x), F.linear(x.float(), weight.float(), bias)
        rows = torch.linspace(-1, 1, 35 * 64).view(35, 64).to(dtype)  # matrix tiles, and a part
        yield (
            PanelLinear(rows[:34], kernels=kernels)(rows),
            F.linear(rows.float(), rows[:34].float()),
        )
        yield from _try_block(kernels, dtype)
        if kernels.has_screen(dtype):
            plain = PanelLinear(weight, kernels=kernels)
            yield ScreenedLinear(plain).best(x, 2), plain(x).topk(2).indices


@dataclass(frozen=True)
class _Rows:
    """Two new rows of one request with five keys: 4 query heads over 2 key/value heads."""

    angles: RotaryAngles
    pool_k: torch.Tensor
    pool_v: torch.Tensor
    slots = torch.tensor([6, 1, 2, 7, 3])
    num_rows, num_heads, num_kv_heads, width = 2, 4, 2, 20

    @classmethod
    def make(cls, dtype: torch.dtype, generator: torch.Generator) -> _Rows:
        angle = torch.linspace(0, 3, cls.num_rows * cls.width // 2).view(cls.num_rows, -1)
        angles = RotaryAngles(
            torch.cat((angle, angle), -1).cos().to(dtype),
            torch.cat((-angle, angle), -1).sin().to(dtype),
        )
        shape = (2, 8, cls.num_kv_heads, cls.width)
        return cls(angles, *torch.randn(shape, generator=generator).to(dtype).unbind())

    @property
    def write_slots(self) -> torch.Tensor:
        return self.slots[-self.num_rows :]

    def describe(self, block: tuple[int, int] = (0, 0)) -> torch.Tensor:
        slots = (len(self.slots), self.slots.data_ptr())
        return torch.tensor([[0, self.num_rows, *slots, *block]])

    def is_causal(self) -> torch.Tensor:
        shape = self.num_rows, len(self.slots)
        return torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])

    def written(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both pools with the new rows in them; copies."""
        return (
            self.pool_k.index_copy(0, self.write_slots, k),
            self.pool_v.index_copy(0, self.write_slots, v),
        )

    def attend(
        self, q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], is_visible: torch.Tensor
    ) -> torch.Tensor:
        keys, values = (
            pool[self.slots].repeat_interleave(2, dim=1).transpose(0, 1).float() for pool in pools
        )
        return F.scaled_dot_product_attention(
            q.transpose(0, 1).float(), keys, values, attn_mask=is_visible
        ).transpose(0, 1)


def _try_attention(
    kernels: CpuKernels, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rotation, then causal rows and the same rows as the last two of three of a tree."""
    generator = torch.Generator().manual_seed(0)
    rows = _Rows.make(dtype, generator)
    rotated = torch.randn(rows.num_rows, 8, rows.width, generator=generator).to(dtype)
    wanted = rotated.clone()
    kernels.rotate(rotated, 6, rows.angles)
    TorchOps().rotate(wanted, 6, rows.angles)
    yield rotated, wanted

    q, k, v = wanted.split((4, 2, 2), dim=1)
    pools = rows.written(k, v)
    in_block = torch.tensor([[False, True, False], [True, False, True]])
    before = torch.ones(rows.num_rows, len(rows.slots) - 3, dtype=torch.bool)
    in_tree = torch.cat([before, in_block], 1)
    for is_visible, block in ((rows.is_causal(), (0, 0)), (in_tree, (3, in_block.data_ptr()))):
        out = kernels.attend(
            q,
            k,
            v,
            write_slots_N=rows.write_slots,
            pool_k=rows.pool_k,
            pool_v=rows.pool_v,
            requests_B6=rows.describe(block),
        )
        yield out, rows.attend(q, pools, is_visible)
    yield rows.pool_k, pools[0]
    yield rows.pool_v, pools[1]


def _try_block(
    kernels: CpuKernels, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A whole decoder block with biases, norms of its heads and one of the others."""
    generator = torch.Generator().manual_seed(1)
    rows = _Rows.make(dtype, generator)
    model_width, inner = 32, 48
    heads = (rows.num_heads, rows.num_kv_heads, rows.num_kv_heads)
    attended_width = rows.num_heads * rows.width

    def linear(outputs: int, inputs: int) -> PanelLinear:
        weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
        bias = torch.randn(outputs, generator=generator)
        return PanelLinear(weight.to(dtype), bias, kernels=kernels)

    qkv, out = linear(sum(heads) * rows.width, model_width), linear(model_width, attended_width)
    gate_up, down = linear(2 * inner, model_width), linear(model_width, inner)
    norm = NormWeight(torch.linspace(0.5, 1.5, model_width), 1e-5)
    q_norm, k_norm = (NormWeight(norm.weight_D[i : i + rows.width], norm.eps) for i in (0, 12))
    norms = {"input_norm": None, "post_norm": norm, "q_norm": q_norm, "k_norm": k_norm}
    fused = fuse_block(norms, qkv=qkv, out=out, gate_up=gate_up, down=down)
    assert fused is not None, "these widths are whole panels"
    x = torch.randn(rows.num_rows, model_width, generator=generator).to(dtype)

    def product(linear: PanelLinear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), linear.dense_weight().float(), linear.bias_O).to(dtype)

    ops = TorchOps()
    projected = product(qkv, x).view(rows.num_rows, -1, rows.width)
    ops.norm_heads(projected[:, : heads[0]], q_norm)
    ops.norm_heads(projected[:, heads[0] : sum(heads[:2])], k_norm)
    ops.rotate(projected, sum(heads[:2]), rows.angles)
    q, k, v = projected.split(heads, dim=1)
    attended = rows.attend(q, rows.written(k, v), rows.is_causal()).to(dtype)
    wanted = x + product(out, attended.reshape(rows.num_rows, -1))
    normed = ops.add_rms_norm(wanted.clone(), None, norm)
    wanted = wanted + product(down, ops.silu_mul(product(gate_up, normed)))

    kernels.run_blocks(
        [fused.pointers],
        x,
        rows.angles,
        inner=fused.inner,
        num_heads=rows.num_heads,
        pool_k=[rows.pool_k],
        pool_v=[rows.pool_v],
        write_slots_N=rows.write_slots,
        requests_B6=rows.describe(),
    )
    yield x, wanted
    yield rows.pool_k[rows.write_slots], k
