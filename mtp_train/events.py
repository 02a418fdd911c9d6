"""The structured log of a run: ``events.jsonl``, one JSON object per line.

Every line has ``time`` (UTC, ISO 8601), ``stage`` and ``event``; the rest belongs to the event.
A process killed in the middle of a line leaves a torn line, which the next writer closes and
readers skip. Numbers that JSON cannot hold (NaN, infinities) are written as text.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any


class EventLog:
    """Appends events of one stage; each line is handed to the system before ``write`` returns.

    ``path=None`` drops everything: that is what ranks other than the leader use.
    """

    def __init__(self, path: Path | None, *, stage: str) -> None:
        self.path = path
        self.stage = stage
        self.num_written = 0
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            if _ends_inside_a_line(path):
                self._file.write(b"\n")

    def write(self, event: str, fields: Any = None, /, **more: Any) -> None:
        """Append one event. ``fields`` is a dataclass instance or a mapping; ``more`` adds to it.

        Raises ``ValueError`` when a field would replace ``time``, ``stage`` or ``event``.
        """
        values = dict(_as_mapping(fields)) | more
        taken = sorted({"time", "stage", "event"} & values.keys())
        if taken:
            raise ValueError(f"event {event}: field name(s) {', '.join(taken)} are reserved")
        if self._file is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "stage": self.stage, "event": event} | values
        line = json.dumps(to_jsonable(record), ensure_ascii=False, allow_nan=False) + "\n"
        # Half a character has no UTF-8; JSON escapes it as Python does.
        self._file.write(line.encode(errors="backslashreplace"))
        self.num_written += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_events(
    path: Path, *, stage: str | None = None, event: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the complete events of a log in order, optionally of one stage or kind only."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:  # torn by a kill; nothing after it was lost
                continue
            if not isinstance(record, dict):
                continue
            if stage is not None and record.get("stage") != stage:
                continue
            if event is not None and record.get("event") != event:
                continue
            yield record


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of a stage, up to its end or, where it was killed, the last thing it logged."""

    start: datetime.datetime
    end: datetime.datetime
    is_finished: bool

    @property
    def seconds(self) -> float:
        return (self.end - self.start).total_seconds()


def stage_attempts(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Attempt]]:
    """The attempts of every stage that logged anything, in order of the first ones.

    A start whose settings were refused is none.
    """
    found: dict[str, list[Attempt]] = {}
    for event in events:
        time = datetime.datetime.fromisoformat(event["time"])
        attempts = found.setdefault(event["stage"], [])
        if event["event"] == "stage_refused" and attempts:
            attempts.pop()
            continue
        if event["event"] == "stage_started" or not attempts:
            attempts.append(Attempt(time, time, is_finished=False))
        is_finished = attempts[-1].is_finished or event["event"] == "stage_finished"
        attempts[-1] = Attempt(attempts[-1].start, time, is_finished)
    return {stage: attempts for stage, attempts in found.items() if attempts}


def to_jsonable(value: Any) -> Any:
    """Plain JSON types: dataclasses to objects, paths to text, NaN and infinities to text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _as_mapping(fields: Any) -> Mapping[str, Any]:
    if fields is None:
        return {}
    if isinstance(fields, Mapping):
        return fields
    return {f.name: getattr(fields, f.name) for f in dataclasses.fields(fields)}


def _ends_inside_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
