"""Data and precompute as the commands run them, on a tiny target with a real tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.token_set import load_token_set
from mtp_train import stages
from mtp_train.capture import open_capture
from mtp_train.config import Config
from mtp_train.distributed import SingleProcessGroup
from mtp_train.events import read_events, stage_attempts
from mtp_train.features.manifest import load_manifest
from mtp_train.features.reader import FeatureReader
from mtp_train.features.sources import RuntimeSource, load_hugging_face
from mtp_train.features.workbench import load_workbench
from mtp_train.features.writer import NonFiniteError
from mtp_train.run_dir import RunDirectory
from mtp_train.settings import load_config
from mtp_train.stages import run_data, run_precompute
from runtime.models.loader import fingerprint_target
from runtime.request import HiddenRows
from tests.unit.cli.byte_target import save_byte_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_target(tmp_path_factory.mktemp("target") / "model")


def make_config(root: Path, target: Path, **data: Any) -> Config:
    source = root / "prompts.jsonl"
    prompts = [f"question number {index}" for index in range(16)]
    if not source.exists():
        source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    regenerate = {"enabled": True, "max_tokens": 6, "capture_features": True}
    return load_config(
        {
            "run": {"name": "tiny", "root": str(root / "runs")},
            "target": {
                "path": str(target),
                "dtype": "float32",
                "device": "cpu",
                "cache_dir": str(root / "cache"),
            },
            "data": {
                "sources": [str(source)],
                "validation_share": 0.3,
                "max_tokens": 128,
                "regenerate": regenerate,
            }
            | data,
            "features": {
                "codec": "fp32",
                "shard_tokens": 150,
                "max_batch_tokens": 64,
                "p0_rows_per_sample": 3,
            },
            "runtime": {"num_threads": 1, "max_model_len": 256, "num_pages": 256},
        }
    )


def test_captured_features_are_those_of_the_model_and_leave_precompute_nothing_to_do(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, target)
    run = RunDirectory.from_config(config)
    assert run_data(config) == 0
    printed = capsys.readouterr().out
    assert "token set" in printed
    assert "generated" in printed  # the preview
    oracle = load_hugging_face(target, dtype=torch.float32, device=torch.device("cpu"))
    token_set = load_token_set(run.data)
    for split in ("train", "validation"):
        reader = FeatureReader(run.features / split)
        rows = {row.sample_id: row for row in token_set.rows(split)}
        assert rows
        assert set(reader.sample_ids) == set(rows)
        for index in range(len(reader)):
            sample = reader.get(index)
            row = rows[sample.sample_id]
            assert tuple(sample.input_ids.tolist()) == row.input_ids[:-1]
            assert tuple(sample.loss_mask.tolist()) == row.loss_mask[:-1]
            with torch.no_grad():
                states_TD = oracle.model(sample.input_ids[None]).last_hidden_state[0]
            torch.testing.assert_close(sample.hidden, states_TD, rtol=1e-4, atol=1e-4)

    assert run_precompute(config) == 0
    versions = json.loads(run.versions_file.read_text())
    recorded = versions["precompute"]["fingerprints"]
    inputs = token_set.fingerprint["inputs"]
    assert recorded == {
        "target": fingerprint_target(target, cache_dir=tmp_path / "cache"),
        "tokenizer": inputs["tokenizer"],
        "chat_template": inputs["chat_template"],
        "token_set": token_set.fingerprint["fingerprint"],
        "features_train": load_manifest(run.features / "train").fingerprint.digest(),
        "features_validation": load_manifest(run.features / "validation").fingerprint.digest(),
    }
    stored = load_manifest(run.features / "train").fingerprint
    assert (stored.tokenizer, stored.chat_template) == (
        inputs["tokenizer"],
        inputs["chat_template"],
    )
    assert versions["data"]["fingerprints"]["token_set"] == recorded["token_set"]
    finished = list(read_events(run.events_file, stage="precompute", event="split_finished"))
    assert [event["num_computed"] for event in finished] == [0, 0]


def test_a_stage_leaves_its_records_and_is_not_repeated(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, target)
    run = RunDirectory.from_config(config)
    run_data(config)
    files = {file: file.stat().st_mtime_ns for file in run.data.rglob("*.arrow")}
    versions = json.loads(run.versions_file.read_text())
    assert versions["data"]["packages"]["torch"] == torch.__version__
    assert "regenerate" in run.config_file.read_text()
    run_data(config)
    assert {file: file.stat().st_mtime_ns for file in run.data.rglob("*.arrow")} == files
    names = [(event["stage"], event["event"]) for event in read_events(run.events_file)]
    assert (
        names
        == [
            ("data", "stage_started"),
            ("data", "token_set"),
            ("data", "stage_finished"),
        ]
        * 2
    )
    recorded = run.config_file.read_text()
    attempts = stage_attempts(read_events(run.events_file))
    other = replace(config, data=replace(config.data, max_tokens=100))
    with pytest.raises(ValueError, match="max_tokens"):
        run_data(other)
    # A refused command leaves the records of the run as they were.
    assert run.config_file.read_text() == recorded
    assert stage_attempts(read_events(run.events_file)) == attempts


def test_a_capture_with_non_finite_states_is_refused(tmp_path: Path, target: Path) -> None:
    config = make_config(tmp_path, target)
    config = replace(config, features=replace(config.features, max_nonfinite_share=0.0))
    group = SingleProcessGroup(torch.device("cpu"))
    run_data(make_config(tmp_path, target, regenerate={"enabled": True, "max_tokens": 6}))
    row = next(load_token_set(RunDirectory.from_config(config).data).rows("train"))
    bench = load_workbench(config, target, group=group, max_len=128)
    assert isinstance(bench.source, RuntimeSource)
    hidden_TD = torch.full((len(row.input_ids) - 1, 32), torch.nan)
    states = HiddenRows("0", row.input_ids[:-1], hidden_TD)
    with (
        pytest.raises(NonFiniteError, match="1 of 1 samples"),
        open_capture(config, target, bench, group=group) as sink,
    ):
        sink(states, row, "train")


@pytest.mark.parametrize(
    ("stage", "validate_every", "placement", "is_long"),
    [
        ("validate", 0, "inline", True),
        ("train", 5, "subprocess", True),
        ("train", 0, "subprocess", False),
        ("train", 5, "inline", False),
    ],
)
def test_ranks_wait_long_only_where_the_leader_works_alone(
    stage: str,
    validate_every: int,
    placement: Any,
    is_long: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    def open_group(*, device: str, timeout_s: float) -> SingleProcessGroup:
        waits.append(timeout_s)
        raise ValueError("seen enough")

    monkeypatch.setattr("mtp_train.distributed.init_process_group", open_group)
    config = make_config(tmp_path, tmp_path)
    config = replace(
        config,
        trainer=replace(config.trainer, validate_every=validate_every),
        validate=replace(config.validate, placement=placement),
    )
    run = {"train": stages.run_train, "validate": stages.run_validate}[stage]
    with pytest.raises(ValueError, match="seen enough"):
        run(config)
    assert (waits[0] > 24 * 3600) == is_long
    assert waits[0] >= 1800


def test_an_empty_validation_split_is_refused_before_the_dump(tmp_path: Path, target: Path) -> None:
    answers = {"enabled": True, "max_tokens": 6}
    config = make_config(tmp_path, target, validation_share=0.0, regenerate=answers)
    assert run_data(config) == 0
    with pytest.raises(ValueError, match=r"larger data\.validation_share.*validate_every=0"):
        run_precompute(config)
    assert not RunDirectory.from_config(config).features.exists()
    without = replace(config, trainer=replace(config.trainer, validate_every=0))
    assert run_precompute(without) == 0


def test_a_directory_without_a_model_is_named(tmp_path: Path, target: Path) -> None:
    config = make_config(tmp_path, target)
    (tmp_path / "empty").mkdir()
    wrong = replace(config, target=replace(config.target, path=str(tmp_path / "empty")))
    with pytest.raises(ValueError, match=r"has no config\.json|config\.json is missing"):
        run_data(wrong)


@pytest.mark.parametrize("stage", ["data", "precompute", "train", "validate", "export"])
def test_stages_whose_figures_are_of_a_chain_refuse_a_tree(
    tmp_path: Path, target: Path, stage: str
) -> None:
    config = make_config(tmp_path, target)
    config = replace(config, runtime=replace(config.runtime, schedule="dynamic_tree"))
    with pytest.raises(ValueError, match=f"schedule=dynamic_tree: mtp {stage} works with a head"):
        getattr(stages, f"run_{stage}")(config)
    assert not RunDirectory.from_config(config).root.exists()
