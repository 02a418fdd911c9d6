"""Rounds over all cells, interleaved, with a record that is whole after every one of them.

With all servers alive (or running already) neighbours in time are the contestants of one
concurrency; with one alive at a time, the concurrencies of one contestant. The order turns around
in every other round. A server that dies or does not come up is left out from then on.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from mtp_train.bench.contestants import Live
from mtp_train.bench.facts import CellRun, Contestant
from mtp_train.bench.load import Load, measure
from mtp_train.serving.job import ServingError

logger = logging.getLogger(__name__)

Open = Callable[[Contestant], AbstractContextManager[Live]]


@dataclass
class Journal:
    """What has been measured so far. ``failed``: contestants that were left out, and why."""

    runs: list[CellRun] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Watch:
    """Who is told what happens: ``cell`` begins, a request was ``answered``, ``saved`` is due."""

    cell: Callable[[str], None] = lambda text: None
    answered: Callable[[], None] = lambda: None
    skipped: Callable[[int], None] = lambda count: None
    save: Callable[[Journal], None] = lambda journal: None


def num_requests(load: Load, concurrency: Sequence[int]) -> int:
    """Of one contestant in one round."""
    return sum(len(load.order(count)) for count in concurrency)


def run_rounds(
    contestants: Sequence[Contestant],
    load: Load,
    *,
    concurrency: Sequence[int],
    rounds: int,
    keep_alive: bool,
    open_: Open,
    watch: Watch = Watch(),
) -> Journal:
    """Measure every cell in every round. Raises nothing that a server does."""
    journal = Journal()
    with ExitStack() as stack:
        alive: dict[str, Live] = {}
        if keep_alive:
            for contestant in contestants:
                _open_into(alive, contestant, open_, stack, journal, watch)
        for round_ in range(rounds):
            order = list(contestants) if round_ % 2 == 0 else list(reversed(contestants))
            if keep_alive:
                for count in concurrency:
                    for contestant in order:
                        _measure(contestant, alive, count, round_, load, journal, watch)
                continue
            for contestant in order:
                _one_at_a_time(contestant, concurrency, round_, load, open_, journal, watch)
    return journal


def _one_at_a_time(
    contestant: Contestant,
    concurrency: Sequence[int],
    round_: int,
    load: Load,
    open_: Open,
    journal: Journal,
    watch: Watch,
) -> None:
    alive: dict[str, Live] = {}
    with ExitStack() as stack:
        if contestant.name not in journal.failed:
            _open_into(alive, contestant, open_, stack, journal, watch)
        for count in concurrency:
            _measure(contestant, alive, count, round_, load, journal, watch)


def _open_into(
    alive: dict[str, Live],
    contestant: Contestant,
    open_: Open,
    stack: ExitStack,
    journal: Journal,
    watch: Watch,
) -> None:
    watch.cell(f"{contestant.name}: starting")
    try:
        live = stack.enter_context(open_(contestant))
    except ServingError as error:
        _fail(journal, contestant, f"{error.stage}: {error}", watch)
        return
    alive[contestant.name] = live
    journal.versions[contestant.name] = live.version


def _measure(
    contestant: Contestant,
    alive: Mapping[str, Live],
    count: int,
    round_: int,
    load: Load,
    journal: Journal,
    watch: Watch,
) -> None:
    if contestant.name in journal.failed:
        watch.skipped(len(load.order(count)))
        return
    live = alive[contestant.name]
    watch.cell(f"{contestant.name}, {count} at once, round {round_ + 1}")
    run = measure(
        live.url,
        load,
        model=live.model,
        contestant=contestant.name,
        concurrency=count,
        round_=round_,
        on_answer=watch.answered,
    )
    words = live.last_words()
    if words:
        run = dataclasses.replace(run, error=words)
    journal.runs.append(run)
    if run.error:
        _fail(journal, contestant, run.error, watch)
    watch.save(journal)


def _fail(journal: Journal, contestant: Contestant, reason: str, watch: Watch) -> None:
    journal.failed[contestant.name] = reason
    logger.warning("%s is left out from here on: %s", contestant.name, reason)
    watch.save(journal)
