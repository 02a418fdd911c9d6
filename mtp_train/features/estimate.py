"""How large a dump will be, before a byte is written, and whether the disk can take it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mtp_train.config import Codec
from mtp_train.console import format_bytes
from mtp_train.features.codecs import bytes_per_row

_IDS_AND_MASK = 5  # int32 id + bool mask per token
_NEGLIGIBLE = 100  # a dump of less than this fraction of the free space fills no disk
_PER_SAMPLE = 128  # id, length, mask hash in the shard's metadata and in the manifest
_CODECS: tuple[Codec, ...] = ("fp32", "bf16", "fp8_e4m3")


class DiskUsage(NamedTuple):
    """Bytes, as :func:`shutil.disk_usage` gives them."""

    total: int
    used: int
    free: int


def disk_usage(path: Path) -> DiskUsage:
    return DiskUsage(*shutil.disk_usage(path))


DiskUsageFn = Callable[[Path], DiskUsage]


@dataclass(frozen=True)
class SizeEstimate:
    """Size of the samples still to be written. Bytes."""

    num_samples: int
    num_tokens: int
    hidden_size: int
    codec: Codec
    num_states: int = 1  # vectors of hidden_size per token

    @property
    def num_bytes(self) -> int:
        return self._bytes_in(self.codec)

    def _bytes_in(self, codec: Codec) -> int:
        per_token = self.num_states * bytes_per_row(codec, self.hidden_size) + _IDS_AND_MASK
        return self.num_tokens * per_token + self.num_samples * _PER_SAMPLE

    def describe(self) -> str:
        states = f"{self.num_states} x " if self.num_states > 1 else ""
        return (
            f"{self.num_samples:,} samples, {self.num_tokens:,} tokens x {states}"
            f"{self.hidden_size} in {self.codec}: {format_bytes(self.num_bytes)}"
        )

    def smaller_codecs(self) -> list[tuple[Codec, int]]:
        """Codecs that need less, with the bytes they need."""
        sizes = [(codec, self._bytes_in(codec)) for codec in _CODECS]
        return [(codec, size) for codec, size in sizes if size < self.num_bytes]


def estimate_size(
    lengths: Sequence[int], *, hidden_size: int, codec: Codec, num_states: int = 1
) -> SizeEstimate:
    """Estimate for samples of ``lengths`` tokens, of ``num_states`` vectors each: ``g`` and the
    residual streams that a head reads beside it.
    """
    return SizeEstimate(len(lengths), sum(lengths), hidden_size, codec, num_states)


def room_for_dump(total: int, free: int, *, min_free_share: float) -> int:
    """Bytes that a dump may take of a disk (``total``, ``free`` bytes) so that ``min_free_share``
    of its size stays free; a hundredth of what is free in any case: that fills no disk.
    """
    return max(free - int(min_free_share * total), free // _NEGLIGIBLE)


def check_free_disk(
    estimate: SizeEstimate,
    path: Path,
    *,
    min_free_share: float,
    usage: DiskUsageFn = disk_usage,
) -> None:
    """Raise ``ValueError`` (needed, free, how to reduce) when the dump would fill the disk.

    ``min_free_share`` of the disk's size must stay free afterwards (:func:`room_for_dump`).
    """
    disk = usage(path)
    available = room_for_dump(disk.total, disk.free, min_free_share=min_free_share)
    if estimate.num_bytes <= available:
        return
    advice = [
        f"features.codec={codec} needs {format_bytes(size)}"
        for codec, size in estimate.smaller_codecs()
    ]
    advice.append("data.max_tokens_total or data.max_conversations make the token set smaller")
    advice.append("features.path may point to a larger disk")
    raise ValueError(
        f"features={path}: {estimate.describe()} needed, but {format_bytes(disk.free)} are free of "
        f"{format_bytes(disk.total)} and features.min_free_disk_share={min_free_share} must stay "
        f"free, which leaves {format_bytes(available)}. To reduce: {'; '.join(advice)}"
    )
