"""Figures of a bench: each against arithmetic done by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtp_train.bench.arithmetic import (
    judge_columns,
    mean_of,
    percentile,
    ratio_of,
    summarise,
)
from mtp_train.bench.facts import Answer, Cell, CellRun, Contestant, Estimate
from mtp_train.bench.schedule import OPTION, best_schedules, ranges_of, speculative_config
from mtp_train.bench.show import details_table, note_lines, run_values, winners_table
from mtp_train.serving.job import DraftCounts

PLAIN, HEAD = Contestant("none", 0), Contestant("mine", 3)
BOTH = (PLAIN, HEAD)


def answer(question: int, *arrivals: float, tokens: int = 0, text: str = "") -> Answer:
    return Answer(question, text or f"text {question}", arrivals, tokens or len(arrivals), "stop")


def run(
    name: str,
    seconds: float,
    *,
    concurrency: int = 1,
    round_: int = 0,
    answers: Sequence[Answer] = (),
    counts: DraftCounts | None = None,
) -> CellRun:
    found = tuple(answers or [answer(0, 0.1, 0.2, tokens=10)])
    return CellRun(name, concurrency, round_, seconds, found, counts, "" if counts else "why not")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 1.0])
def test_percentiles_are_numpys(share: float) -> None:
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.0]
    assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))


def test_latencies_are_of_chunks_and_tokens() -> None:
    one = answer(0, 0.5, 0.6, 1.0, tokens=6)  # 1 + 2 + 3 tokens
    assert one.ttft == 0.5
    assert one.gaps == pytest.approx((0.1, 0.4))
    assert one.per_token == pytest.approx(0.5 / 5)
    assert answer(0, 0.5).per_token is None


def test_an_interval_is_students() -> None:
    found = mean_of([1.0, 2.0, 3.0])
    assert found is not None
    half = 4.303 * 1.0 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half))
    assert mean_of([2.0]) == Estimate(2.0)
    assert mean_of([]) is None


def test_a_ratio_is_paired_and_geometric() -> None:
    """The machine is twice as slow in the second round, which the pairs do not see."""
    found = ratio_of([30.0, 15.0, 30.0], [20.0, 10.0, 20.0])
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_a_cell_is_made_of_all_its_rounds() -> None:
    runs = [
        run("none", 2.0, answers=[answer(0, 0.1, 0.3, tokens=10)]),
        run("none", 2.0, round_=1, answers=[answer(0, 0.1, 0.3, tokens=10, text="other")]),
        run("mine K=3", 1.0, counts=DraftCounts(4, (3, 2, 0)), answers=[answer(0, 0.2, tokens=10)]),
        run(
            "mine K=3",
            1.0,
            round_=1,
            counts=DraftCounts(6, (4, 1, 1)),
            answers=[answer(0, 0.4, tokens=10)],
        ),
    ]
    plain, head = summarise(BOTH, runs, min_equal=0.0)
    assert plain.tokens_per_s is not None
    assert head.speed_up is not None
    assert plain.tokens_per_s.value == 5.0
    assert head.speed_up.value == pytest.approx(2.0)
    assert head.tau == pytest.approx(1 + (7 + 3 + 1) / 10)
    assert head.acceptance == pytest.approx((0.7, 0.3, 0.1))
    assert head.ttft is not None
    assert head.ttft.p50 == pytest.approx(0.3)
    assert head.itl is None  # one chunk each
    assert (plain.tau, plain.no_tau) == (None, "why not")
    assert head.equal_texts == 0.5  # equal in the first round only
    assert plain.equal_texts == 0.0  # and it is not equal to itself either


def test_a_faster_server_with_other_texts_cannot_win() -> None:
    runs = [
        run("none", 2.0),
        run("mine K=3", 1.0, answers=[answer(0, 0.1, tokens=10, text="nonsense")]),
    ]
    cells = summarise(BOTH, runs, min_equal=0.5)
    assert "0% of its texts are those of plain decoding" in cells[1].excluded
    (column,) = judge_columns(cells, runs)
    assert column.winner == "none"


def test_failed_requests_and_broken_cells_cannot_win() -> None:
    bad = Answer(1, "", (), 0, error="HTTP 500")
    runs = [run("none", 2.0), run("mine K=3", 1.0, answers=[answer(0, 0.1, tokens=10), bad])]
    cells = summarise(BOTH, runs, min_equal=0.0)
    assert (cells[1].num_failed, cells[1].num_requests) == (1, 2)
    assert cells[1].excluded == "1 requests failed"
    runs[1] = replace(run("mine K=3", 1.0), error="the server ended")
    assert summarise(BOTH, runs, min_equal=0.0)[1].excluded == "the server ended"


def test_winner_and_losses_of_each_column() -> None:
    runs = [
        run(name, seconds * (1 + round_), concurrency=concurrency, round_=round_)
        for round_ in range(3)
        for name, concurrency, seconds in (
            ("none", 1, 2.0),
            ("mine K=3", 1, 1.0),
            ("none", 16, 1.0),
            ("mine K=3", 16, 1.25),
        )
    ]
    cells = summarise(BOTH, runs, min_equal=0.5)
    one, sixteen = judge_columns(cells, runs)
    assert (one.winner, one.is_clear, one.losses) == ("mine K=3", True, ())
    assert (sixteen.winner, sixteen.losses) == ("none", ("mine K=3",))
    assert any("16 at once: slower" in line for line in note_lines(cells, [one, sixteen], {}))
    (schedule,) = best_schedules(cells)
    assert schedule.ranges == ((1, 4, 3), (5, 16, 0))
    assert schedule.off_from == 5
    assert winners_table(cells, [one, sixteen]).row_count == 2
    assert details_table(cells).row_count == 4


@pytest.mark.parametrize(
    ("best", "ranges"),
    [
        ({1: 3}, ((1, 1, 3),)),
        ({4: 2}, ((1, 4, 2),)),
        ({1: 3, 2: 1}, ((1, 1, 3), (2, 2, 1))),
        ({1: 3, 4: 3, 16: 1, 64: 0}, ((1, 8, 3), (9, 32, 1), (33, 64, 0))),
    ],
)
def test_ranges_start_at_one_and_leave_no_gap(
    best: dict[int, int], ranges: tuple[tuple[int, int, int], ...]
) -> None:
    assert ranges_of(best) == ranges


def cell(k: int, concurrency: int, speed_up: float | None) -> Cell:
    head = "mine" if k else "none"
    return Cell(
        contestant=f"{head} K={k}",
        head=head,
        k=k,
        concurrency=concurrency,
        rounds=1,
        tokens_per_s=Estimate(1.0),
        itl=None,
        ttft=None,
        per_token=None,
        num_requests=1,
        num_failed=0,
        tau=None,
        acceptance=(),
        no_tau="",
        speed_up=None if speed_up is None else Estimate(speed_up, speed_up - 0.1, speed_up + 0.1),
        equal_texts=None,
    )


def test_the_schedule_is_vllms_option(tmp_path: Path) -> None:
    cells = [cell(0, 1, None), cell(0, 4, None), cell(0, 16, None)]
    cells += [cell(1, 1, 1.3), cell(1, 4, 1.25), cell(1, 16, 0.95)]
    cells += [cell(3, 1, 1.6), cell(3, 4, 1.05), cell(3, 16, 0.7)]
    (schedule,) = best_schedules(cells)
    assert schedule.ranges == ((1, 2, 3), (3, 8, 1), (9, 16, 0))
    assert schedule.undecided == (16,)
    config = speculative_config(schedule, method="mtp", head=tmp_path, has_option=True)
    assert json.loads(json.dumps(config)) == {
        "method": "mtp",
        "model": str(tmp_path),
        "num_speculative_tokens": 3,
        OPTION: [[1, 2, 3], [3, 8, 1], [9, 16, 0]],
    }
    without = speculative_config(schedule, method="mtp", head=None, has_option=False)
    assert without == {"method": "mtp", "model": "HEAD", "num_speculative_tokens": 3}


def test_nothing_is_written_where_no_k_is_faster() -> None:
    (schedule,) = best_schedules([cell(0, 1, None), cell(3, 1, 0.8)])
    assert schedule.off_from == 1
    with pytest.raises(ValueError, match="no K is faster"):
        speculative_config(schedule, method="mtp", head=None, has_option=True)


def test_the_record_holds_no_text() -> None:
    values = run_values(run("none", 1.0, answers=[answer(0, 0.1, text="secret")]))
    assert "secret" not in json.dumps(values)
