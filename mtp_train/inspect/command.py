"""`mtp inspect DIR`: look, judge, show. Exit code 1 when something is an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_train.app import Stage, refuse
from mtp_train.config import Config
from mtp_train.overrides import override

if TYPE_CHECKING:
    from rich.console import Console

    from mtp_train.foreign.inspection import Inspection

_ANSWERS_BEFORE_HEAD = {"-h", "--help", "--cfg", "-c", "--hydra-help"}
_STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "note": "dim",
    "loads": "green",
    "loads, drafts wrongly": "bold red",
    "refuses": "red",
    "cannot": "dim",
}


def take_head(stage: Callable[..., int], arguments: Sequence[str]) -> tuple[Stage, list[str]]:
    """The directory, ``--json`` and ``inspect.as`` as the settings that they stand for. Exits with
    2 without a directory.
    """
    heads = [argument for argument in arguments if _is_head(argument)]
    rest = [a for a in arguments if a not in heads]
    rest = ["inspect.json=true" if argument == "--json" else argument for argument in rest]
    as_key = "inspect.as="
    rest = [f"foreign.format={a.removeprefix(as_key)}" if a.startswith(as_key) else a for a in rest]
    if len(heads) > 1:
        refuse(f"inspect: one head at a time, not {', '.join(heads)}")
    if heads:
        return stage, [*rest, override("inspect.head", heads[0])]
    is_named = any(argument.startswith("inspect.head=") for argument in rest)
    if not is_named and not _ANSWERS_BEFORE_HEAD & set(rest):
        refuse("inspect: no head; name its directory, as in mtp inspect /heads/mine")
    return stage, rest


def run_inspect(config: Config) -> int:
    """Tables or JSON to standard output; 1 where a finding is an error."""
    from mtp_train.console import make_console
    from mtp_train.features.target import cache_directory, target_directory
    from mtp_train.foreign.inspection import inspect_head
    from mtp_train.foreign.sizes import read_target

    try:
        target = cache_dir = None
        if config.target.path:
            target = read_target(target_directory(config.target))
            cache_dir = cache_directory(config.target)
        inspection = inspect_head(
            Path(config.inspect.head), config.foreign, target=target, cache_dir=cache_dir
        )
    except ValueError as error:
        refuse(str(error), code=1)
    console = make_console()
    if config.inspect.json:
        console.file.write(json.dumps(inspection.to_dict(), ensure_ascii=False) + "\n")
    else:
        _show(inspection, console)
    return 1 if inspection.has_errors else 0


def _is_head(argument: str) -> bool:
    """A directory's name may hold ``=``."""
    if argument.startswith("-"):
        return False
    return "=" not in argument or os.path.isdir(argument)


def _show(inspection: Inspection, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    def print_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
        console.print(f"\n{title}", style="bold")
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows:
            style = _STYLES.get(name, "")
            table.add_row(f"[{style}]{escape(name)}[/]" if style else escape(name), escape(text))
        console.print(table)

    console.print(_headline(inspection), markup=False, soft_wrap=True)
    if inspection.reading is not None and inspection.reading.facts:
        print_rows("Expects", inspection.reading.facts)
    if inspection.engines:
        console.print("\nEngines (from their loaders, not tried)", style="bold")
        for verdict in inspection.engines:
            console.print(
                f"{verdict.engine}: [{_STYLES[verdict.outcome]}]{verdict.outcome}[/]",
                soft_wrap=True,
            )
            for line in verdict.why:
                console.print(f"  - {line}", markup=False, soft_wrap=True)
    console.print("\nFindings" if inspection.findings else "\nNothing found.", style="bold")
    for finding in inspection.findings:
        style = _STYLES[finding.severity]
        console.print(
            f"[{style}]{finding.severity}[/]  [bold]{finding.code}[/]  {escape(str(finding))}",
            soft_wrap=True,
        )
    console.print(f"\n{_reading_line(inspection)}", markup=False, soft_wrap=True)


def _headline(inspection: Inspection) -> str:
    if inspection.format is None or inspection.recognised is None:
        return f"{inspection.directory}: no known format"
    found = inspection.recognised
    writer = f", {found.writer}" if found.writer else ""
    place = ", in its target's checkpoint" if found.in_target else ""
    return f"{inspection.directory}: {inspection.format.title}{writer}{place} (by {found.evidence})"


def _reading_line(inspection: Inspection) -> str:
    why = inspection.why_not_read
    if why:
        return f"Not read by mtp train and mtp validate: {why}"
    return (
        f"mtp validate validate.head={inspection.directory} measures it, mtp train "
        f"head.init={inspection.directory} goes on from it."
    )
