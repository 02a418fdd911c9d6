"""Memory in huge pages, where the system gives them: weights and K/V are read from end to end at
every step, and the processor finds a page of 2 MB once instead of 512 small ones.
"""

from __future__ import annotations

import ctypes
import logging
import mmap

import torch

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_CHUNK_BYTES = 64 << 20


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages under a CPU tensor that nobody has written to yet. Only ever advice."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu":
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.nbytes - start) // page * page
    if size <= 0:
        return
    try:
        failed = ctypes.CDLL(None, use_errno=True).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(advice)
        )
    except (AttributeError, OSError) as error:  # no such call in this C library
        logger.debug("no madvise: %s", error)
        return
    if failed:
        logger.debug("madvise(MADV_HUGEPAGE) failed with errno %d", ctypes.get_errno())


class HugePageArena:
    """Hands out tensors one behind the other, so that small ones share huge pages.

    Memory is given back when everything out of a chunk is gone; at most one chunk's rest is unused,
    and what is never written to costs nothing.
    """

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor, aligned to a cache line."""
        size = shape.numel() * dtype.itemsize
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if padded > self._rest.numel():
            chunk = torch.empty(max(padded + _ALIGNMENT, self._chunk_bytes), dtype=torch.uint8)
            advise_huge_pages(chunk)
            self._rest = chunk[-chunk.data_ptr() % _ALIGNMENT :]
        taken, self._rest = self._rest[:size], self._rest[padded:]
        return taken.view(dtype).view(shape)
