"""What ``mtp data`` shows of a token set."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from data_prep.chat import ChatFormat
from data_prep.pipeline import DataReport
from data_prep.statistics import preview, statistics_tables
from data_prep.token_set import load_token_set

if TYPE_CHECKING:
    from rich.console import RenderableType


def describe(report: DataReport, chat: ChatFormat, *, num_preview_rows: int = 2) -> RenderableType:
    """Statistics, rejects, notes, and the first training rows with the mask in colour."""
    from rich.console import Group
    from rich.text import Text

    state = f"made in {report.wall_s:.1f} s" if report.is_new else "finished before, not changed"
    rows = islice(load_token_set(report.path).rows("train"), num_preview_rows)
    return Group(
        statistics_tables(report.splits, report.rejects),
        *(Text(f"note: {note}", style="yellow") for note in report.notes),
        preview(rows, chat),
        Text(f"{report.path}: {state}; fingerprint {report.fingerprint[:16]}"),
    )
