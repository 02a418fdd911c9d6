"""The demo's bookkeeping: order of stages, what stops it, where its figures come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_train.config import Config, ServingConfig
from mtp_train.console import format_duration
from mtp_train.demo import (
    STAGES,
    run_demo,
    stage_seconds,
    summarise,
    validate_alone,
    validate_engine,
)
from mtp_train.run_dir import RunDirectory, write_json_atomic
from mtp_train.settings import load_config
from mtp_train.validate.report import (
    AcceptanceResult,
    DecodeSpeed,
    LadderReport,
    RungResult,
    SpeedResult,
)
from runtime.metrics import Acceptance


def _config(root: Path) -> Config:
    raw = {"run": {"name": "demo", "root": str(root)}, "target": {"path": "m"}}
    return load_config(raw)


def _speed(**options: Any) -> SpeedResult:
    speed = DecodeSpeed(100.0, 10.0, 12.0, 30.0)
    return SpeedResult(
        "mtbench",
        emitted_per_step=1.5,
        predicted=1.2,
        c=0.1,
        v=0.1,
        draft=speed,
        plain=speed,
        **options,
    )


def _report(*, passed: bool = True) -> LadderReport:
    one = Acceptance(k=1, num_drafts=10, accepted=(4,), accepted_trimmed=(4,))
    three = Acceptance(k=3, num_drafts=10, accepted=(4, 2, 1), accepted_trimmed=(4, 2, 0))
    return LadderReport(
        target="abc",
        head="runs/demo/head",
        head_sha256={"config.json": "c0", "model.safetensors": "f0"},
        rungs=(
            RungResult("P2", True, {"max_gap": 1e-6}, {"max_gap": 1e-4}),
            RungResult("P3", passed),
        ),
        acceptance=(
            AcceptanceResult("humaneval", 0.0, "argmax", one),
            AcceptanceResult("mtbench", 0.7, "argmax", one),
            AcceptanceResult("mtbench", 0.0, "argmax", three),
            AcceptanceResult("mtbench", 0.0, "argmax", replace(one, accepted=(5,))),
        ),
        speed=(
            _speed(batch_size=8, k=1, speedup=9.0, low=8.0, high=10.0),
            _speed(batch_size=1, k=1, speedup=1.2, low=1.1, high=1.3),
            _speed(batch_size=1, k=3, speedup=1.1, low=1.0, high=1.2),
        ),
    )


def _parity(report: LadderReport) -> dict[str, Any]:
    parity: dict[str, Any] = json.loads(json.dumps(report.to_dict()))
    return parity


def test_summary_takes_its_figures_from_the_ladder(tmp_path: Path) -> None:
    run = RunDirectory.from_config(_config(tmp_path))
    summary = summarise(
        _parity(_report(passed=False)), wall_s={"data": 2.0}, prompt_set="mtbench", run=run
    )
    assert summary["tau"] == {"1": 1.5, "3": pytest.approx(1.7)}
    assert summary["acceptance"] == {"1": [0.5], "3": [0.4, 0.2, 0.1]}
    assert summary["speedup"] == {"k": 1, "speedup": 1.2, "low": 1.1, "high": 1.3, "level": 0.95}
    assert summary["parity"] == {"P2": True, "P3": False}
    assert summary["wall_s"] == {"data": 2.0, "total": 2.0}
    assert summary["paths"]["head"] == str(run.head)


def test_a_figure_that_was_not_measured_is_an_error_and_not_a_zero(tmp_path: Path) -> None:
    run = RunDirectory.from_config(_config(tmp_path))
    report = replace(_report(), speed=())
    with pytest.raises(ValueError, match="no speed-up for prompt_set=mtbench, batch_size=1, k=1"):
        summarise(_parity(report), wall_s={}, prompt_set="mtbench", run=run)


def test_a_report_passes_only_if_every_rung_did_and_one_ran() -> None:
    assert _report().passed
    assert not _report(passed=False).passed
    assert not replace(_report(), rungs=()).passed


@pytest.mark.parametrize("passed", [True, False])
def test_demo_runs_the_stages_in_order_and_returns_the_verdict(
    tmp_path: Path, passed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config, ran = _config(tmp_path), []
    run = RunDirectory.from_config(config)

    def stage(name: str, code: int = 0) -> Any:
        def work(config: Config) -> int:
            ran.append(name)
            if name == "validate":
                write_json_atomic(run.parity_file, _report(passed=passed).to_dict())
            return code

        return (name, work)

    stages = (stage("data"), stage("validate", int(not passed)), stage("export"))
    assert run_demo(config, stages) == int(not passed)
    assert ran == (["data", "validate", "export"] if passed else ["data", "validate"])
    assert json.loads(run.summary_file.read_text())["parity"]["P3"] is passed
    printed = capsys.readouterr().out
    assert ("FAILED" in printed) is not passed
    assert "1/3 data" in printed


def test_demo_stops_at_the_first_stage_that_refuses(tmp_path: Path) -> None:
    config = _config(tmp_path)

    def refuse(config: Config) -> int:
        return 1

    def never(config: Config) -> int:
        raise AssertionError("ran after a refusal")

    assert run_demo(config, (("data", refuse), ("train", never))) == 1
    assert not RunDirectory.from_config(config).summary_file.exists()


def test_stage_times_add_up_over_interrupted_attempts(tmp_path: Path) -> None:
    lines = [
        ("00", "data", "stage_started"),
        ("05", "data", "stage_finished"),
        ("10", "train", "stage_started"),
        ("14", "train", "step"),  # killed here
        ("40", "train", "stage_started"),
        ("42", "train", "stage_finished"),
        ("50", "export", "stage_started"),
    ]
    path = tmp_path / "events.jsonl"
    path.write_text(
        "".join(
            json.dumps({"time": f"2026-01-01T00:00:{s}+00:00", "stage": stage, "event": event})
            + "\n"
            for s, stage, event in lines
        )
    )
    assert stage_seconds(path) == {
        "data": 5.0,
        "precompute": 0.0,
        "train": 6.0,
        "validate": 0.0,
        "export": 0.0,
    }


def test_numbers_are_readable() -> None:
    assert [format_duration(s) for s in (4.24, 185, 7620)] == ["4.2 s", "3 min 05 s", "2 h 07 min"]


def test_without_a_serving_engine_p6_is_named_as_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate_engine(_config(tmp_path)) == 0
    assert "P6 was not run" in capsys.readouterr().out


def test_the_ladder_comes_before_the_export_and_the_engine_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []
    monkeypatch.setattr("mtp_train.demo.run_validate", lambda config: seen.append(config) or 0)
    engine = ServingConfig(kind="vllm", python="python3")
    config = replace(_config(tmp_path), engine=engine)
    assert validate_alone(config) == validate_engine(config) == 0
    assert [name for name, _ in STAGES][-3:] == ["validate", "export", "engine"]
    assert seen[0].engine.kind == "none"
    assert "P6" not in seen[0].validate.rungs
    assert seen[1].engine == engine
    assert seen[1].validate.rungs == ("P6",)
