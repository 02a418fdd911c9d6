"""Hops of a preflight: run in order, the first that fails is named, the others are not run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mtp_train.errors import StageRefusedError

if TYPE_CHECKING:
    from rich.table import Table

Verdict = Literal["passed", "FAILED", "not run"]


@dataclass(frozen=True)
class Judgement:
    """What one hop found. ``figure`` and ``bound`` are for people, ``figures`` for programs."""

    passed: bool
    figure: str
    bound: str = ""
    note: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Hop:
    """One step of the way from the user's data to the user's engine."""

    name: str
    question: str
    judge: Callable[[], Judgement]


@dataclass(frozen=True)
class HopResult:
    """A hop's verdict and what it took."""

    name: str
    verdict: Verdict
    figure: str = ""
    bound: str = ""
    note: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)


def run_hops(hops: Sequence[Hop], *, announce: Callable[[int, Hop], None]) -> list[HopResult]:
    """One result per hop, in order. What a hop refuses (bad input, a rung that failed) is its
    verdict; anything else is a fault of ours and is raised.
    """
    results: list[HopResult] = []
    for number, hop in enumerate(hops, start=1):
        if results and results[-1].verdict != "passed":
            results.append(HopResult(hop.name, "not run"))
            continue
        announce(number, hop)
        started = time.perf_counter()
        try:
            found = hop.judge()
        except (ValueError, StageRefusedError) as error:
            found = Judgement(False, "refused", note=str(error))
        results.append(
            HopResult(
                hop.name,
                "passed" if found.passed else "FAILED",
                found.figure,
                found.bound,
                found.note,
                time.perf_counter() - started,
                found.figures,
            )
        )
    return results


def hops_table(results: Sequence[HopResult]) -> Table:
    """Every hop with its verdict, figure, bound and time."""
    from mtp_train.console import format_duration, make_table

    rows = [
        (
            result.name,
            result.verdict,
            result.figure,
            result.bound,
            format_duration(result.seconds) if result.verdict != "not run" else "",
        )
        for result in results
    ]
    return make_table("preflight", ("hop", "verdict", "figure", "bound", "time"), rows)
