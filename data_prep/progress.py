"""A progress bar that can be switched off."""

from __future__ import annotations

from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress


class Progress:
    """Conversations done, and tokens generated where the target answers."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar = RichProgress(
            TextColumn("conversations"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[generated]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            disable=not enabled,
        )
        self._task = self._bar.add_task("conversations", total=total, generated="")
        self._num_tokens = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def add_tokens(self, count: int) -> None:
        self._num_tokens += count
        self._bar.update(self._task, generated=f"{self._num_tokens:,} tokens generated")
