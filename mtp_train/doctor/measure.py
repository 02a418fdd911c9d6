"""Short measurements: disk, memory and matrix rates. A few seconds together."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_train.doctor.facts import Disk, Rates

if TYPE_CHECKING:
    import torch

_FILE_BYTES = 256 * 2**20
_BLOCK = 8 * 2**20
_COPY_BYTES = 128 * 2**20
_MATRIX = {"cpu": 1024, "cuda": 8192}
_ROUNDS = 4


def measure_disk(disk: Disk) -> Disk:
    """Write and read one file, past the page cache where the system allows; it is removed.

    Not measured where the folder cannot be written or the file would take a tenth of what is free.
    """
    if not disk.is_writable or disk.free < 10 * _FILE_BYTES:
        return disk
    block = os.urandom(_BLOCK)
    with tempfile.NamedTemporaryFile(dir=disk.path, prefix=".mtp-doctor-") as file:
        started = time.perf_counter()
        for _ in range(_FILE_BYTES // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - started
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        with Path(file.name).open("rb", buffering=0) as reader:
            while reader.read(_BLOCK):
                pass
        read_s = time.perf_counter() - started
    return replace(disk, write_rate=_FILE_BYTES / write_s, read_rate=_FILE_BYTES / read_s)


def measure_rates(device: str) -> Rates:
    """Copy and matrix-product rates with torch on ``cpu`` (its set threads) or ``cuda``."""
    import torch

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _best_seconds(lambda: target.copy_(source), synchronize)
    return Rates(
        device=device,
        copy=2 * _COPY_BYTES / copy_s,
        fp32=_product_rate(torch.float32, device, synchronize),
        bf16=_product_rate(torch.bfloat16, device, synchronize),
    )


def _product_rate(dtype: torch.dtype, device: str, synchronize: Callable[[], None]) -> float:
    import torch

    size = _MATRIX[device]
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    return 2.0 * size**3 / _best_seconds(lambda: left @ right, synchronize)


def _best_seconds(work: Callable[[], object], synchronize: Callable[[], None]) -> float:
    work()
    best = float("inf")
    for _ in range(_ROUNDS):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - started)
    return best
