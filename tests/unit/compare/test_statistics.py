"""Differences between runs, against slow references and against what must follow."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mtp_train.compare.facts import Condition, Cost, PromptTable, RunRecords
from mtp_train.compare.statistics import (
    Measured,
    choose_baseline,
    choose_condition,
    difference,
    unpaired,
)
from mtp_train.report.facts import Acceptance, Figure
from mtp_train.validate.bootstrap import paired_interval, tau_of_sums

CONDITION = Condition("mtbench", 2, 0.0, "argmax", 64)


def tau(counts: list[list[int]]) -> float:
    drafts = sum(row[0] for row in counts)
    return 1 + sum(sum(row[1:]) for row in counts) / drafts


def records(
    name: str,
    counts: list[list[int]] | None = None,
    *,
    digests: tuple[str, ...] | None = None,
    condition: Condition = CONDITION,
    target: str = "t",
    **more: Any,
) -> RunRecords:
    rows: tuple[Acceptance, ...] = ()
    prompts = {}
    if counts is not None:
        table = np.asarray(counts, dtype=np.int64)
        rates = tuple(Figure(v / table[:, 0].sum(), 0.0, 1.0) for v in table[:, 1:].sum(0))
        value = tau(counts)
        rows = (
            Acceptance(
                condition.prompt_set,
                condition.k,
                condition.temperature,
                condition.draft_mode,
                int(table[:, 0].sum()),
                len(counts),
                condition.max_tokens,
                Figure(value, value - 0.1, value + 0.1),
                rates,
                (),
            ),
        )
        names = digests or tuple(f"p{index}" for index in range(len(counts)))
        prompts = {condition: PromptTable(names, table)}
    return RunRecords(
        name=name,
        path=f"runs/{name}",
        target=target,
        settings=more.get("settings", {}),
        acceptance=rows,
        prompts=prompts,
        training_tau=None,
        verdict="not run",
        cost=Cost(),
        missing=(),
    )


def measured(run: RunRecords) -> Measured:
    return Measured(run, run.acceptance[0])


def make_counts(seed: int, shift: int = 0, size: int = 40) -> list[list[int]]:
    """Prompts that differ a lot from each other; ``shift``: drafts more that each accepts."""
    rng = random.Random(seed)
    rows = []
    for _ in range(size):
        first = rng.randint(5, 80)
        rows.append([100, first + shift, first // 2])
    return rows


def test_the_paired_interval_is_that_of_a_bootstrap_written_as_a_loop() -> None:
    own, other = make_counts(1, shift=4), make_counts(2)
    interval = paired_interval(np.array(own), np.array(other), tau_of_sums, num_resamples=4000)
    rng = random.Random(0)
    gaps = []
    for _ in range(4000):
        drawn = [rng.randrange(len(own)) for _ in own]
        gaps.append(tau([own[p] for p in drawn]) - tau([other[p] for p in drawn]))
    low, high = np.quantile(gaps, [0.025, 0.975])
    # Quantiles of 4,000 resamples each: their error is about 0.03 of the width.
    assert interval.low == pytest.approx(low, abs=0.1 * (high - low))
    assert interval.high == pytest.approx(high, abs=0.1 * (high - low))


def test_a_constant_gain_on_every_prompt_is_known_exactly_when_paired() -> None:
    gap = difference(
        measured(records("a", make_counts(1, shift=3))), measured(records("b", make_counts(1)))
    )
    assert gap is not None
    assert gap.kind == "paired"
    assert gap.tau.low == pytest.approx(0.03)
    assert gap.tau.high == pytest.approx(0.03)
    assert gap.first.value == pytest.approx(0.03)


def test_other_prompts_are_not_paired_and_the_reason_counts_them() -> None:
    counts = make_counts(1, size=3)
    gap = difference(
        measured(records("a", counts, digests=("p0", "p1", "x"))), measured(records("b", counts))
    )
    assert gap is not None
    assert gap.kind == "unpaired"
    assert gap.why_unpaired == "other prompts: 2 of 3 are the baseline's"


def test_the_same_prompts_in_another_order_are_not_paired_by_place() -> None:
    counts = make_counts(1, size=2)
    gap = difference(
        measured(records("a", counts, digests=("p1", "p0"))), measured(records("b", counts))
    )
    assert gap is not None
    assert gap.kind == "unpaired"


def test_another_target_has_no_difference() -> None:
    counts = make_counts(1)
    assert (
        difference(measured(records("a", counts, target="u")), measured(records("b", counts)))
        is None
    )


def test_unequal_numbers_of_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 prompts against 2"):
        paired_interval(np.ones((3, 2)), np.ones((2, 2)), tau_of_sums)


def test_symmetric_intervals_add_up_in_squares() -> None:
    gap = unpaired(Figure(2.0, 1.7, 2.3), Figure(1.5, 1.1, 1.9))
    assert (gap.value, gap.low, gap.high) == pytest.approx((0.5, 0.0, 1.0))


def test_each_end_takes_the_sides_that_make_it_worse() -> None:
    gap = unpaired(Figure(2.0, 2.0, 2.3), Figure(1.5, 1.5, 1.9))
    assert gap.low == pytest.approx(0.5 - 0.4)
    assert gap.high == pytest.approx(0.5 + 0.3)


def test_unpaired_without_intervals_has_none() -> None:
    assert not unpaired(Figure(2.0), Figure(1.5, 1.0, 2.0)).has_interval


def test_the_unpaired_interval_covers_as_often_as_it_says() -> None:
    """Two independent runs: 95 % of 400 trials, false alarm below 1e-4 at the bounds taken."""
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(400):
        a, b = rng.normal(2.0, 0.1), rng.normal(1.5, 0.2)
        gap = unpaired(
            Figure(a, a - 1.96 * 0.1, a + 1.96 * 0.1), Figure(b, b - 1.96 * 0.2, b + 1.96 * 0.2)
        )
        assert gap.low is not None
        assert gap.high is not None
        hits += gap.low <= 0.5 <= gap.high
    assert 0.90 < hits / 400 < 0.99


def test_the_condition_of_most_runs_is_compared() -> None:
    other = Condition("humaneval", 3, 0.0, "argmax", 64)
    rows = make_counts(1)
    runs = [records("a", rows), records("b", rows), records("c", [[9, 1, 1, 1]], condition=other)]
    assert choose_condition(runs) == CONDITION
    assert choose_condition(runs, k=3) == other
    assert choose_condition([records("d")]) is None


def test_a_condition_that_no_run_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"compare.k=7: no run was measured so; there is mtbench"):
        choose_condition([records("a", make_counts(1))], k=7)


def test_the_baseline_is_the_first_the_best_or_named() -> None:
    runs = [measured(records(n, make_counts(1, shift=s))) for n, s in (("a", 0), ("b", 5))]
    for wanted, name in (("first", "a"), ("best", "b"), ("b", "b"), ("runs/a", "a")):
        chosen = choose_baseline(runs, wanted)
        assert chosen is not None
        assert chosen.records.name == name
    with pytest.raises(ValueError, match=r"compare.baseline=c: no such run with figures; allowed"):
        choose_baseline(runs, "c")
    assert choose_baseline([], "best") is None
