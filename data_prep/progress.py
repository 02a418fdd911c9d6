"""Progress of the data stage: a bar on a terminal, a line in the log every minute elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from data_prep.journal import JournalRecord

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0
_SPEED_WINDOW_S = 120.0  # what "tokens/s" and the time left are estimated from


class Progress:
    """Conversations done, tokens generated where the target answers, tokens per second, time left.

    The end is near when either the conversations or ``token_budget`` (0: none) are used up. Where
    the target answers (``generates``), speed and time left rest on what it does now: they count
    from its first answer on, and leave out what the journal gives. Without a console nothing is
    shown. ``clock`` is in seconds.
    """

    def __init__(
        self,
        total: int,
        *,
        token_budget: int = 0,
        generates: bool = False,
        console: Console | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        is_live = console is not None and console.is_terminal
        self._bar = RichProgress(
            TextColumn("conversations"),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TextColumn("{task.fields[generated]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not is_live,
        )
        self._task = self._bar.add_task(
            "data", total=1.0, done=f"0/{total:,}", generated="", left=""
        )
        self._logs = console is not None and not is_live
        self._clock = clock
        self._total = total
        self._budget = token_budget
        self._num_done = 0
        self._share = 0.0
        self._generated = _Rate(clock)
        self._shares = _Rate(clock)
        if not generates:
            self._shares.begin()
        self._num_cut_off = 0
        self._next_log = clock() + _LOG_EVERY_S

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
        if self._logs and kind is None:
            logger.info("%s", self.describe())

    def advance(self, num_train_tokens: int, *, recalled: float = 0.0) -> None:
        """One conversation more is done; the training split now has so many tokens.

        ``recalled``: the share of its answers that the journal gave, at no cost.
        """
        self._num_done += 1
        share = self._num_done / self._total
        if self._budget:
            share = max(share, num_train_tokens / self._budget)
        share = min(share, 1.0)
        self._shares.add((share - self._share) * (1 - recalled))
        self._share = share
        done = f"{self._num_done:,}/{self._total:,}"
        self._bar.update(self._task, completed=share, done=done, left=self._left())
        self._log()

    def add_answer(self, record: JournalRecord) -> None:
        """One answer more was generated."""
        self._generated.add(len(record.output_ids))
        self._generated.begin()
        self._shares.begin()
        self._num_cut_off += record.finish_reason == "length"
        self._bar.update(self._task, generated=self._answers())
        self._log()

    def describe(self) -> str:
        """The bar in words."""
        parts = [f"{self._num_done:,} of {self._total:,} conversations"]
        if self._generated.total:
            parts.append(self._answers())
        if left := self._left():
            parts.append(left)
        return ", ".join(parts)

    def _left(self) -> str:
        rate = self._shares.per_second()
        if not rate or self._share >= 1:
            return ""
        return f"about {(1 - self._share) / rate / 60:.0f} min left"

    def _answers(self) -> str:
        text = f"{self._generated.total:,.0f} tokens generated"
        if rate := self._generated.per_second():
            text += f" at {rate:,.0f}/s"
        return text + (f", {self._num_cut_off:,} answers cut off" if self._num_cut_off else "")

    def _log(self) -> None:
        if self._logs and self._clock() >= self._next_log:
            self._next_log = self._clock() + _LOG_EVERY_S
            logger.info("%s", self.describe())


class _Rate:
    """A running total, and how fast it grew over the last window or two since :meth:`begin`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.total = 0.0
        self._marks: list[tuple[float, float]] = []  # start of the last window, start of this one

    def begin(self) -> None:
        """Measure from now on; the first call counts."""
        if not self._marks:
            self._marks = [(self._clock(), self.total)] * 2

    def add(self, amount: float) -> None:
        self.total += amount
        if self._marks and self._clock() - self._marks[1][0] > _SPEED_WINDOW_S:
            self._marks = [self._marks[1], (self._clock(), self.total)]

    def per_second(self) -> float:
        """0 while nothing can be said."""
        if not self._marks:
            return 0.0
        start, before = self._marks[0]
        elapsed = self._clock() - start
        return (self.total - before) / elapsed if elapsed > 1 else 0.0
