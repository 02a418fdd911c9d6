"""The token set as precompute reads it: ids and lengths at once, rows on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.ids import hash_token_ids
from mtp_train.features.manifest import FeatureStoreError, Manifest, hash_loss_mask

_COLUMNS = ("sample_id", "input_ids", "loss_mask")
_SCAN_ROWS = 1024


@dataclass(frozen=True)
class SampleTokens:
    """What a dump needs of a :class:`data_prep.token_set.TokenRow`."""

    sample_id: str
    input_ids: list[int] = field(repr=False)
    loss_mask: list[bool] = field(repr=False)


class TokenRows:
    """One split. ``lengths`` maps every distinct sample id to its tokens."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ValueError(f"data={path}: no token set; run `mtp data` first, or set data.path")
        from datasets import Dataset, load_from_disk

        loaded = load_from_disk(str(path))
        if not isinstance(loaded, Dataset):
            raise ValueError(f"data={path}: expected one split of a token set")
        missing = [name for name in _COLUMNS if name not in loaded.column_names]
        if missing:
            raise ValueError(f"data={path}: column {missing[0]} is missing")
        self.path = path
        self._rows: Any = loaded.select_columns(list(_COLUMNS))
        self._index: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        import pyarrow.compute

        arrow = loaded.with_format("arrow")
        for start in range(0, len(loaded), _SCAN_ROWS):
            table = arrow[start : start + _SCAN_ROWS]
            counts = pyarrow.compute.list_value_length(table["input_ids"]).to_pylist()
            for offset, sample_id in enumerate(table["sample_id"].to_pylist()):
                self._index.setdefault(sample_id, start + offset)
                self.lengths.setdefault(sample_id, counts[offset])

    @property
    def longest(self) -> int:
        return max(self.lengths.values(), default=0)

    def get(self, sample_ids: Sequence[str]) -> list[SampleTokens]:
        """Rows in the order asked for. Raises ``ValueError`` when an id is not its tokens' hash."""
        raw = self._rows[[self._index[sample_id] for sample_id in sample_ids]]
        rows = [
            SampleTokens(*values)
            for values in zip(raw["sample_id"], raw["input_ids"], raw["loss_mask"], strict=True)
        ]
        for row in rows:
            if hash_token_ids(row.input_ids) != row.sample_id:
                raise ValueError(
                    f"data={self.path}: sample_id={row.sample_id} is not the hash of its tokens; "
                    "the token set is damaged, run `mtp data` again"
                )
        return rows

    def check_masks(self, manifest: Manifest) -> None:
        """Raise when stored samples carry another loss mask than the token set gives them."""
        stored = {
            sample_id: (length, digest)
            for shard in manifest.shards
            for sample_id, length, digest in zip(
                shard.sample_ids, shard.lengths, shard.mask_hashes, strict=True
            )
            if sample_id in self._index
        }
        changed = []
        ids = sorted(stored, key=self._index.__getitem__)
        for start in range(0, len(ids), _SCAN_ROWS):
            for row in self.get(ids[start : start + _SCAN_ROWS]):
                length, digest = stored[row.sample_id]  # decoded samples lack their last row
                if hash_loss_mask(row.loss_mask[:length]) != digest:
                    changed.append(row.sample_id)
        if changed:
            raise FeatureStoreError(
                f"data={self.path}: {len(changed)} samples have another loss mask than in the "
                f"feature store (first: {changed[0]}); choose another features.path, or delete "
                "the store"
            )
