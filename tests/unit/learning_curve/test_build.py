"""Which runs make a curve, what is refused, and what is said of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mtp_train.compare.answers import answers_pairs
from mtp_train.compare.facts import Cost
from mtp_train.compare.statistics import Measured
from mtp_train.learning_curve.build import learning_curve
from mtp_train.learning_curve.group import group_curve
from mtp_train.learning_curve.panel import curve_panel, curve_table, describe_curve
from tests.unit.compare.test_compare import write
from tests.unit.compare.test_statistics import make_counts, measured, records
from tests.unit.report.run_fixture import events


def run(tokens: int, *, shift: int = 0, passes: int = 1, seed: int = 1, **more: Any) -> Any:
    """A labelled run of ``tokens`` distinct tokens; ``shift``: drafts more that each prompt
    accepts.
    """
    settings = {
        "seed": seed,
        "trainer": {"max_tokens": tokens, "learning_rate": more.pop("rate", 1e-3)},
        "data": {"path": more.pop("path", ""), "regenerate": {"enabled": more.pop("own", True)}},
    }
    label = f"{tokens}-{seed}"
    made = records(label, make_counts(1, shift=shift), settings=settings, **more)
    cost = Cost(trained_tokens=passes * tokens, distinct_tokens=tokens)
    return label, measured(dataclasses.replace(made, cost=cost))


def test_runs_of_three_sizes_make_a_curve_whatever_their_seed_and_order() -> None:
    curve = learning_curve(
        [run(400, shift=6), run(100), run(200, shift=3), run(100, seed=2), run(200, rate=3e-3)]
    )
    assert [one.num_tokens for one in curve.runs] == [100, 100, 200, 400]
    assert curve.left_out == 1  # the other learning rate
    assert curve.tau is not None
    assert curve.first is not None
    # 3 drafts of 100 more per doubling, on every prompt alike: nothing is left to chance.
    assert curve.tau.gain.value == pytest.approx(0.03)
    assert curve.tau.gain.low == pytest.approx(0.03)
    assert curve.first.gain.high == pytest.approx(0.03)
    assert curve.tau.doubled.high is not None
    assert curve.tau.doubled.high > curve.tau.doubled.value  # prompts are a sample
    sentence = describe_curve(curve)
    assert "would bring τ +0.030 [+0.030, +0.030]" in sentence
    assert "4 runs of 3 sizes" in sentence
    panel = curve_panel(curve)
    assert panel.drawing is not None
    assert panel.drawing.wide.count('<circle class="mark s0"') == 4
    assert len(curve_table(curve).rows) == 2


def test_two_sizes_are_refused_with_a_sentence() -> None:
    curve = learning_curve([run(100), run(100, seed=2), run(200)])
    assert curve.tau is None
    assert "needs at least 3 sizes" in describe_curve(curve)
    assert "and there are two" in describe_curve(curve)
    assert curve_panel(curve).absent == curve.refusal
    assert curve_panel(curve).is_empty


@pytest.mark.parametrize(
    "other",
    [{"passes": 2}, {"rate": 3e-3}, {"own": False}, {"path": "elsewhere"}, {"target": "u"}],
)
def test_a_run_that_differs_in_more_than_its_tokens_is_no_point(other: dict[str, Any]) -> None:
    curve = learning_curve([run(100), run(200), run(400, **other)])
    assert curve.tau is None
    assert "there are two" in curve.refusal


def test_a_setting_that_came_later_counts_as_its_default() -> None:
    label, newer = run(400)
    settings = {**newer.records.settings}
    settings["trainer"] = {**settings["trainer"], "feature_noise": 0.0}
    old = [run(100), run(200)]
    same = dataclasses.replace(newer, records=dataclasses.replace(newer.records, settings=settings))
    assert learning_curve([*old, (label, same)]).tau is not None
    settings["trainer"] = {**settings["trainer"], "feature_noise": 0.1}
    other = dataclasses.replace(same, records=dataclasses.replace(same.records, settings=settings))
    assert learning_curve([*old, (label, other)]).tau is None


def test_runs_without_common_prompts_are_refused() -> None:
    digests = tuple(f"q{index}" for index in range(40))
    curve = learning_curve([run(100), run(200), run(400, digests=digests)])
    assert curve.tau is None
    assert "counts of the same prompts" in curve.refusal


def test_regenerated_answers_are_compared_at_equal_settings_seed_and_budget() -> None:
    given = run(100, own=False)
    (pair,) = answers_pairs(
        [
            given,
            run(105, shift=4),  # within a tenth
            run(200, shift=9),
            run(100, seed=2, shift=9),
            run(100, rate=3e-3, shift=9),
            run(100, passes=3, shift=9),
        ]
    )
    assert (pair.recorded, pair.regenerated) == ("100-1", "105-1")
    assert pair.num_tokens == (100, 105)
    assert pair.difference.kind == "paired"
    assert pair.difference.tau.low == pytest.approx(0.04)


def test_runs_that_say_nothing_about_their_answers_are_no_pair() -> None:
    assert answers_pairs([("a", _bare("a")), ("b", _bare("b"))]) == ()


def test_a_report_finds_the_curve_of_its_group(tmp_path: Path) -> None:
    for index, tokens in enumerate((100, 200, 400)):
        _write_member(tmp_path / f"g-{tokens}", tokens, gain=index)
    stranger = write(tmp_path / "stranger")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.yaml").write_text("{")
    curve = group_curve(tmp_path / "g-100")
    assert [one.label for one in curve.runs] == ["g-100", "g-200", "g-400"]
    assert curve.tau is not None
    assert curve.tau.gain.value == pytest.approx(0.01)
    assert "no run.group" in group_curve(stranger).refusal


def _bare(name: str) -> Measured:
    made = records(name, make_counts(1))
    cost = Cost(trained_tokens=100, distinct_tokens=100)
    return measured(dataclasses.replace(made, cost=cost))


def _write_member(root: Path, tokens: int, *, gain: int) -> None:
    write(root, gain=gain, max_tokens=tokens)
    settings = json.loads((root / "config.yaml").read_text())
    (root / "config.yaml").write_text(json.dumps(settings | {"run": {"group": "g"}}))
    lines = []
    for event in events():
        if event["event"] == "start":
            event["distinct_tokens"] = tokens
        if event["event"] == "step":
            event["num_tokens"] = tokens // 100
        lines.append(json.dumps(event) + "\n")
    (root / "events.jsonl").write_text("".join(lines))
