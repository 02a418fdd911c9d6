"""Token sets on disk: rows of token ids with the mask of what the assistant generated.

An Arrow folder per split (`datasets` reads it), beside ``fingerprint.json``,
``statistics.json`` and ``rejects.jsonl``. ``fingerprint.json`` is written last: a folder without
it is unfinished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.ids import hash_token_ids
from data_prep.normalise import Split
from runtime.files import write_atomic

if TYPE_CHECKING:
    from datasets import Dataset

VERSION = 1
FINGERPRINT_FILE = "fingerprint.json"
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class TokenRow:
    """One row. ``loss_mask[i]``: the assistant generated token i. ``cut_off``: the last answer was
    cut by a length limit and has no token that ends the turn.
    """

    conversation_id: str
    source: str
    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    cut_off: bool = False

    @cached_property
    def sample_id(self) -> str:
        """Content hash of the token ids."""
        return hash_token_ids(self.input_ids)


@dataclass(frozen=True)
class TokenSet:
    """A finished token set. ``train`` and ``validation`` are memory-mapped Arrow datasets."""

    path: Path
    train: Dataset
    validation: Dataset
    fingerprint: Mapping[str, Any]  # {"version", "inputs", "content"}

    def rows(self, split: Split) -> Iterator[TokenRow]:
        """The rows of one split, in order."""
        for row in self.train if split == "train" else self.validation:
            yield TokenRow(
                row["conversation_id"],
                row["source"],
                tuple(row["input_ids"]),
                tuple(row["loss_mask"]),
                row["cut_off"],
            )


def load_token_set(path: str | Path) -> TokenSet:
    """Open a finished token set. ``ValueError`` when it is missing or unfinished."""
    from datasets import load_from_disk

    folder = Path(path)
    fingerprint = read_fingerprint(folder)
    if fingerprint is None:
        raise ValueError(
            f"data.path={str(path)!r}: no finished token set there "
            f"({FINGERPRINT_FILE} is missing); run `mtp data` first"
        )
    splits = {split: load_from_disk(str(folder / split)) for split in ("train", "validation")}
    return TokenSet(folder, splits["train"], splits["validation"], fingerprint)


def read_fingerprint(folder: Path) -> dict[str, Any] | None:
    """The fingerprint of a finished token set, or ``None``."""
    path = folder / FINGERPRINT_FILE
    if not path.is_file():
        return None
    fingerprint: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if fingerprint.get("version") != VERSION:
        raise ValueError(
            f"{path}: version {fingerprint.get('version')}, this program reads {VERSION}"
        )
    return fingerprint


class TokenSetWriter:
    """Collects the rows of one split compactly, hashes them, and writes them in one rename."""

    def __init__(self) -> None:
        self._batches: list[Any] = []
        self._pending: list[TokenRow] = []
        self._digest = hashlib.sha256()
        self.num_rows = 0
        self.num_tokens = 0

    def append(self, row: TokenRow) -> None:
        assert len(row.input_ids) == len(row.loss_mask), "one flag per token"
        self._digest.update(row.sample_id.encode())
        self._digest.update(bytes(row.loss_mask) + b"\xff" + row.conversation_id.encode())
        self.num_rows += 1
        self.num_tokens += len(row.input_ids)
        self._pending.append(row)
        if len(self._pending) == _BATCH_ROWS:
            self._pack()

    @property
    def content_hash(self) -> str:
        """Hash of ids, masks and conversations, in order."""
        return self._digest.hexdigest()

    def write(self, folder: Path) -> None:
        """Replace ``folder`` by these rows; it appears complete or not at all."""
        import pyarrow as pa
        from datasets import (
            Dataset,
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        self._pack()
        table = pa.Table.from_batches(self._batches, schema=_schema())
        scratch = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        shown = not are_progress_bars_disabled()
        disable_progress_bars()
        try:
            # Without a shard an empty split could not be loaded again.
            shards = None if self.num_rows else 1
            Dataset(table).save_to_disk(str(scratch), num_shards=shards)
        finally:
            if shown:
                enable_progress_bars()
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)

    def _pack(self) -> None:
        import pyarrow as pa

        rows, self._pending = self._pending, []
        if rows:
            columns = {
                "sample_id": [row.sample_id for row in rows],
                "conversation_id": [row.conversation_id for row in rows],
                "source": [row.source for row in rows],
                "input_ids": [row.input_ids for row in rows],
                "loss_mask": [row.loss_mask for row in rows],
                "cut_off": [row.cut_off for row in rows],
            }
            self._batches.append(pa.RecordBatch.from_pydict(columns, schema=_schema()))


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("sample_id", pa.string()),
            ("conversation_id", pa.string()),
            ("source", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("cut_off", pa.bool_()),
        ]
    )


def write_json(path: Path, value: Any) -> None:
    """Write JSON durably and in one rename."""
    write_lines(path, [json.dumps(value, indent=2, ensure_ascii=False)])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of JSON durably and in one rename."""
    text = "".join(line + "\n" for line in lines)
    # Half a character, say in a record's id, has no UTF-8; JSON escapes it as Python does.
    write_atomic(path, text.encode(errors="backslashreplace"))
