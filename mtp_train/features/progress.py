"""The one line a dump shows: done / total tokens, tokens/s, GB/s written, time left."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class DumpProgress:
    """Progress of one rank's share. ``console=None`` shows nothing."""

    def __init__(self, console: Console | None, *, title: str, num_tokens: int) -> None:
        self._progress: Progress | None = None
        self._started = time.perf_counter()
        self._num_done = 0
        if console is None or console.quiet:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(title, total=num_tokens, speed="")

    def __enter__(self) -> DumpProgress:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, num_tokens: int, *, num_bytes: int) -> None:
        """``num_tokens`` more are computed; ``num_bytes`` are on disk in all."""
        self._num_done += num_tokens
        if self._progress is None:
            return
        elapsed = time.perf_counter() - self._started
        speed = f"tokens {self._num_done / elapsed:,.0f} tok/s {num_bytes / elapsed / 1e9:.3f} GB/s"
        self._progress.update(self._task, advance=num_tokens, speed=speed)
