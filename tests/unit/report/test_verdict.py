"""Ship or not: each thing that speaks against it, alone, changes the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtp_train.report.facts import DraftVocabulary, Parity, RunFacts, Rung, Speed
from mtp_train.report.reader import read_run
from mtp_train.report.verdict import best_speed, judge
from tests.unit.report.run_fixture import write_run


@pytest.fixture
def facts(tmp_path: Path) -> RunFacts:
    return read_run(write_run(tmp_path / "r"), max_samples=0)


def with_parity(facts: RunFacts, **changes: object) -> RunFacts:
    return replace(facts, parity=replace(facts.parity, **changes))  # type: ignore[arg-type]


def with_rung(facts: RunFacts, name: str, *, passed: bool | None) -> RunFacts:
    rungs = [replace(r, passed=passed) if r.name == name else r for r in facts.parity.rungs]
    return with_parity(facts, rungs=tuple(rungs))


def with_speed(facts: RunFacts, low: float | None, value: float) -> RunFacts:
    cells = [
        replace(cell, speedup=replace(cell.speedup, value=value, low=low))
        for cell in facts.parity.speed
    ]
    return with_parity(facts, speed=tuple(cells))


def sentences(facts: RunFacts, kind: str) -> list[str]:
    return [reason.text for reason in judge(facts).reasons if reason.kind == kind]


def test_everything_proven_and_faster_is_shipped(facts: RunFacts) -> None:
    verdict = judge(facts)
    assert verdict.answer == "yes"
    assert verdict.title == "Ship, with K = 3, at batch 1"
    assert [reason.kind for reason in verdict.reasons] == ["for", "for", "note", "note", "note"]
    assert "1.22× as fast as without at batch 1" in verdict.sentence
    assert "2.01 tokens per step on MT-Bench, greedy, over 6,491 drafts" in verdict.sentence


def test_notes_say_where_it_is_not_faster_and_where_another_k_is(facts: RunFacts) -> None:
    assert sentences(facts, "note") == [
        "P3 is undecided at position 3: too few drafts get there.",
        "Not shown to be faster at batch 16, with any K.",
        "The best K differs by batch size: K = 1 at batch 4 and K = 1 at batch 16.",
    ]


def test_a_note_says_up_to_which_length_the_head_is_known(facts: RunFacts) -> None:
    known = with_parity(facts, trained_len=2048, measured_len=1500)
    assert sentences(known, "note")[-1] == (
        "Trained on samples of up to 2,048 tokens, measured behind up to 1,500; how it drafts "
        "beyond 2,048 is unknown."
    )
    assert judge(known).answer == judge(facts).answer


@pytest.mark.parametrize("name", [f"P{number}" for number in range(7)])
def test_a_failed_rung_is_a_no(facts: RunFacts, name: str) -> None:
    failed = with_rung(facts, name, passed=False)
    assert judge(failed).answer == "no"
    assert judge(failed).title == "Do not ship"
    assert sentences(failed, "against")[0].startswith(f"{name} failed: ")


@pytest.mark.parametrize("name", [f"P{number}" for number in range(7)])
def test_a_rung_that_was_not_run_is_not_yet(facts: RunFacts, name: str) -> None:
    missing = with_rung(facts, name, passed=None)
    assert judge(missing).answer == "not yet"
    assert f"{name} was not run" in sentences(missing, "open")[0]


def test_the_lower_end_decides_and_not_the_value(facts: RunFacts) -> None:
    assert judge(with_speed(facts, low=1.001, value=1.2)).answer == "yes"
    slow = with_speed(facts, low=0.999, value=1.2)
    assert judge(slow).answer == "no"
    assert "Not shown to be faster: even at its best" in sentences(slow, "against")[0]
    assert "[0.999, " in sentences(slow, "against")[0]  # rounded to 1.00 it would say nothing
    assert "Slower" in sentences(with_speed(facts, low=0.7, value=0.8), "against")[0]


def test_speed_without_interval_or_none_at_all_is_not_yet(facts: RunFacts) -> None:
    assert judge(with_speed(facts, low=None, value=1.5)).answer == "not yet"
    assert judge(with_parity(facts, speed=())).answer == "not yet"


def test_long_contexts_alone_are_no_speed_up(facts: RunFacts) -> None:
    """The best cell is one of the prompts as they are."""
    only = tuple(cell for cell in facts.parity.speed if cell.context_len)
    assert only
    assert best_speed(Parity(speed=only)) is None


def test_the_best_cell_is_the_one_whose_interval_starts_highest(facts: RunFacts) -> None:
    best = best_speed(facts.parity)
    assert best is not None
    assert (best.batch_size, best.k) == (1, 3)  # K = 1 has the higher value and the lower bound
    four = best_speed(facts.parity, batch_size=4)
    assert isinstance(four, Speed)
    assert (four.batch_size, four.k) == (4, 1)


def test_too_few_drafts_are_not_yet(facts: RunFacts) -> None:
    few = replace(facts, min_drafts=6492)
    assert judge(few).answer == "not yet"
    assert sentences(few, "open") == [
        "Only 6,491 drafts were measured on MT-Bench; 6,492 are asked for."
    ]


def test_a_replaced_head_is_a_no(facts: RunFacts) -> None:
    assert judge(with_parity(facts, is_stale=True)).answer == "no"


def test_a_ladder_that_was_not_finished_is_not_yet(facts: RunFacts) -> None:
    assert judge(with_parity(facts, is_finished=False)).answer == "not yet"


def test_nothing_measured_is_said_and_not_guessed(facts: RunFacts) -> None:
    nothing = replace(facts, parity=Parity(rungs=tuple(Rung(f"P{n}", "") for n in range(7))))
    verdict = judge(nothing)
    assert verdict.answer == "not yet"
    assert verdict.sentence.startswith("Nothing has been measured")


def test_a_head_that_no_engine_serves_is_a_no_and_says_why(facts: RunFacts) -> None:
    listed = with_parity(facts, draft_vocab=DraftVocabulary(8192, "this runtime only"))
    assert judge(listed).answer == "no"
    (reason,) = sentences(listed, "against")
    assert "8,192 ids" in reason
    assert "this runtime only" in reason
