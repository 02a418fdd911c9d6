"""An append-only file of finished answers that survives ``kill -9``.

Every record is on disk before the next step relies on it. A last line torn by a crash is cut off on
opening; the answer it held is generated again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.request import FinishReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JournalRecord:
    """One finished answer. ``key`` hashes conversation, turn and prompt ids.

    ``fault`` is a reject reason: there was an answer, and it cannot be used. ``is_retokenised``:
    it came as text and was tokenised again.
    """

    key: str
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    fault: str = ""
    detail: str = ""
    is_retokenised: bool = False


class Journal:
    """Finished answers by key. The first line holds ``header``: what the answers depend on.

    Raises ``ValueError`` when the file was written under another header, naming the keys that
    differ, or when a line other than the last is damaged.
    """

    def __init__(self, path: Path, *, header: Mapping[str, Any]) -> None:
        self._path = path
        self._records: dict[str, JournalRecord] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a+b")
        try:
            self._load(dict(header))
        except ValueError:
            self._stream.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_retokenised(self) -> int:
        return sum(record.is_retokenised for record in self._records.values())

    def get(self, key: str) -> JournalRecord | None:
        return self._records.get(key)

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Return when the records are durable."""
        for record in records:
            assert record.key not in self._records, f"answer {record.key} finished twice"
            self._records[record.key] = record
        self._write([_as_line(record) for record in records])

    def _load(self, header: dict[str, Any]) -> None:
        self._stream.seek(0)
        lines = self._stream.read().split(b"\n")
        torn = lines.pop()  # empty after a complete last line
        if torn:
            complete = sum(len(line) + 1 for line in lines)
            logger.warning("%s: the last line is incomplete and is cut off", self._path)
            self._stream.truncate(complete)
        if not lines:
            self._write([header])
            return
        parsed = [self._parse(number, line) for number, line in enumerate(lines, start=1)]
        found = parsed[0]
        # The header went through JSON, where tuples become lists.
        wanted = json.loads(json.dumps(header))
        if found != wanted:
            found = found if isinstance(found, dict) else {}
            names = sorted(
                key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)
            )
            raise ValueError(
                f"{self._path} holds answers made under other settings ({', '.join(names)}): "
                "use another run or remove the file"
            )
        for key, reason, ids, *more in parsed[1:]:
            extras = more[0] if more else {}
            self._records[key] = JournalRecord(key, tuple(ids), reason, **extras)

    def _parse(self, number: int, line: bytes) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self._path}: line {number} is damaged: {error}") from error

    def _write(self, values: Sequence[Any]) -> None:
        lines = (json.dumps(value, separators=(",", ":")).encode() + b"\n" for value in values)
        self._stream.write(b"".join(lines))
        self._stream.flush()
        os.fsync(self._stream.fileno())


def _as_line(record: JournalRecord) -> list[Any]:
    line: list[Any] = [record.key, record.finish_reason, list(record.output_ids)]
    extras = {
        "fault": record.fault,
        "detail": record.detail,
        "is_retokenised": record.is_retokenised,
    }
    given = {name: value for name, value in extras.items() if value}
    return [*line, given] if given else line
