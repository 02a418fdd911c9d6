"""Seeds, events, run directory and the rule about finished stages."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_train.events import EventLog, read_events
from mtp_train.run_dir import (
    RunDirectory,
    StageRecord,
    describe_differences,
    write_json_atomic,
)
from runtime.seeds import derive_seed


def test_seeds_depend_on_the_name_and_not_on_order_of_creation() -> None:
    first = derive_seed(1, "data")
    derive_seed(1, "other")
    assert derive_seed(1, "data") == first
    assert derive_seed(2, "data") != first
    assert derive_seed(1, "head") != first


def test_seed_names_are_not_merely_joined() -> None:
    assert derive_seed(1, "a", "b") != derive_seed(1, "ab")
    assert derive_seed(1, "a", "bc") != derive_seed(1, "ab", "c")
    assert derive_seed(1, "step", 1) != derive_seed(1, "step", "1")


def test_seed_values_are_frozen() -> None:
    """Changing these changes every published run."""
    assert derive_seed(1234, "init") == 568525713724162653
    with pytest.raises(ValueError, match="at least one name"):
        derive_seed(1234)


@given(st.integers(), st.text())
def test_seeds_fit_a_signed_64_bit_generator(seed: int, name: str) -> None:
    assert 0 <= derive_seed(seed, name) < 2**63


@dataclass(frozen=True)
class _Step:
    step: int
    loss: float


def test_events_are_read_back_in_order_with_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path, stage="train") as log:
        log.write("step", _Step(1, 0.5), rate=3)
        log.write("skip", {"path": tmp_path})
    events = list(read_events(path))
    assert [(e["event"], e["stage"]) for e in events] == [("step", "train"), ("skip", "train")]
    assert (events[0]["step"], events[0]["loss"], events[0]["rate"]) == (1, 0.5, 3)
    assert events[1]["path"] == str(tmp_path)
    assert [e["event"] for e in read_events(path, event="skip")] == ["skip"]
    assert not list(read_events(path, stage="data"))


def test_half_a_character_can_be_logged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, stage="train") as log:
        log.write("said", text="half \ud83d é")
    (event,) = read_events(path)
    assert event["text"] == "half \ud83d é"


def test_a_torn_last_line_costs_neither_the_lines_before_nor_after(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, stage="train") as log:
        log.write("first")
    with path.open("ab") as file:
        file.write(b'{"event": "torn", "st')
    with EventLog(path, stage="train") as log:
        log.write("second")
    assert [e["event"] for e in read_events(path)] == ["first", "second"]


def test_events_are_strict_json_even_for_nan(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, stage="train") as log:
        log.write("step", loss=math.nan, parts=[math.inf])

    def refuse(name: str) -> None:
        raise AssertionError(name)

    event = json.loads(path.read_text(), parse_constant=refuse)
    assert (event["loss"], event["parts"]) == ("nan", ["inf"])


def test_an_event_cannot_overwrite_its_own_header(tmp_path: Path) -> None:
    with (
        EventLog(tmp_path / "e.jsonl", stage="train") as log,
        pytest.raises(ValueError, match="stage are reserved"),
    ):
        log.write("step", {"stage": "other"})


def test_followers_write_no_events(tmp_path: Path) -> None:
    run = _run_directory(tmp_path)
    with run.event_log("train", is_leader=False) as log:
        log.write("step")
    assert not run.events_file.exists()


def test_a_finished_stage_with_the_same_settings_is_finished(tmp_path: Path) -> None:
    record = StageRecord(tmp_path / "stage.json", stage="train", fingerprint={"lr": 1e-3})
    assert record.state() == "new"
    record.start()
    assert record.state() == "started"
    assert record.outputs() == {}
    record.finish({"tau": 1.5})
    again = StageRecord(tmp_path / "stage.json", stage="train", fingerprint={"lr": 1e-3})
    assert again.state() == "finished"
    assert again.outputs() == {"tau": 1.5}


@pytest.mark.parametrize("finished", [False, True])
def test_other_settings_are_refused_by_name_of_the_key(tmp_path: Path, finished: bool) -> None:
    there = {"loss": {"beta": 1.0, "k": 1}, "seed": 1}
    record = StageRecord(tmp_path / "stage.json", stage="train", fingerprint=there)
    record.start()
    if finished:
        record.finish()
    wanted = {"loss": {"beta": 0.8, "k": 1}, "seed": 1, "codec": "bf16"}
    other = StageRecord(tmp_path / "stage.json", stage="train", fingerprint=wanted)
    with pytest.raises(ValueError, match=r"loss\.beta was 1\.0, is 0\.8") as caught:
        other.state()
    assert 'codec was absent, is "bf16"' in str(caught.value)
    assert "seed" not in str(caught.value)
    assert "loss.k" not in str(caught.value)


def test_tuples_and_lists_have_the_same_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "stage.json"
    StageRecord(path, stage="data", fingerprint={"sources": ("a", "b")}).finish()
    assert StageRecord(path, stage="data", fingerprint={"sources": ["a", "b"]}).state() == (
        "finished"
    )


def test_equal_fingerprints_have_no_differences() -> None:
    assert describe_differences({"a": {"b": [1]}}, {"a": {"b": [1]}}) == []
    assert describe_differences({"a": {}}, {"a": {"b": 1}}) != []


def test_versions_keep_the_entries_of_other_stages(tmp_path: Path) -> None:
    run = _run_directory(tmp_path)
    run.record_versions("data")
    run.record_fingerprints("data", {"target": "abc"})
    run.record_versions("train")
    versions = json.loads(run.versions_file.read_text())
    assert versions["data"]["fingerprints"] == {"target": "abc"}
    assert versions["train"]["packages"]["torch"]
    assert versions["train"]["machine"]["memory_bytes"] > 0


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"tau": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"tau": object()})
    assert json.loads(path.read_text()) == {"tau": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def _run_directory(root: Path) -> RunDirectory:
    return RunDirectory(
        root=root, data=root / "data", features=root / "features", head=root / "head"
    )
