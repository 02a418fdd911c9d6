"""The ladder as a whole: what it runs, what it writes, what it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.config import DataConfig
from mtp_train.compare.build import compare
from mtp_train.config import (
    CompareConfig,
    Config,
    ReportConfig,
    RunConfig,
    TargetConfig,
    ValidateConfig,
)
from mtp_train.distributed import SingleProcessGroup
from mtp_train.run_dir import RunDirectory, read_json
from mtp_train.stages import run_validate
from mtp_train.validate import ladder, p3, p4, rates, run
from mtp_train.validate.bootstrap import Interval
from mtp_train.validate.journal import FinishedRung, RungJournal
from mtp_train.validate.ladder import climb
from mtp_train.validate.prompt_sets import PromptSet
from mtp_train.validate.rejection import GTest
from mtp_train.validate.report import DecodeSpeed, LadderReport, RungResult, SpeedResult
from mtp_train.validate.subject import Subject
from runtime.engine import Engine
from runtime.head_spec import load_head, save_head
from runtime.request import Generation
from tests.unit.validate.subjects import RUNTIME, make_prompts, make_subject

CPU = torch.device("cpu")


def make_config(path: Path, **validate: Any) -> Config:
    return Config(
        run=RunConfig("ladder", root=str(path / "runs")),
        target=TargetConfig(str(path / "target"), dtype="float32", device="cpu"),
        data=DataConfig(),
        runtime=RUNTIME,
        validate=ValidateConfig(
            **{"k": 2, "max_tokens": 20, "head": str(path / "head"), **validate}
        ),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ladder")
    make_subject(path)
    return path


def subject_at(place: Path) -> Subject:
    return Subject(place / "target", place / "head", torch.float32, RUNTIME)


def fake_sets(config: Config, subject: Subject) -> list[PromptSet]:
    prompts = tuple(tuple(p) for p in make_prompts())
    return [PromptSet("random", prompts, decode=lambda ids: "".join(f"{i} " for i in ids))]


def test_run_writes_the_report_beside_run_and_head(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    config = make_config(place, rungs=("P1", "P3"))
    report = run(config, group=SingleProcessGroup(CPU))
    assert report.passed
    assert [rung.name for rung in report.rungs] == ["P1", "P3"]
    assert all(rung.seconds > 0 for rung in report.rungs)
    content = read_json(place / "runs" / "ladder" / "parity.json")
    assert content == read_json(place / "head" / "parity.json")
    assert content == json.loads(json.dumps(content))
    assert set(content["rungs"]) == {"P1", "P3"}
    assert [(row["prompt_set"], row["k"]) for row in content["acceptance"]] == [
        ("random", 1),
        ("random", 2),
        ("random", 3),
    ]
    for row in content["acceptance"]:
        low, high = row["tau_interval"]
        assert low <= row["tau"] <= high
        assert row["prompts"] == 6
        assert row["max_tokens"] == 20
        assert row["draft_mode"] == "argmax"
        assert len(row["rate_intervals"]) == row["k"]
        for rate, (low, high) in zip(row["rates"], row["rate_intervals"], strict=True):
            assert low <= rate <= high
    figures = content["rungs"]["P3"]["figures"]
    # in fp32 both sides agree step by step, so their rates and taus are the same numbers
    assert figures["float32_training"] == figures["float32_runtime"]
    assert figures["float32_training_tau"] == figures["float32_runtime_tau"]
    low, high = figures["float32_training_tau_interval"]
    assert low <= figures["float32_training_tau"] <= high
    reached = figures["float32_training"]
    assert figures["float32_training_tau"] == pytest.approx(
        1 + reached[0] + reached[0] * reached[1]
    )


def test_counts_by_prompt_add_up_and_are_what_a_comparison_pairs(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    names = ("left", "right")
    for name in names:
        config = make_config(place, rungs=("P1",))
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))
        run(config, group=SingleProcessGroup(CPU))
        root = place / "runs" / name
        counts = read_json(root / "prompt_counts.json")
        content = read_json(root / "parity.json")
        assert counts["head_sha256"] == content["head_sha256"]
        for row, pooled in zip(counts["rows"], content["acceptance"], strict=True):
            assert row["k"] == pooled["k"]
            assert len(set(row["prompts"])) == 6
            drafts, *accepted = (sum(column) for column in zip(*row["counts"], strict=True))
            assert drafts == pooled["drafts"]
            assert accepted == pooled["accepted"]
    roots = tuple(str(place / "runs" / name) for name in names)
    _, other = compare(CompareConfig(runs=roots)).runs
    assert other.difference is not None
    assert other.difference.kind == "paired"
    gap = other.difference.tau
    assert (gap.value, gap.low, gap.high) == (0, 0, 0)  # the same head over the same prompts


def test_further_sets_and_second_turns_are_measured_at_k_only(place: Path) -> None:
    config = make_config(place, rungs=("P1",))
    subject = subject_at(place)
    (first,) = fake_sets(config, subject)
    further = dataclasses.replace(first, name="further", prompts=first.prompts[:3])
    answers: list[Any] = []

    def follow_up(generations: Sequence[Generation]) -> PromptSet:
        answers.extend(generations)
        return PromptSet("random/turn2", (first.prompts[2],), ("c",))

    sets = [dataclasses.replace(first, follow_up=follow_up), further]
    report = climb(config, subject, sets)
    assert [(row.prompt_set, row.counts.k, row.num_prompts) for row in report.acceptance] == [
        ("random", 1, 6),
        ("random", 2, 6),
        ("random", 3, 6),
        ("random/turn2", 2, 1),
        ("further", 2, 3),
    ]
    assert [g.prompt_ids for g in answers] == list(first.prompts)
    assert {len(step.draft_ids) for g in answers for step in g.steps} == {2}
    pooled = {(row.prompt_set, row.counts.k): row.counts for row in report.acceptance}
    parts: dict[Any, list[Any]] = {}
    for row in report.breakdown:
        parts.setdefault((row.prompt_set, row.k, row.dimension), []).append(row)
    assert len(parts) == 3 * 4 + 2, "there is no text of the second turns"
    for (name, k, _), rows in parts.items():
        assert sum(row.num_drafts for row in rows) == pooled[name, k].num_drafts
        sums = tuple(sum(row.accepted[j] for row in rows) for j in range(k))
        assert sums == pooled[name, k].accepted


def test_samples_are_written_only_where_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_subject(tmp_path)
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    config = make_config(tmp_path, rungs=("P1",))
    private = dataclasses.replace(config, report=ReportConfig(samples=False))
    run_dir = RunDirectory.from_config(config)
    assert run_validate(private) == 0
    assert not run_dir.samples_file.exists()
    assert run_validate(config) == 0  # missing samples are made
    samples = read_json(run_dir.samples_file)
    assert samples["k"] == 2
    (sample,) = samples["samples"]
    ids = [int(text) for text in sample["prompt"].split()]
    assert ids == list(make_prompts()[0])
    assert {token["by"] for token in sample["tokens"]} == {"target", "draft"}
    changed = run_dir.samples_file.stat().st_mtime_ns
    run_validate(config)
    assert run_dir.samples_file.stat().st_mtime_ns == changed
    run_validate(private)  # there is nothing to measure, and no text may stay
    assert not run_dir.samples_file.exists()


def test_a_red_rung_fails_the_ladder_and_the_others_still_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **options: Any) -> p4.OutputComparison:
        return p4.OutputComparison(num_tokens=10, num_different=1, gaps=(1.0,))

    monkeypatch.setattr(p4, "compare_outputs", wrong)
    monkeypatch.setattr(p4, "joint_g_test", lambda *args, **options: GTest(1.0, 2.0, 1))
    config = make_config(place, rungs=("P1", "P4"))
    report = climb(config, subject_at(place), fake_sets(config, subject_at(place)))
    assert [(rung.name, rung.passed) for rung in report.rungs] == [("P1", True), ("P4", False)]
    assert not report.passed


def test_sampled_measurement_still_gives_p3_greedy_generations(place: Path) -> None:
    config = make_config(place, rungs=("P3",), temperature=0.7)
    report = climb(config, subject_at(place), fake_sets(config, subject_at(place)))
    assert report.passed
    assert {row.temperature for row in report.acceptance} == {0.7}


def test_unknown_rungs_are_refused_and_a_head_of_another_target_is_told(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    group = SingleProcessGroup(CPU)
    with pytest.raises(ValueError, match=r"validate\.rungs.*P9.*P0"):
        run(make_config(place, rungs=("P9",)), group=group)
    spec, tensors = load_head(place / "head")
    save_head(tmp_path / "head", dataclasses.replace(spec, target_fingerprint="other"), tensors)
    config = make_config(place, rungs=("P1",))
    foreign = dataclasses.replace(
        config, validate=dataclasses.replace(config.validate, head=str(tmp_path / "head"))
    )
    report = run(foreign, group=group)
    assert report.change is not None
    assert report.change.retrain is None  # nothing says what it did on its own target


def test_validation_ends_with_a_report_and_a_failing_one_hides_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_subject(tmp_path)
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    config = make_config(tmp_path, rungs=("P1",))
    run_dir = RunDirectory.from_config(config)
    assert run_validate(config) == 0
    assert "<h1>Not proven yet</h1>" in run_dir.report_file.read_text()

    def fail(*args: Any) -> None:
        raise ValueError("no room for the page")

    monkeypatch.setattr("mtp_train.report.page.write_page", fail)
    longer = dataclasses.replace(config, validate=dataclasses.replace(config.validate, k=3))
    capsys.readouterr()
    with pytest.raises(ValueError, match="no room"):
        run_validate(longer)
    assert "P1" in capsys.readouterr().out
    assert read_json(run_dir.parity_file)["passed"]
    assert read_json(run_dir.validate_file)["finished"]


def test_a_ladder_is_not_climbed_twice_for_the_same_head_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_subject(tmp_path)
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    climbed: list[LadderReport] = []

    def fail_p1(*args: Any, **options: Any) -> LadderReport:
        climbed.append(
            dataclasses.replace(real(*args, **options), rungs=(RungResult("P1", False),))
        )
        return climbed[-1]

    real = ladder.climb
    monkeypatch.setattr(ladder, "climb", fail_p1)
    config = make_config(tmp_path, rungs=("P1",))
    assert run_validate(config) == 1
    parity_file = tmp_path / "runs" / "ladder" / "parity.json"
    parity = read_json(parity_file)
    assert parity["head_sha256"] == {
        name: hashlib.sha256((tmp_path / "head" / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors")
    }
    versions = read_json(tmp_path / "runs" / "ladder" / "versions.json")
    recorded = versions["validate"]["fingerprints"]
    assert recorded["target"] == climbed[0].target
    assert recorded["head_model.safetensors"] == parity["head_sha256"]["model.safetensors"]
    assert run_validate(config) == 1
    assert len(climbed) == 1
    assert "nothing to do" in capsys.readouterr().out

    longer = dataclasses.replace(config.validate, max_tokens=21)
    run_validate(dataclasses.replace(config, validate=longer))
    assert len(climbed) == 2
    spec, tensors = load_head(tmp_path / "head")
    save_head(tmp_path / "head", spec, {name: value * 0.5 for name, value in tensors.items()})
    run_validate(dataclasses.replace(config, validate=longer))
    assert len(climbed) == 3
    parity_file.write_text("{}")
    run_validate(dataclasses.replace(config, validate=longer))
    assert len(climbed) == 4


class Killed(BaseException):
    """As a signal would: nothing catches it."""


def test_a_killed_ladder_goes_on_at_the_rung_it_had_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_subject(tmp_path)
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    climbed: list[str] = []

    def climbs(name: str, result: RungResult) -> RungResult:
        climbed.append(name)
        if name == "P3" and climbed.count("P3") == 1:
            raise Killed
        return result

    bad = RungResult("P1", False, {"gap": 0.1 + 0.2}, {"gap": 1e-9}, "why")
    good = RungResult("P3", True)
    speed = DecodeSpeed(100.0, 1.0, 2.0, 3.0)
    row = SpeedResult("random", 1, 2, 1.1, 1.0, 1.2, 1.5, 1.2, 0.1, 0.2, speed, speed)
    monkeypatch.setattr(ladder.p1, "check", lambda *a, **o: climbs("P1", bad))
    monkeypatch.setattr(ladder.p3, "check", lambda *a, **o: climbs("P3", good))
    monkeypatch.setattr(
        ladder.p5, "check", lambda *a, **o: (climbs("P5", RungResult("P5", True)), (row,))
    )
    monkeypatch.setattr(ladder, "RUNGS", ("P1", "P5", "P3"))
    config = make_config(tmp_path, rungs=("P1", "P3", "P5"))
    run_dir = RunDirectory.from_config(config)
    with pytest.raises(Killed):
        run_validate(config)
    kept = run_dir.rungs_file.read_text()
    assert not run_dir.parity_file.exists()
    assert run_validate(config) == 1
    assert climbed == ["P1", "P5", "P3", "P3"]
    parity = read_json(run_dir.parity_file)
    assert parity["rungs"]["P1"]["figures"] == {"gap": 0.1 + 0.2}
    assert parity["rungs"]["P1"]["note"] == "why"
    assert parity["rungs"]["P1"]["seconds"] > 0
    assert not parity["passed"]
    assert parity["speed"] == [row.to_dict()]
    assert not run_dir.rungs_file.exists()

    run_dir.rungs_file.write_text(kept)
    longer = dataclasses.replace(config.validate, max_tokens=21)
    run_validate(dataclasses.replace(config, validate=longer))  # other settings: all of it
    assert climbed[4:] == ["P1", "P5", "P3"]
    assert read_json(run_dir.parity_file)["speed"] == [row.to_dict()], "a rung's rows are its own"


def test_a_journal_is_not_used_for_a_head_that_was_replaced_since(place: Path) -> None:
    config = make_config(place, rungs=("P1",))
    subject = subject_at(place)
    journal = RungJournal.of(place / "rungs.json", {"head": {"config.json": "other"}})
    journal.write([FinishedRung(RungResult("P1", False))])
    assert journal.read()["P1"].result == RungResult("P1", False)
    report = climb(config, subject, fake_sets(config, subject), journal=journal)
    assert report.passed
    assert not journal.read()["P1"].result.passed, "nor is it written"


def test_the_head_explains_itself(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    report = run(make_config(place, rungs=("P1",)), group=SingleProcessGroup(CPU))
    text = (place / "head" / "README.md").read_text()
    assert report.target in text
    assert all(value in text for value in report.head_sha256.values())
    assert "| P1 | passed |" in text
    assert f"{report.acceptance[0].counts.tau:.3f}" in text
    code = text.split("```python\n")[1].split("```")[0]
    code = code.replace('"TARGET"', repr(str(place / "target")))
    names: dict[str, Any] = {}
    exec(code.replace('"HEAD"', repr(str(place / "head"))), names)
    assert isinstance(names["engine"], Engine)


def test_a_run_without_features_fails_p0_and_a_bare_head_does_not(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    config = make_config(place, rungs=("P0",))
    run_dir = RunDirectory.from_config(config)
    assert ladder.find_missing_stores(config, run_dir) == []
    own = dataclasses.replace(config, validate=dataclasses.replace(config.validate, head=""))
    missing = ladder.find_missing_stores(own, run_dir)
    assert [path.name for path in missing] == ["train", "validation"]
    sets = fake_sets(config, subject_at(place))
    bare = climb(config, subject_at(place), sets)
    assert bare.passed
    report = climb(config, subject_at(place), sets, missing_stores=missing)
    assert not report.passed
    assert "mtp precompute" in report.rungs[0].note


@pytest.mark.parametrize(
    ("low", "high", "num_drafts", "verdict"),
    [
        (-0.01, 0.01, 10, "agrees"),
        (-0.01, 0.02, 10, "undecided"),
        (-0.02, 0.01, 10, "undecided"),
        (0.016, 0.03, 10, "differs"),
        (-0.03, -0.016, 10, "differs"),
        (-0.01, 0.03, 100, "agrees"),
    ],
)
def test_positions_that_few_drafts_reach_are_called_undecided(
    low: float, high: float, num_drafts: int, verdict: str
) -> None:
    interval = Interval(low, high, 0.99)
    gap = (low + high) / 2
    assert rates.judge_position(gap, interval, num_drafts=num_drafts, min_drafts=100) == verdict


def test_the_note_counts_undecided_positions_from_one() -> None:
    note = p3._describe_undecided({"bfloat16_undecided": [1, 2]}, "bfloat16", 3000)
    assert "undecided at position 2 and 3: fewer than 3000 drafts" in note
    assert p3._describe_undecided({"bfloat16_undecided": []}, "bfloat16", 3000) == ""
