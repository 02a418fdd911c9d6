"""Reports of some rungs beside those of others: what stays of an earlier one, and what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtp_train.export.weights import hash_files
from mtp_train.run_dir import RunDirectory, read_json, write_json_atomic
from mtp_train.validate.output import describe_head, stored_rung, write_report
from mtp_train.validate.report import LadderReport, RungResult
from runtime.head_spec import HeadSpec, save_head
from tests.unit.trainer.reference import NARROW, eagle3, medusa, random_head, tiny_spec


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    put_head(tmp_path, seed=0)
    return RunDirectory(tmp_path, tmp_path / "data", tmp_path / "features", tmp_path / "head")


def put_head(root: Path, *, seed: int) -> HeadSpec:
    spec = tiny_spec()
    save_head(root / "head", spec, random_head(spec, seed=seed).export_tensors())
    return spec


def write(run: RunDirectory, *rungs: RungResult, target: str = "t") -> dict[str, Any]:
    report = LadderReport(
        target=target, head=str(run.head), head_sha256=hash_files(run.head), rungs=rungs
    )
    write_report(report, tiny_spec(), run)
    content: dict[str, Any] = read_json(run.parity_file)
    assert content == read_json(run.head / "parity.json")
    return content


def rung(name: str, passed: bool = True, *, at: str = "2030-01-01T00:00:00+00:00") -> RungResult:
    return RungResult(name, passed, {"gap": 0.5}, {"gap": 1.0}, "why", 2.0, at)


LATER = "2030-01-02T00:00:00+00:00"


def test_a_rung_climbed_by_itself_leaves_the_others_as_they_were(run: RunDirectory) -> None:
    first = write(run, rung("P1"), rung("P2"), rung("P5"))
    second = write(run, rung("P2", False, at=LATER))
    assert list(second["rungs"]) == ["P1", "P2", "P5"]
    for name in ("P1", "P5"):
        assert second["rungs"][name] == first["rungs"][name]
    assert [second["rungs"][name]["climbed_at"] for name in ("P1", "P2")] == [
        first["rungs"]["P1"]["climbed_at"],
        LATER,
    ]
    assert second["rungs"]["P1"]["head_sha256"] == hash_files(run.head)
    assert not second["passed"]
    assert stored_rung(run, "P1") == rung("P1")
    assert write(run, rung("P2"))["passed"]
    assert not write(run, rung("P1", False))["passed"]
    assert not write(run, rung("P2"))["passed"], "a failed rung that was not climbed again stays"


def test_rungs_of_other_weights_are_dropped_and_the_log_says_so(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    write(run, rung("P1", False), rung("P5"))
    put_head(run.root, seed=1)
    with caplog.at_level("INFO"):
        content = write(run, rung("P2"))
    assert list(content["rungs"]) == ["P2"]
    assert content["passed"]
    for name in ("P1", "P5"):
        assert f"{name} is of another head and is dropped" in caplog.text


def test_rungs_over_another_target_are_dropped(run: RunDirectory) -> None:
    write(run, rung("P1"))
    assert list(write(run, rung("P2"), target="other")["rungs"]) == ["P2"]


def test_what_a_head_brings_from_another_run_stays(run: RunDirectory, tmp_path: Path) -> None:
    write(run, rung("P1"))
    root = tmp_path / "elsewhere"
    root.mkdir()
    other = RunDirectory(root, run.data, run.features, run.head)
    assert list(write(other, rung("P2"))["rungs"]) == ["P1", "P2"]


def test_speed_is_p5s_and_stays_with_it(run: RunDirectory) -> None:
    content = write(run, rung("P5"))
    row = {"k": 3, "speedup": 1.5}
    for place in (run.parity_file, run.head / "parity.json"):
        write_json_atomic(place, content | {"speed": [row]})
    assert write(run, rung("P1"))["speed"] == [row]
    assert write(run, rung("P5", at=LATER))["speed"] == []


def test_a_report_of_before_the_stamps_is_read(run: RunDirectory) -> None:
    content = write(run, rung("P1"))
    for place in (run.parity_file, run.head / "parity.json"):
        old = json.loads(json.dumps(content))
        for key in ("climbed_at", "head_sha256"):
            del old["rungs"]["P1"][key]
        write_json_atomic(place, old)
    kept = write(run, rung("P2"))["rungs"]["P1"]
    assert kept["climbed_at"] == ""
    assert kept["head_sha256"] == hash_files(run.head)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Embedding and `lm_head` are the target's"),
        (medusa(), "Embedding and `lm_head` are the target's"),
        (medusa(lm_head="own"), "It has no embedding; `lm_head` is its own"),
        (eagle3(), "The embedding is the target's; `lm_head` is its own"),
        (eagle3(**NARROW), "Embedding and `lm_head` are its own"),
    ],
    ids=["mtp", "medusa", "medusa with lm_heads", "eagle3", "narrow eagle3"],
)
def test_the_page_beside_a_head_says_what_is_its_own(changes: dict[str, Any], said: str) -> None:
    report = LadderReport(target="t", head="h", head_sha256={}, rungs=())
    assert said in describe_head(report, tiny_spec(**changes))
