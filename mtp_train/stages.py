"""What each command does between a valid configuration and its exit code.

Heavy packages are imported inside the stages: a typo or `--help` must not wait for them. A stage
opens its surroundings (:func:`open_stage`), calls the code that does the work, and says in one or
two lines what came out. `mtp demo` runs the same functions in one process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mtp_train.app import dump_config
from mtp_train.config import Config
from mtp_train.run_dir import RunDirectory, write_json_atomic

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from mtp_train.distributed import ProcessGroup
    from mtp_train.events import EventLog
    from mtp_train.validate.report import LadderReport
    from runtime.engine import Engine

logger = logging.getLogger(__name__)

_DATA_TIMEOUT_S = 7 * 24 * 3600.0  # other ranks wait while the leader prepares or regenerates


@dataclass(frozen=True)
class StageScope:
    """What a stage works with: its run, its ranks, its terminal and its log."""

    run: RunDirectory
    group: ProcessGroup
    console: Console
    events: EventLog


@contextmanager
def open_stage(config: Config, stage: str, *, timeout_s: float = 1800.0) -> Iterator[StageScope]:
    """Set up ranks, logging and the run directory's records; log start, end and wall time."""
    from mtp_train.console import format_duration, make_console, setup_logging
    from mtp_train.distributed import init_process_group

    group = init_process_group(device=config.target.device, timeout_s=timeout_s)
    console = make_console(is_leader=group.is_leader)
    setup_logging(console, level=logging.INFO if group.is_leader else logging.WARNING)
    run = RunDirectory.from_config(config)
    if group.is_leader:
        run.record_config(dump_config(config))
        run.record_versions(stage)
    started = time.monotonic()
    try:
        with run.event_log(stage, is_leader=group.is_leader) as events:
            events.write("stage_started", world_size=group.world_size, seed=config.seed)
            yield StageScope(run=run, group=group, console=console, events=events)
            wall_s = time.monotonic() - started
            events.write("stage_finished", wall_s=wall_s)
            console.print(f"{stage}: done in {format_duration(wall_s)} ({run.root})")
    finally:
        group.close()


def run_data(config: Config) -> int:
    """Prompts to token sets, on the first rank."""
    from data_prep.pipeline import prepare
    from mtp_train.targets import load_tokenizer, target_directory
    from runtime.seeds import derive_seed

    with open_stage(config, "data", timeout_s=_DATA_TIMEOUT_S) as scope:
        if scope.group.is_leader:
            tokenizer = load_tokenizer(config.target, target_directory(config.target))
            engine = None
            if config.data.regenerate.enabled:
                engine = _regeneration_engine(config, scope.group.device, tokenizer)
            prepare(
                config.data,
                out_dir=scope.run.data,
                tokenizer=tokenizer,
                seed=derive_seed(config.seed, "data"),
                engine=engine,
            )
        scope.group.barrier()
    return 0


def run_precompute(config: Config) -> int:
    """Token sets to features, on every rank."""
    from mtp_train.precompute import run

    with open_stage(config, "precompute") as scope:
        run(config, group=scope.group)
    return 0


def run_train(config: Config) -> int:
    """Features to a head, on every rank."""
    from mtp_train.trainer import run

    with open_stage(config, "train") as scope:
        run(config, group=scope.group)
    return 0


def run_validate(config: Config) -> int:
    """Climb the ladder; 1 when a rung fails."""
    from mtp_train.validate.ladder import run

    with open_stage(config, "validate") as scope:
        report: LadderReport = run(config, group=scope.group)
        if scope.group.is_leader:
            write_json_atomic(scope.run.parity_file, report.to_dict())
    return 0 if report.passed else 1


def _regeneration_engine(config: Config, device: torch.device, tokenizer: Any) -> Engine:
    """A plain decoding engine for the target's answers."""
    from mtp_train.targets import open_target
    from runtime.cpu import set_threads
    from runtime.engine import Engine

    set_threads(config.runtime.num_threads)
    target = open_target(config.target, device=device)
    settings = replace(config.runtime, device=str(device), num_draft_tokens=0)
    return Engine(
        target.model,
        config=settings,
        eos_token_ids=target.eos_token_ids,
        tokenizer=tokenizer,
    )
