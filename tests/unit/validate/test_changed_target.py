"""A head beside a target that changed: both figures, the difference, and a verdict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.config import Config
from mtp_train.run_dir import read_json
from mtp_train.stages import run_validate
from mtp_train.validate import ladder
from mtp_train.validate.bootstrap import Interval
from mtp_train.validate.changed_target import examine_change, judge_change
from mtp_train.validate.measure import Measured, measure_acceptance
from mtp_train.validate.report import MeasuredTau
from mtp_train.validate.subject import Subject
from runtime.metrics import Acceptance
from tests.unit.runtime.model_fixtures import save_model
from tests.unit.validate.subjects import RUNTIME, make_prompts, make_subject
from tests.unit.validate.test_ladder import fake_sets, make_config


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A head for ``target``, and ``other`` with the same sizes and other weights."""
    make_subject(tmp_path)
    save_model(tmp_path / "other", "llama", seed=5, vocab_size=11)
    return tmp_path


def config_for(place: Path, target: str, **validate: Any) -> Config:
    config = make_config(place, rungs=("P2",), **validate)
    return dataclasses.replace(
        config, target=dataclasses.replace(config.target, path=str(place / target))
    )


def subject_of(place: Path, target: str = "other", *, may_differ: bool = True) -> Subject:
    return Subject(place / target, place / "head", torch.float32, RUNTIME, may_differ=may_differ)


def measure(subject: Subject) -> Measured:
    return measure_acceptance(
        subject.target(torch.float32),
        subject.head(torch.float32),
        make_prompts(),
        k=2,
        max_tokens=20,
        temperature=0.0,
        engine_config=RUNTIME,
        prompt_set="random",
    )


def test_the_ladder_measures_it_and_leaves_the_heads_record_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    assert run_validate(config_for(place, "target")) == 0
    assert "retrain" not in capsys.readouterr().out
    record = (place / "head" / "parity.json").read_text()
    assert "target_change" not in record
    assert run_validate(config_for(place, "other")) == 0
    shown = capsys.readouterr().out
    assert "old target" in shown
    assert "new target" in shown
    assert "retrain: " in shown
    assert (place / "head" / "parity.json").read_text() == record
    change = read_json(place / "runs" / "ladder" / "parity.json")["target_change"]
    stored = next(row for row in json.loads(record)["acceptance"] if row["k"] == 2)
    assert change["old"]["tau"] == stored["tau"]
    assert [change["old"]["low"], change["old"]["high"]] == stored["tau_interval"]
    assert change["old"]["target"] == json.loads(record)["target"] != change["new"]["target"]
    assert change["retrain"] in (True, False)


def test_the_old_target_is_measured_on_the_same_prompts(place: Path) -> None:
    subject = subject_of(place)
    measured = measure(subject)
    config = config_for(place, "other", old_target=str(place / "target"))
    change = examine_change(config, subject, measured)
    before = measure(subject_of(place, "target"))
    assert change.old is not None
    assert change.is_paired
    assert change.old.tau == before.acceptance.tau
    assert change.new.tau == measured.acceptance.tau
    assert change.difference is not None
    value, low, high = change.difference
    assert value == pytest.approx(change.new.tau - change.old.tau)
    assert low <= value <= high


def test_an_old_target_that_is_not_the_heads_is_refused(place: Path) -> None:
    subject = subject_of(place)
    config = config_for(place, "other", old_target=str(place / "other"))
    with pytest.raises(ValueError, match=r"validate\.old_target=.*the head was trained for"):
        examine_change(config, subject, measure(subject))


def test_without_a_record_nothing_is_claimed(place: Path) -> None:
    subject = subject_of(place)
    change = examine_change(config_for(place, "other"), subject, measure(subject))
    assert change.retrain is None
    assert change.old is None
    assert change.lines()[-1].startswith("retrain: not known (no parity.json")
    assert "validate.old_target=DIR" in change.reason


def test_other_users_of_a_subject_still_refuse_another_target(place: Path) -> None:
    with pytest.raises(ValueError, match="trained for target"):
        _ = subject_of(place, may_differ=False).spec


def test_a_target_of_other_sizes_is_refused(place: Path) -> None:
    save_model(place / "wide", "llama", vocab_size=11, hidden_size=64)
    with pytest.raises(ValueError, match="hidden_size=32 there, 64 here"):
        _ = subject_of(place, "wide").spec


def tau(value: float, low: float, high: float) -> MeasuredTau:
    return MeasuredTau("f", value, low, high, 10, "here")


@pytest.mark.parametrize(
    ("old", "difference", "retrain", "reason"),
    [
        (2.0, (-0.3, -0.4, -0.2), True, "30.0% of the accepted tokens per step are gone, more"),
        (2.0, (-0.02, -0.03, -0.01), False, "within validate.max_loss=0.05"),
        (2.0, (-0.3, -0.7, 0.1), False, "the interval holds 0; measure more prompts"),
        (2.0, (-0.02, -0.2, 0.1), False, "the interval holds 0"),
        (2.0, (0.1, 0.05, 0.2), False, "it accepts no less than before"),
        (1.0, (0.0, 0.0, 0.0), True, "nothing was accepted on the old target either"),
    ],
)
def test_the_verdict_needs_a_loss_that_is_certain_and_large(
    old: float, difference: tuple[float, float, float], retrain: bool, reason: str
) -> None:
    item = Measured(
        "random",
        2,
        0.0,
        "argmax",
        20,
        Acceptance(2, 1, (0, 0), (0, 0)),
        Interval(1, 1, 0.95),
        1.0,
        (),
    )
    new = tau(old + difference[0], old, old)
    change = judge_change(item, new, tau(old, old, old), difference, is_paired=True, max_loss=0.05)
    assert change.retrain is retrain
    assert reason in change.reason
    assert change.lines()[-1] == f"retrain: {'yes' if retrain else 'no'} ({change.reason})"
