"""`mtp bench`: measure, show, record. Exit code 1 when a contestant failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_train.app import Stage
from mtp_train.config import Config

if TYPE_CHECKING:
    from rich.console import Console

    from mtp_train.bench.facts import Cell, Contestant
    from mtp_train.bench.run import Journal
    from mtp_train.bench.schedule import Schedule

_LISTS = ("url", "heads", "k", "concurrency", "prompts")


def take_lists(stage: Callable[..., int], arguments: Sequence[str]) -> tuple[Stage, list[str]]:
    """``heads=none,a,b`` as the list that it stands for: a comma would ask Hydra for a sweep."""
    return stage, [_as_list(argument) for argument in arguments]


def run_bench(config: Config) -> int:
    """Measure every contestant at every concurrency; 1 when one of them failed.

    Raises ``ValueError`` for prompts, heads or servers that are not there.
    """
    from mtp_train.app import config_values
    from mtp_train.bench.contestants import find_contestants, make_load, open_contestant
    from mtp_train.bench.run import Watch, num_requests, run_rounds
    from mtp_train.console import make_console, make_progress, setup_logging
    from mtp_train.run_dir import RunDirectory, describe_machine

    settings = config.bench
    console = make_console()
    setup_logging(console)
    load = make_load(config)
    contestants = find_contestants(config, load)
    out = Path(settings.out or RunDirectory.from_config(config).root / "bench.json")
    frame = {"settings": config_values(config)["bench"], "machine": describe_machine()}

    def save(journal: Journal, *, finished: bool = False) -> None:
        _write(out, frame, contestants, journal, config, finished=finished)

    total = num_requests(load, settings.concurrency) * len(contestants) * settings.rounds
    with make_progress(console) as progress:
        task = progress.add_task("bench", total=total)
        journal = run_rounds(
            contestants,
            load,
            concurrency=settings.concurrency,
            rounds=settings.rounds,
            keep_alive=bool(settings.url) or settings.servers == "all",
            open_=lambda contestant: open_contestant(contestant, config, load),
            watch=Watch(
                cell=lambda text: progress.update(task, description=text),
                answered=lambda: progress.advance(task),
                skipped=lambda count: progress.advance(task, count),
                save=save,
            ),
        )
    save(journal, finished=True)
    _show(config, contestants, journal, console)
    console.print(f"bench: {out}", markup=False, soft_wrap=True)
    return 1 if journal.failed else 0


def _write(
    out: Path,
    frame: dict[str, Any],
    contestants: Sequence[Contestant],
    journal: Journal,
    config: Config,
    *,
    finished: bool,
) -> None:
    from mtp_train.bench.arithmetic import judge_columns, summarise
    from mtp_train.bench.schedule import best_schedules
    from mtp_train.bench.show import run_values
    from mtp_train.run_dir import write_json_atomic

    cells = summarise(contestants, journal.runs, min_equal=config.bench.min_equal)
    schedules = best_schedules(cells)
    advice: dict[str, Any] = {}
    if finished:
        has_option, note = _option_of(config)
        advice = {
            one.head: _vllm_config(one, contestants, has_option=has_option) for one in schedules
        } | ({"note": note} if note else {})
    write_json_atomic(
        out,
        {
            "finished": finished,
            **frame,
            "versions": journal.versions,
            "failed": journal.failed,
            "cells": cells,
            "columns": judge_columns(cells, journal.runs),
            "schedules": schedules,
            "speculative_config": advice,
            "runs": [run_values(run) for run in journal.runs],
        },
    )


def _show(
    config: Config, contestants: Sequence[Contestant], journal: Journal, console: Console
) -> None:
    from mtp_train.bench.arithmetic import judge_columns, summarise
    from mtp_train.bench.schedule import best_schedules
    from mtp_train.bench.show import details_table, note_lines, schedule_lines, winners_table

    cells: list[Cell] = summarise(contestants, journal.runs, min_equal=config.bench.min_equal)
    columns = judge_columns(cells, journal.runs)
    lines = note_lines(cells, columns, journal.failed)
    has_option, note = _option_of(config)
    for schedule in best_schedules(cells):
        lines += schedule_lines(
            schedule,
            _vllm_config(schedule, contestants, has_option=has_option),
            option_note=note,
            has_interval=config.bench.rounds > 1,
        )
    tables = [winners_table(cells, columns), details_table(cells)]
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if config.bench.svg:
        _draw(Path(config.bench.svg), tables, lines)
        console.print(f"bench: {config.bench.svg}", markup=False, soft_wrap=True)


def _draw(file: Path, tables: Sequence[Any], lines: Sequence[str]) -> None:
    import io

    from rich.console import Console

    from mtp_train.run_dir import write_text_atomic

    canvas = Console(record=True, width=160, file=io.StringIO(), highlight=False)
    for table in tables:
        canvas.print(table)
    for line in lines:
        canvas.print(line, markup=False)
    write_text_atomic(file, canvas.export_svg(title="mtp bench"))


def _option_of(config: Config) -> tuple[bool, str]:
    """Whether the user's vLLM takes a K per batch size, and what to say about it."""
    from mtp_train.bench.schedule import OPTION
    from mtp_train.serving.launch import takes_speculative_option
    from mtp_train.serving.process import find_python

    if not config.engine.python:
        return True, f"{OPTION} is an option of vLLM 0.32; yours was not asked"
    if takes_speculative_option(find_python(config.engine.python), OPTION):
        return True, ""
    return False, f"this vLLM has no {OPTION}: one K for all batch sizes, that of batch size 1"


def _vllm_config(
    schedule: Schedule, contestants: Sequence[Contestant], *, has_option: bool
) -> dict[str, Any] | None:
    from mtp_train.bench.contestants import read_head_layout
    from mtp_train.bench.schedule import speculative_config

    if not schedule.most:
        return None
    directory = next(
        (one.directory for one in contestants if one.head == schedule.head and one.directory), None
    )
    method = read_head_layout(directory).method if directory else "METHOD"
    return speculative_config(schedule, method=method, head=directory, has_option=has_option)


def _as_list(argument: str) -> str:
    key, equals, value = argument.partition("=")
    is_list = key in _LISTS or key in {f"bench.{name}" for name in _LISTS}
    if not equals or not is_list or value.startswith("["):
        return argument
    items = [_quote(item.strip()) for item in value.split(",") if item.strip()]
    return f"{key}=[{','.join(items)}]"


def _quote(item: str) -> str:
    from mtp_train.overrides import override

    return item if item.isdigit() else override("", item).removeprefix("=")
