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
from itertools import islice
from typing import TYPE_CHECKING

from mtp_train.app import config_values, dump_config
from mtp_train.config import Config
from mtp_train.fingerprints import run_fingerprints
from mtp_train.rules import require_chain
from mtp_train.run_dir import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console

    from mtp_train.distributed import ProcessGroup
    from mtp_train.events import EventLog

logger = logging.getLogger(__name__)

_LEADER_TIMEOUT_S = 7 * 24 * 3600.0  # other ranks wait while the leader works alone
_COLLECTIVE_TIMEOUT_S = 1800.0
_PREVIEW_ROWS = 2


@dataclass(frozen=True)
class StageScope:
    """What a stage works with: its run, its ranks, its terminal and its log."""

    run: RunDirectory
    group: ProcessGroup
    console: Console
    events: EventLog


@contextmanager
def open_stage(
    config: Config, stage: str, *, timeout_s: float = _COLLECTIVE_TIMEOUT_S
) -> Iterator[StageScope]:
    """Set up ranks, logging and the run directory's records; log start, end and wall time."""
    from mtp_train.console import format_duration, make_console, setup_logging
    from mtp_train.distributed import init_process_group

    require_chain(config, stage)
    group = init_process_group(device=config.target.device, timeout_s=timeout_s)
    console = make_console(is_leader=group.is_leader)
    setup_logging(console, level=logging.INFO if group.is_leader else logging.WARNING)
    run = RunDirectory.from_config(config)
    before = run.recorded_config()
    if group.is_leader:
        run.record_config(dump_config(config))
        run.record_versions(stage)
    started = time.monotonic()
    try:
        with run.event_log(stage, is_leader=group.is_leader) as events:
            events.write(
                "stage_started",
                world_size=group.world_size,
                seed=config.seed,
                settings=config_values(config),
            )
            num_events = events.num_written
            try:
                yield StageScope(run=run, group=group, console=console, events=events)
            except ValueError:
                if group.is_leader and events.num_written == num_events:  # refused, nothing done
                    events.write("stage_refused")
                    if before is not None:
                        run.record_config(before)
                raise
            if group.is_leader:
                run.record_fingerprints(stage, run_fingerprints(config))
            wall_s = time.monotonic() - started
            events.write("stage_finished", wall_s=wall_s)
            console.print(f"{stage}: done in {format_duration(wall_s)} ({run.root})")
    finally:
        group.close()


def run_data(config: Config) -> int:
    """Prompts to token sets, on the first rank; shows statistics and a preview."""
    from mtp_train.distributed import run_on_leader

    with open_stage(config, "data", timeout_s=_LEADER_TIMEOUT_S) as scope:
        run_on_leader(scope.group, lambda: _prepare_data(config, scope))
    return 0


def run_precompute(config: Config) -> int:
    """Token sets to features, on every rank."""
    from mtp_train.precompute import run

    with open_stage(config, "precompute") as scope:
        _require_validation_rows(config, scope.run)
        run(config, group=scope.group, console=scope.console)
    return 0


def _require_validation_rows(config: Config, run: RunDirectory) -> None:
    """Refuse before the dump what training would refuse after it."""
    from data_prep.token_set import load_token_set
    from mtp_train.validate.in_training import NO_VALIDATION_ROWS

    if not config.trainer.validate_every:
        return
    if not any(any(row.loss_mask) for row in load_token_set(run.data).rows("validation")):
        raise ValueError(NO_VALIDATION_ROWS)


def run_train(config: Config) -> int:
    """Features to a head, on every rank."""
    from mtp_train.trainer import run

    waits = config.trainer.validate_every > 0 and config.validate.placement == "subprocess"
    timeout_s = _LEADER_TIMEOUT_S if waits else _COLLECTIVE_TIMEOUT_S
    with open_stage(config, "train", timeout_s=timeout_s) as scope:
        run(_with_native_heads(config, scope), group=scope.group)
    return 0


def _with_native_heads(config: Config, scope: StageScope) -> Config:
    """The heads that ``config`` names as native ones, whoever wrote them."""
    from mtp_train.distributed import run_on_leader
    from mtp_train.foreign.importing import with_native_heads

    return run_on_leader(scope.group, lambda: with_native_heads(config))


def run_validate(config: Config) -> int:
    """Climb the ladder, unless it was climbed with this head and these settings, and then P6 where
    a serving engine is named; 1 when a rung fails or failed then.
    """
    ladder = tuple(name for name in config.validate.rungs if name != "P6")
    with_engine = config.engine.kind != "none"
    with open_stage(config, "validate", timeout_s=_LEADER_TIMEOUT_S) as scope:
        _keep_native_head(config, scope)
        config = _with_native_heads(config, scope)
        if with_engine:
            _require_export(config, scope)
        passed = True
        if ladder:
            own = replace(config, validate=replace(config.validate, rungs=ladder))
            passed = _climb_ladder(own, scope)
        if with_engine:
            passed = _climb_engine_rung(config, scope) and passed
    if scope.group.is_leader:
        run_report(config)  # after the verdict was shown and kept: it must not depend on this
    return 0 if passed else 1


def _keep_native_head(config: Config, scope: StageScope) -> None:
    """``validate.head=native`` is a directory of the run from here on."""
    from mtp_train.distributed import run_on_leader
    from mtp_train.native.reader import keep_native_head

    run_on_leader(scope.group, lambda: keep_native_head(config))


def _climb_ladder(config: Config, scope: StageScope) -> bool:
    from mtp_train.distributed import run_on_leader
    from mtp_train.tracking import log_ladder
    from mtp_train.validate.ladder import run
    from mtp_train.validate.output import LadderRecord

    device = scope.group.device
    record = run_on_leader(scope.group, lambda: LadderRecord.open(config, device=device))
    if record.stored_verdict is None:
        report = run(config, group=scope.group, journal=record.journal)
        run_on_leader(scope.group, lambda: record.finish(report, scope.run.parity_file))
        run_on_leader(scope.group, lambda: log_ladder(config, report, root=scope.run.root))
        return report.passed
    scope.console.print(
        f"validate: {scope.run.parity_file} is of this head and these settings "
        f"({_verdict(record.stored_verdict)}); nothing to do"
    )
    return record.stored_verdict


def _require_export(config: Config, scope: StageScope) -> None:
    """Refuse before minutes of climbing what P6 would refuse after them."""
    from mtp_train.distributed import run_on_leader
    from mtp_train.serving.engine import open_engine
    from mtp_train.validate.engine_rung import exported_head

    def look() -> None:
        exported_head(config)
        open_engine(config)

    run_on_leader(scope.group, look)


def _climb_engine_rung(config: Config, scope: StageScope) -> bool:
    from mtp_train.distributed import run_on_leader
    from mtp_train.validate import engine_rung

    device = scope.group.device
    climb = run_on_leader(scope.group, lambda: engine_rung.climb(config, device=device))
    if climb.is_new:
        engine_rung.show(climb.result, scope.console.print)
        scope.events.write("engine_rung", climb.result)
    else:
        verdict = _verdict(climb.result.passed)
        scope.console.print(f"P6: served this export with these settings before ({verdict})")
    return climb.result.passed


def _verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def run_hot_vocab(config: Config) -> int:
    """The run's head drafting from lists of frequent ids, measured against itself without one."""
    from mtp_train.distributed import run_on_leader
    from mtp_train.hot_vocab import stage

    with open_stage(config, "hot-vocab", timeout_s=_LEADER_TIMEOUT_S) as scope:
        _keep_native_head(config, scope)
        config = _with_native_heads(config, scope)
        report = run_on_leader(scope.group, lambda: stage.run(config, device=scope.group.device))
        scope.console.print(stage.table(report))
        if report.is_new:
            scope.events.write("hot_vocab", rows=report.rows)
        else:
            scope.console.print("hot-vocab: measured with this head and these settings before")
        scope.console.print(stage.describe(report, scope.run.root), markup=False, soft_wrap=True)
    return 0


def run_export(config: Config) -> int:
    """The run's head for serving engines, or with ``export.check`` a check of such a directory."""
    from mtp_train.distributed import run_on_leader
    from mtp_train.export import stage

    with open_stage(config, "export", timeout_s=_LEADER_TIMEOUT_S) as scope:
        if config.export.check:
            place = run_on_leader(scope.group, lambda: stage.check(config))
            scope.console.print(f"export: {place} is complete, unchanged and of this target")
            return 0
        _keep_native_head(config, scope)
        config = _with_native_heads(config, scope)
        outcome = run_on_leader(scope.group, lambda: stage.run(config, group=scope.group))
        if outcome.report is None:
            scope.console.print(f"export: {outcome.path} is of this head; nothing to do")
            return 0
        report = outcome.report
        scope.events.write(
            "exported",
            path=report.path,
            num_bytes=report.num_bytes,
            is_validated=report.record.is_validated,
            read_back=outcome.read_back,
            files=report.record.files_sha256,
        )
        scope.console.print(stage.describe(outcome, config), markup=False, soft_wrap=True)
    return 0


def run_report(config: Config) -> int:
    """The run's records as one HTML file. Reads files only; nothing of the run is changed."""
    from mtp_train.console import make_console
    from mtp_train.report.page import write_page

    run = RunDirectory.from_config(config)
    write_page(run.root, run.report_file, config.report)
    size = run.report_file.stat().st_size
    make_console().print(f"report: {run.report_file} ({size / 1000:,.0f} kB)")
    return 0


def run_preflight(config: Config) -> int:
    """Every hop of the line on a few prompts; 1 when one of them fails."""
    from mtp_train.foreign.importing import with_native_heads
    from mtp_train.preflight.stage import run

    return run(with_native_heads(config))


def _prepare_data(config: Config, scope: StageScope) -> None:
    from data_prep.chat import configured_chat_format
    from data_prep.pipeline import prepare
    from data_prep.statistics import preview, statistics_tables
    from data_prep.token_set import load_token_set
    from mtp_train.answering import answering_opener
    from mtp_train.features.target import cache_directory, load_tokenizer, target_directory
    from runtime.models.loader import fingerprint_target
    from runtime.seeds import derive_seed

    directory = target_directory(config.target)
    tokenizer = load_tokenizer(config.target, directory)
    report = prepare(
        config.data,
        out_dir=scope.run.data,
        tokenizer=tokenizer,
        seed=derive_seed(config.seed, "data"),
        open_answering=answering_opener(
            config, directory, tokenizer, group=scope.group, events=scope.events
        ),
        target_fingerprint=fingerprint_target(directory, cache_dir=cache_directory(config.target)),
        console=scope.console,
    )
    chat = configured_chat_format(tokenizer, config.data)
    rows = islice(load_token_set(report.path).rows("train"), _PREVIEW_ROWS)
    scope.console.print(statistics_tables(report.splits, report.rejects))
    scope.console.print(preview(list(rows), chat))
    scope.events.write(
        "token_set",
        fingerprint=report.fingerprint,
        is_new=report.is_new,
        splits=report.splits,
        notes=report.notes,
    )
