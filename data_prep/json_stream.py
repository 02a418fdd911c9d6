"""Reads every complete JSON record of a file, however damaged, and says where the damage is.

Works on a sliding window, so a file need not fit into memory. Text that does not decode is kept as
lone surrogates, which the record reader refuses by name.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

WINDOW_CHARS = 4 << 20
MAX_RECORD_CHARS = 64 << 20  # an incomplete record beyond this is damage, not a long record

_BETWEEN = re.compile(r"[\s,\[\]\ufeff]*")
# A damaged array is entered again at the next object that follows another or starts a line.
_OBJECT_START = re.compile(r"\{")


@dataclass(frozen=True)
class Damage:
    """A stretch of the file that holds no complete record."""

    detail: str
    record_id: str


def read_json_records(path: Path, *, is_record: frozenset[str]) -> Iterator[Any | Damage]:
    """Yield the objects of a JSON array or of JSON lines, and a :class:`Damage` per broken part.

    After damage, reading goes on at the next object that has the keys of ``is_record`` that the
    records before had (any one, if there were none): the inner objects of a broken record are not
    taken for records.
    """
    with _open_text(path) as stream:
        if _is_json_lines(path):
            yield from _read_lines(stream)
        else:
            yield from _read_values(stream, is_record)


def read_text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(line number from 1, text)`` of the lines that are not blank."""
    with _open_text(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, line.strip()


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="surrogateescape")
    return path.open(encoding="utf-8", errors="surrogateescape")


def _is_json_lines(path: Path) -> bool:
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        return True
    with _open_text(path) as stream:
        first = next((line for line in stream if line.strip(" \t\r\n\ufeff")), "")
    try:
        return isinstance(json.loads(first.lstrip("\ufeff")), dict)
    except ValueError:
        return False


def _read_lines(stream: IO[str]) -> Iterator[Any | Damage]:
    number = 0
    try:
        for number, line in enumerate(stream, start=1):
            text = line.strip(" \t\r\n\ufeff")
            if not text:
                continue
            try:
                yield json.loads(text)
            except ValueError as error:
                yield Damage(f"line {number}: {error}", f"line-{number}")
    except (EOFError, gzip.BadGzipFile) as error:
        yield Damage(f"after line {number}: {error}", f"line-{number + 1}")


def _read_values(stream: IO[str], is_record: frozenset[str]) -> Iterator[Any | Damage]:
    window = _Window(stream)
    decoder = json.JSONDecoder()
    expected: frozenset[str] = frozenset()
    while True:
        window.skip(_BETWEEN)
        if window.at_end:
            break
        try:
            value, end = decoder.raw_decode(window.text, window.position)
        except (ValueError, RecursionError) as error:
            pending = len(window.text) - window.position
            if pending < MAX_RECORD_CHARS and window.extend():
                continue
            start = window.offset + window.position
            found = _resynchronise(window, decoder, expected, is_record)
            where = f"characters {start} to {window.offset + window.position}"
            reason = str(error).split(":")[0]
            yield Damage(f"{where}: {reason}" + ("" if found else " (end of file)"), f"at-{start}")
            continue
        window.position = end
        if isinstance(value, dict):
            expected = is_record & value.keys()
        yield value
    if window.failure:
        yield Damage(window.failure, f"at-{window.offset + window.position}")


def _resynchronise(
    window: _Window,
    decoder: json.JSONDecoder,
    expected: frozenset[str],
    is_record: frozenset[str],
) -> bool:
    """Move to the next complete record after a damaged one; to the end if there is none."""
    position = window.position + 1
    while True:
        match = _OBJECT_START.search(window.text, position)
        if match is None:
            window.position = len(window.text)
            if not window.extend():
                return False
            position = window.position
            continue
        position = match.start()
        try:
            value, _ = decoder.raw_decode(window.text, position)
        except (ValueError, RecursionError):
            # Cut by the window's edge, perhaps: only an extended window can tell.
            if len(window.text) - position < WINDOW_CHARS and window.extend_from(position):
                position = window.position
            else:
                position += 1
            continue
        keys = value.keys() if isinstance(value, dict) else frozenset()
        if is_record & keys and expected <= keys:
            window.position = position
            return True
        position += 1


class _Window:
    """The part of the file in memory; ``offset`` characters lie before it."""

    def __init__(self, stream: IO[str]) -> None:
        self.text = ""
        self.position = 0
        self.offset = 0
        self.failure = ""
        self._stream = stream
        self._next_read = WINDOW_CHARS
        self.extend()

    @property
    def at_end(self) -> bool:
        return self.position >= len(self.text) and not self.extend()

    def skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.position)
        assert match is not None, "the pattern matches the empty string"
        self.position = match.end()

    def extend_from(self, position: int) -> bool:
        self.position = position
        return self.extend()

    def extend(self) -> bool:
        """Read more and forget what lies before ``position``. ``False`` at the end of the file."""
        try:
            more = self._stream.read(max(self._next_read, len(self.text) - self.position))
        except (EOFError, gzip.BadGzipFile) as error:
            self.failure = str(error)
            return False
        if not more:
            return False
        self.offset += self.position
        self.text = self.text[self.position :] + more
        self.position = 0
        return True
