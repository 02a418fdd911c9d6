"""What the template draws: panels of a chart, a table and a sentence each."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_train.report.charts import Drawing

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Table:
    """Cells are text. Columns stand right unless they are in ``texts``."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: frozenset[int] = frozenset({0})


@dataclass(frozen=True)
class Key:
    """One entry of a legend: the mark of :class:`~mtp_train.report.charts.Mark` and its name."""

    name: str
    swatch: str  # SVG text


@dataclass(frozen=True)
class Panel:
    """One figure of the page. Without drawing and table it says that nothing was measured.

    ``is_open``: the table is shown at once instead of behind a click.
    """

    title: str
    lead: str = ""
    drawing: Drawing | None = None
    table: Table | None = None
    legend: tuple[Key, ...] = ()
    is_open: bool = False
    absent: str = NOT_MEASURED
    is_broad: bool = False  # over the whole width of the page

    @property
    def is_empty(self) -> bool:
        return self.drawing is None and (self.table is None or not self.table.rows)


@dataclass(frozen=True)
class Tile:
    """One number of the top box and what it depends on."""

    title: str
    value: str
    unit: str = ""
    interval: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A heading and its panels."""

    anchor: str
    title: str
    panels: tuple[Panel, ...]
    lead: str = ""

    @property
    def is_empty(self) -> bool:
        return all(panel.is_empty for panel in self.panels)
