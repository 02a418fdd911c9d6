"""`python -m tests.load --seconds N [--requests N] [--seed N]`: random traffic through every
schedule for as long as wanted; ends at the first thing that is wrong."""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

from rich.console import Console

from runtime.cpu import set_threads
from tests.load.rounds import Round, memory_slope, run_rounds
from tests.unit.runtime.engine_fixtures import tiny_target

MAX_SLOPE_MB = 0.2  # per round, over the second half of the rounds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    set_threads(1)
    console = Console()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as place:
        target = tiny_target(Path(place))
        for each in run_rounds(
            target, seconds=options.seconds, count=options.requests, seed=options.seed
        ):
            rounds.append(each)
            console.print(describe(each), soft_wrap=True)
    slope = memory_slope(rounds)
    if slope is None:
        console.print(f"{len(rounds)} rounds: too few to say anything about memory")
        return 0
    console.print(f"{len(rounds)} rounds; resident memory {slope:+.3f} MB per round at the end")
    return int(slope > MAX_SLOPE_MB)


def describe(each: Round) -> str:
    outcome = each.outcome
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(outcome.ended.items()))
    return (
        f"{each.way:<24} seed {each.seed:<4} {outcome.steps:>5} steps {each.seconds:5.1f} s  "
        f"{ended} ({outcome.aborted_in_speculation} while drafts were verified); "
        f"{outcome.preemptions} preempted, {outcome.accepted} drafts accepted, "
        f"{each.resident_mb:.0f} MB"
    )


if __name__ == "__main__":
    raise SystemExit(main())
