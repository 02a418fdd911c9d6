"""`mtp preflight`: runs the hops, shows them, and keeps what they found."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence

from mtp_train.app import config_values, dump_config
from mtp_train.config import Config
from mtp_train.events import to_jsonable
from mtp_train.preflight.flight import ENGINE_HOP, Preflight
from mtp_train.preflight.hops import Hop, HopResult, hops_table, run_hops
from mtp_train.rules import require_chain
from mtp_train.run_dir import RunDirectory, StageRecord, write_json_atomic
from mtp_train.serving.engine import open_engine

logger = logging.getLogger(__name__)

# Sections that decide what is measured or shown, and nothing of what is made.
_NOT_MADE_FROM = ("validate", "engine", "report", "generate", "doctor")


def run(config: Config) -> int:
    """Every hop in order; 1 when one failed. Writes ``runs/<name>/preflight.json``.

    Raises ``ValueError`` when there is no such engine as ``config.engine`` names.
    """
    from mtp_train.console import format_duration, make_console, setup_logging

    require_chain(config, "preflight")
    serve = open_engine(config) if config.engine.kind != "none" else None  # looked at first
    console = make_console()
    setup_logging(console)
    preflight = Preflight(config, serve=serve)
    run_dir = RunDirectory.from_config(config)
    run_dir.record_config(dump_config(config))
    run_dir.record_versions("preflight")
    start_over_if_changed(preflight)
    hops = preflight.hops()

    def announce(number: int, hop: Hop) -> None:
        console.rule(f"{number}/{len(hops)} {hop.name}: {hop.question}", align="left")

    with run_dir.event_log("preflight") as events:
        events.write("stage_started", seed=config.seed, settings=config_values(config))
        results = run_hops(hops, announce=announce)
        for result in results:
            events.write("hop", result)
        passed = all(result.verdict == "passed" for result in results)
        write_json_atomic(run_dir.preflight_file, {"passed": passed, "hops": to_jsonable(results)})
        console.print(hops_table(results))
        seconds = sum(result.seconds for result in results)
        console.print(describe_outcome(results), markup=False, soft_wrap=True)
        console.print(f"preflight: {format_duration(seconds)} ({run_dir.preflight_file})")
        events.write("stage_finished", wall_s=seconds, passed=passed)
    return 0 if passed else 1


def start_over_if_changed(preflight: Preflight) -> None:
    """Remove what a preflight with other settings left; its run directory is nobody else's."""
    settings = to_jsonable(preflight.config)
    for name in _NOT_MADE_FROM:
        del settings[name]
    del settings["preflight"]["min_rate"]
    record = StageRecord(
        preflight.run.root / "settings.json", stage="preflight", fingerprint=settings
    )
    differences = record.differences()
    if differences:
        logger.warning("starting over: %s", "; ".join(differences))
        shutil.rmtree(preflight.run.root)
    record.start()


def describe_outcome(results: Sequence[HopResult]) -> str:
    """One line: what to fix, or that the line holds."""
    for result in results:
        if result.verdict == "FAILED":
            return f"hop {result.name} FAILED: {result.note or result.figure}"
    if all(result.name != ENGINE_HOP for result in results):
        return (
            "every hop holds up to the exported directory; your engine was not asked: say "
            "engine=vllm engine.python=.venv-vllm/bin/python"
        )
    return "every hop holds: what is learnt is what your engine drafts"
