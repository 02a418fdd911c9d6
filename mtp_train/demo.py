"""`mtp demo`: the whole line on a small real model, in one process, resumable.

Each stage knows by itself what is left to do, so the demo runs them in order and needs no state of
its own. The summary holds figures of ``parity.json`` and times of ``events.jsonl``, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_train.app import run_command
from mtp_train.config import Config, ServingConfig
from mtp_train.events import read_events, stage_attempts
from mtp_train.run_dir import RunDirectory, read_json, write_json_atomic
from mtp_train.stages import (
    run_data,
    run_export,
    run_precompute,
    run_report,
    run_train,
    run_validate,
)

if TYPE_CHECKING:
    from rich.console import Console

DRAFT_LENGTHS = (1, 3)  # K of the figures in the summary


def validate_alone(config: Config) -> int:
    """P0 to P5: nothing is exported yet that an engine could serve."""
    return run_validate(replace(config, engine=ServingConfig()))


def validate_engine(config: Config) -> int:
    """P6, where the configuration names a serving engine."""
    if config.engine.kind == "none":
        from mtp_train.console import make_console

        make_console().print(
            "P6 was not run: no serving engine is named; `make interop` builds one, and the demo "
            "takes it from then on"
        )
        return 0
    return run_validate(replace(config, validate=replace(config.validate, rungs=("P6",))))


Stages = tuple[tuple[str, Callable[[Config], int]], ...]
STAGES: Stages = (
    ("data", run_data),
    ("precompute", run_precompute),
    ("train", run_train),
    ("validate", validate_alone),
    ("export", run_export),
    ("engine", validate_engine),
)
_TIMED = ("data", "precompute", "train", "validate", "export")  # P6 counts as validation
_WITH_FIGURES = ("validate", "engine")  # a failed rung still has figures worth showing


def run_demo(config: Config, stages: Stages = STAGES) -> int:
    """Run the stages, write ``summary.json``, show it. Returns the exit code of the stage that
    failed; nothing is exported after a rung has.
    """
    from mtp_train.console import make_console

    console = make_console()
    run = RunDirectory.from_config(config)
    code = 0
    for number, (name, stage) in enumerate(stages, start=1):
        console.rule(f"{number}/{len(stages)} {name}", align="left")
        code = stage(config)
        if code and name not in _WITH_FIGURES:
            return code
        if code:
            break
    summary = summarise(
        read_json(run.parity_file),
        wall_s=stage_seconds(run.events_file),
        prompt_set=config.validate.sets[0],
        run=run,
    )
    write_json_atomic(run.summary_file, summary)
    show_summary(console, summary, run.summary_file)
    run_report(config)  # again: stages after the validation have left their records
    return code


def summarise(
    parity: Mapping[str, Any],
    *,
    wall_s: Mapping[str, float],
    prompt_set: str,
    run: RunDirectory,
) -> dict[str, Any]:
    """The demo's ``summary.json``; times in seconds, rates as shares of all drafts.

    Raises ``ValueError`` naming the figure that ``parity.json`` does not have.
    """
    rows = {
        k: _find(parity["acceptance"], "acceptance", prompt_set=prompt_set, temperature=0.0, k=k)
        for k in DRAFT_LENGTHS
    }
    speed = [
        _find(parity["speed"], "speed-up", prompt_set=prompt_set, batch_size=1, k=k)
        for k in DRAFT_LENGTHS
    ]
    best = max(speed, key=lambda row: row["speedup"])
    return {
        "prompt_set": prompt_set,
        "temperature": 0.0,
        "tau": {str(k): row["tau"] for k, row in rows.items()},
        "acceptance": {str(k): row["rates"] for k, row in rows.items()},
        "drafts": {str(k): row["drafts"] for k, row in rows.items()},
        "speedup": {name: best[name] for name in ("k", "speedup", "low", "high", "level")},
        "parity": {name: rung["passed"] for name, rung in parity["rungs"].items()},
        "wall_s": dict(wall_s) | {"total": sum(wall_s.values())},
        "paths": {
            "run": str(run.root),
            "data": str(run.data),
            "features": str(run.features),
            "head": str(run.head),
            "parity": str(run.parity_file),
            "events": str(run.events_file),
            "report": str(run.report_file),
        },
    }


def stage_seconds(events_file: Path) -> dict[str, float]:
    """Seconds that each stage of the demo took, over all its attempts.

    An attempt that was killed counts up to the last thing it logged.
    """
    attempts = stage_attempts(read_events(events_file))
    return {name: sum(attempt.seconds for attempt in attempts.get(name, ())) for name in _TIMED}


def show_summary(console: Console, summary: Mapping[str, Any], path: Path) -> None:
    """Two small tables: what the head does, and whether the figures can be believed."""
    from mtp_train.console import format_duration, make_table

    rows = [
        (
            k,
            f"{tau:.3f}",
            " ".join(f"{rate:.3f}" for rate in summary["acceptance"][k]),
            summary["drafts"][k],
        )
        for k, tau in summary["tau"].items()
    ]
    title = f"{summary['prompt_set']}, temperature {summary['temperature']:g}"
    console.print(
        make_table(title, ("K", "tokens per step", "accepted by position", "drafts"), rows)
    )
    speed = summary["speedup"]
    console.print(
        f"speed-up at batch 1, K={speed['k']}: {speed['speedup']:.2f} "
        f"({speed['level']:.0%} interval {speed['low']:.2f} to {speed['high']:.2f})"
    )
    verdicts = [(name, "passed" if ok else "FAILED") for name, ok in summary["parity"].items()]
    console.print(make_table("parity", ("rung", "verdict"), verdicts))
    times = [(name, format_duration(seconds)) for name, seconds in summary["wall_s"].items()]
    console.print(make_table("time", ("stage", "wall time"), times))
    console.print(f"summary: {path}")


def _find(rows: Any, what: str, **wanted: Any) -> Mapping[str, Any]:
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            found: Mapping[str, Any] = row
            return found
    described = ", ".join(f"{name}={value}" for name, value in wanted.items())
    raise ValueError(f"parity.json has no {what} for {described}; was the ladder cut short?")


def main() -> None:
    run_command("demo", run_demo)


if __name__ == "__main__":
    main()
