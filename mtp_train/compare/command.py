"""`mtp compare RUN...`: read, compare, show. Exit code 1 when a directory could not be read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_train.app import Stage, refuse
from mtp_train.config import Config
from mtp_train.overrides import override
from mtp_train.settings import known_keys
from mtp_train.shorthands import BY_COMMAND, EVERYWHERE

if TYPE_CHECKING:
    from rich.console import Console

    from mtp_train.compare.facts import Comparison
    from mtp_train.report.view import Table

_ANSWERS_BEFORE_RUN = {"-h", "--help", "--cfg", "-c", "--hydra-help"}


def take_runs(stage: Callable[..., int], arguments: Sequence[str]) -> tuple[Stage, list[str]]:
    """Directories and ``--json`` as the settings that they stand for. Exits with 2 without runs."""
    runs = [argument for argument in arguments if _is_run(argument)]
    rest = [a for a in arguments if a not in runs]
    rest = ["compare.json=true" if argument == "--json" else argument for argument in rest]
    if runs:
        return stage, [*rest, override("compare.runs", runs)]
    is_named = any(argument.startswith("compare.runs=") for argument in rest)
    if not is_named and not _ANSWERS_BEFORE_RUN & set(rest):
        refuse("compare: no runs; name their directories, as in mtp compare runs/*")
    return stage, rest


def run_compare(config: Config) -> int:
    """Tables or JSON to standard output, and the page where one is asked for."""
    from mtp_train.compare.build import compare
    from mtp_train.compare.page import write_page
    from mtp_train.compare.tables import to_json
    from mtp_train.console import make_console

    settings = config.compare
    try:
        comparison = compare(settings)
    except ValueError as error:
        refuse(str(error), code=1)
    console = make_console()
    if settings.json:
        values = to_json(comparison)
        console.file.write(json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        _show(comparison, console)
    if settings.html:
        write_page(comparison, Path(settings.html))
        make_console(stderr=True).print(f"compare: {settings.html}", markup=False)
    return 1 if any(one.is_error for one in comparison.unreadable) else 0


def _is_run(argument: str) -> bool:
    """A directory's name may hold ``=``, as those of a sweep's members do."""
    if argument.startswith("-"):
        return False
    key, equals, _ = argument.partition("=")
    if not equals or os.path.lexists(argument):
        return True
    known = {*known_keys(), *EVERYWHERE, *BY_COMMAND["compare"], "experiment"}
    return "/" in key and key.lstrip("+~") not in known and not key.startswith("hydra/")


def _show(comparison: Comparison, console: Console) -> None:
    from mtp_train.compare.tables import (
        MOST_COLUMNS,
        acceptance_table,
        answers_table,
        cost_table,
        describe_condition,
        missing_lines,
        settings_table,
        turned,
    )
    from mtp_train.learning_curve.panel import curve_table, describe_curve

    is_few = len(comparison.runs) <= MOST_COLUMNS

    def fit(content: Table) -> Table:
        """A few runs side by side fit a terminal better than a line of all figures each."""
        return turned(content) if is_few else content

    title = f"acceptance: {describe_condition(comparison)}"
    _print(title, fit(acceptance_table(comparison)), console)
    settings = settings_table(comparison)
    if settings.rows:
        _print("settings that differ", settings, console)
    else:
        console.print("no recorded setting differs")
    _print("cost", fit(cost_table(comparison)), console)
    if comparison.answers:
        _print("answers", answers_table(comparison), console)
    if comparison.curve.tau is not None:
        _print("what more data brings", turned(curve_table(comparison.curve)), console)
    console.print(describe_curve(comparison.curve), markup=False, soft_wrap=True)
    for line in missing_lines(comparison):
        console.print(line, markup=False, soft_wrap=True)


def _print(title: str, content: Table, console: Console) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    table = RichTable(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(content.columns):
        is_text = index in content.texts
        table.add_column(escape(column), justify="left" if is_text else "right", overflow="fold")
    for row in content.rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)
