"""Reads a feature store sample by sample.

Samples are ordered by sample id, whatever order ranks wrote them in. A dump fills shards in that
order too, so neighbouring indices mostly lie in one shard.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch

from mtp_train.features.manifest import (
    Fingerprint,
    Manifest,
    load_manifest,
    require_same_fingerprint,
)
from mtp_train.features.shards import (
    FeatureSample,
    ShardReader,
    check_presence,
    damaged,
)
from runtime.files import sha256_file

logger = logging.getLogger(__name__)

MissingPolicy = Literal["error", "skip"]


class FeatureReader:
    """Random access to the samples of one store.

    ``expected`` refuses a store made from anything else. ``select`` restricts the reader to these
    sample ids (a store may hold more than one token set needs). ``missing="skip"`` leaves out
    samples of shards that are not on disk, with a warning; the default refuses. With
    ``verify_on_open`` a shard's checksum is tested the first time it is touched. At most
    ``max_open_shards`` files stay mapped. Residual streams are read only ``with_layers``. Raises
    :class:`FeatureStoreError` naming the shard.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        expected: Fingerprint | None = None,
        select: Collection[str] | None = None,
        missing: MissingPolicy = "error",
        verify_on_open: bool = True,
        max_open_shards: int = 64,
        with_layers: bool = True,
    ) -> None:
        self.path = Path(path)
        self.manifest: Manifest = load_manifest(self.path)
        if expected is not None:
            require_same_fingerprint(
                self.manifest.fingerprint, expected, source=f"features={self.path}"
            )
        self._verify_on_open = verify_on_open
        self._max_open_shards = max_open_shards
        self._with_layers = with_layers
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._verified: set[int] = set()

        self._on_disk: list[int] = []
        places: dict[str, tuple[int, int, int]] = {}  # id -> shard, index in it, length
        for number, record in enumerate(self.manifest.shards):
            fault = check_presence(self.path, record)
            if fault is not None and missing == "error":
                raise damaged(self.path / record.name, fault)
            if fault is not None:
                logger.warning(
                    "%s %s: its %d samples are left out",
                    self.path / record.name,
                    fault,
                    len(record.sample_ids),
                )
                continue
            self._on_disk.append(number)
            for index, (sample_id, length) in enumerate(
                zip(record.sample_ids, record.lengths, strict=True)
            ):
                places.setdefault(sample_id, (number, index, length))
        if select is not None:
            wanted = set(select)
            absent = wanted - set(places) - {q.sample_id for q in self.manifest.quarantined}
            if absent and missing == "error":
                raise ValueError(
                    f"features={self.path}: {len(absent)} of {len(wanted)} selected samples are "
                    f"not in the store (first: {min(absent)}); run `mtp precompute` again"
                )
            places = {
                sample_id: place for sample_id, place in places.items() if sample_id in wanted
            }
        self.sample_ids: tuple[str, ...] = tuple(sorted(places))
        self._places = [places[sample_id] for sample_id in self.sample_ids]
        self.lengths = torch.tensor([place[2] for place in self._places], dtype=torch.int64)

    @property
    def hidden_size(self) -> int:
        return self.manifest.fingerprint.hidden_size

    def __len__(self) -> int:
        return len(self.sample_ids)

    def get(self, index: int, *, dtype: torch.dtype = torch.float32) -> FeatureSample:
        """Sample ``index``, hidden states decoded to ``dtype`` (CPU, memory of its own)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a store with {len(self)} samples")
        number, place, _ = self._places[index]
        return self._shard(number).read(place, self.sample_ids[index], dtype=dtype)

    def verify(self) -> None:
        """Test the checksum of every shard on disk. Raises on the first damaged one."""
        for number in self._on_disk:
            self._verify(number)

    def _shard(self, number: int) -> ShardReader:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        record = self.manifest.shards[number]
        fault = check_presence(self.path, record)  # a bounded store may have let it go meanwhile
        if fault is not None:
            raise damaged(self.path / record.name, fault)
        if self._verify_on_open and number not in self._verified:
            self._verify(number)
        reader = ShardReader(
            self.path, record, self.manifest.fingerprint, with_layers=self._with_layers
        )
        self._open[number] = reader
        if len(self._open) > self._max_open_shards:
            self._open.popitem(last=False)
        return reader

    def _verify(self, number: int) -> None:
        record = self.manifest.shards[number]
        fault = check_presence(self.path, record)
        if fault is None and sha256_file(self.path / record.name) != record.sha256:
            fault = "content does not match the checksum in the manifest (a byte has changed)"
        if fault is not None:
            raise damaged(self.path / record.name, fault)
        self._verified.add(number)
