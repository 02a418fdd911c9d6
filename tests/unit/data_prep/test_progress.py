"""How far a run is, how fast it goes, and when it will be done."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data_prep.config import DataConfig, RegenerateConfig
from data_prep.journal import JournalRecord
from data_prep.pipeline import JOURNAL_FILE, prepare
from data_prep.progress import Progress
from tests.unit.data_prep.helpers import FakeEngine


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def answer(num_tokens: int = 50) -> JournalRecord:
    return JournalRecord("k", tuple(range(num_tokens)), "stop")


def silent() -> Console:
    return Console(file=io.StringIO())


def test_the_time_left_rests_on_newly_generated_answers_only() -> None:
    """9,000 of 10,000 conversations come back at once, the rest take a second each."""
    clock = Clock()
    progress = Progress(10_000, generates=True, console=silent(), clock=clock)
    clock.now += 20.0  # the model loads
    for _ in range(9_000):
        progress.advance(0, recalled=1.0)
    clock.now += 30.0  # the first answer is a long one
    assert progress.describe() == "9,000 of 10,000 conversations"
    for second in range(301):
        clock.now += 1.0
        progress.add_answer(answer())
        progress.advance(0)
        if second > 10:
            found = re.search(r"at 5\d/s, about (\d+) min left", progress.describe())
            assert found
            assert int(found[1]) == pytest.approx((1_000 - second - 1) / 60, abs=1.6)


def test_a_conversation_that_is_half_new_counts_half() -> None:
    clock = Clock()
    progress = Progress(1_000, generates=True, console=silent(), clock=clock)
    progress.add_answer(answer())
    for _ in range(100):  # two answers each, one of them from the journal: a second
        clock.now += 1.0
        progress.add_answer(answer())
        progress.advance(0, recalled=0.5)
    # All answers of the other 900 are new: two seconds each.
    assert "about 30 min left" in progress.describe()


def test_without_generation_the_time_left_counts_from_the_start() -> None:
    clock = Clock()
    progress = Progress(1_000, console=silent(), clock=clock)
    for _ in range(100):
        clock.now += 1.0
        progress.advance(0)
    assert progress.describe() == "100 of 1,000 conversations, about 15 min left"


def test_the_token_budget_may_be_reached_first() -> None:
    clock = Clock()
    progress = Progress(1_000, token_budget=2_000, console=silent(), clock=clock)
    for number in range(1, 101):
        clock.now += 1.0
        progress.advance(10 * number)
    assert "about 2 min left" in progress.describe()
    progress.advance(2_000)
    assert "left" not in progress.describe()


@pytest.mark.parametrize("num_kept", [0, 5, 7, 24])
def test_answers_of_an_earlier_run_are_told_from_new_ones(
    tmp_path: Path, source: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch, num_kept: int
) -> None:
    shares: list[float] = []

    class Spy(Progress):
        def advance(self, num_train_tokens: int, *, recalled: float = 0.0) -> None:
            shares.append(recalled)
            super().advance(num_train_tokens, recalled=recalled)

    def run() -> FakeEngine:
        engine = FakeEngine(tiny)
        config = DataConfig(sources=(str(source),), regenerate=RegenerateConfig(enabled=True))
        prepare(
            config,
            out_dir=tmp_path / "out",
            tokenizer=tiny,
            seed=1,
            open_answering=engine.open,
            target_fingerprint="t",
        )
        return engine

    run()
    journal = tmp_path / "out" / JOURNAL_FILE
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: 1 + num_kept]))
    (tmp_path / "out" / "fingerprint.json").unlink()
    monkeypatch.setattr("data_prep.pipeline.Progress", Spy)
    engine = run()
    assert len(engine.questions) == 24 - num_kept
    assert sum(shares) * 2 == num_kept  # two answers per conversation
