"""What a person sees: rich tables, stage headers, one progress line, readable numbers.

Consoles are made by the command that owns the terminal and passed on; nothing here is global.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table


def make_console(*, is_leader: bool = True, stderr: bool = False) -> Console:
    """A console on standard output (or error); that of other ranks stays silent."""
    return Console(highlight=False, quiet=not is_leader, stderr=stderr)


def setup_logging(console: Console, *, level: int = logging.INFO) -> None:
    """Send the project's own log records through ``console``; other packages from warnings up."""
    handler = RichHandler(console=console, show_path=False, markup=False, log_time_format="[%X]")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    for package in ("mtp_train", "data_prep", "runtime"):
        logging.getLogger(package).setLevel(level)


def make_progress(console: Console, *, fields: Sequence[str] = ()) -> Progress:
    """One progress line: description, bar, done/total, ``fields``, elapsed and remaining time.

    ``fields`` are keyword names that every ``add_task`` and later ``update`` sets to ready text,
    for instance ``loss="2.31"``.
    """
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        *(TextColumn(f"{name} {{task.fields[{name}]}}") for name in fields),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=False,
        disable=console.quiet,
        refresh_per_second=4,
    )


def make_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str = ""
) -> Table:
    """A plain table; numbers stand right."""
    table = Table(title=title, title_justify="left", caption=caption or None)
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    return table


def format_duration(seconds: float) -> str:
    """``4.2 s``, ``3 min 05 s``, ``2 h 07 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_bytes(count: float) -> str:
    """``512 B``, ``3.4 MB``, ``1.2 GB`` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)
