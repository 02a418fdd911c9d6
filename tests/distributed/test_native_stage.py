"""A target's own MTP weights through the stages: measured, trained on, exported, in a copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.token_set import load_token_set
from mtp_train.config import (
    Config,
    DeepSpeedConfig,
    ExportConfig,
    HeadConfig,
    TrainerConfig,
    ValidateConfig,
)
from mtp_train.distributed import SingleProcessGroup
from mtp_train.export import stage
from mtp_train.native.reader import keep_native_head, read_native_head
from mtp_train.precompute import run as precompute
from mtp_train.run_dir import RunDirectory, read_json
from mtp_train.trainer import open_inputs
from mtp_train.validate import ladder, p2, run
from mtp_train.validate.prompt_sets import PromptSet
from mtp_train.validate.subject import Subject
from runtime.head_spec import load_head
from runtime.models.loader import load_target
from tests.distributed.test_train_stage import save_tokens
from tests.distributed.trainer_worker import run_stage
from tests.unit.features.targets import make_config, save_tokenizer
from tests.unit.native.checkpoints import save_deepseek
from tests.unit.runtime.model_fixtures import SMALL, random_ids, save_model

CPU = torch.device("cpu")
GROUP = SingleProcessGroup(CPU)
BIAS = "layers.0.mlp.gate.e_score_correction_bias"


def make_place(path: Path, **trainer: Any) -> Config:
    save_deepseek(path / "target", vocab_size=SMALL["vocab_size"])
    save_tokenizer(path / "target")
    save_tokens(path / "data")
    config = dataclasses.replace(
        make_config(path, path / "target", path / "data"),
        head=HeadConfig(init="native"),
        trainer=TrainerConfig(
            epochs=1, tokens_per_step=60, validate_every=4, learning_rate=1e-2, **trainer
        ),
        validate=ValidateConfig(k=2, num_prompts=2, max_tokens=6),
    )
    precompute(config, group=GROUP)
    return config


@pytest.mark.parametrize(("dtype", "zero_stage"), [("float32", 1), ("bfloat16", 3)])
def test_training_goes_on_from_the_targets_own_weights_and_a_copy_holds_the_result(
    dtype: Any, zero_stage: Any, tmp_path: Path
) -> None:
    config = make_place(tmp_path, dtype=dtype)
    config = dataclasses.replace(config, deepspeed=DeepSpeedConfig(zero_stage=zero_stage))
    own = read_native_head(tmp_path / "target", fingerprint="").tensors
    initial = open_inputs(config, group=GROUP)[0].initial
    assert all(torch.equal(initial[name], own[name].float()) for name in own)
    run_stage(config, scratch=tmp_path)
    run_dir = RunDirectory.from_config(config)
    spec, tensors = load_head(run_dir.head)
    assert spec.experts is not None
    assert torch.equal(tensors[BIAS], own[BIAS])  # fp32 and untrained in either dtype
    for name in own:
        moved = float((tensors[name].float() - own[name]).abs().max())
        assert (moved > 1e-4) == (name != BIAS), name
    subject = Subject(tmp_path / "target", run_dir.head, torch.float32, config.runtime)
    sequences = [list(row["input_ids"]) for row in load_token_set(tmp_path / "data").train][-3:]
    assert p2.check(subject, sequences, k=2).passed
    export = ExportConfig(format="deepseek", unvalidated=True, copy_to=str(tmp_path / "copy"))
    outcome = stage.run(dataclasses.replace(config, export=export), group=GROUP)
    assert outcome.read_back is not None
    assert "the target with the head as its own MTP weights" in stage.describe(
        outcome, dataclasses.replace(config, export=export)
    )
    target = load_target(tmp_path / "copy", dtype=torch.float32, device=CPU, cache_dir=tmp_path)
    copied = read_native_head(tmp_path / "copy", fingerprint=target.fingerprint)
    assert all(torch.equal(copied.tensors[name], tensors[name]) for name in tensors)


def fake_sets(config: Config, subject: Subject) -> list[PromptSet]:
    prompts = [random_ids(n, seed=n, vocab_size=SMALL["vocab_size"]) for n in (5, 9, 14, 20)]
    return [PromptSet("random", tuple(map(tuple, prompts)), decode=str)]


def test_the_targets_own_weights_are_measured_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    save_deepseek(tmp_path / "target", vocab_size=SMALL["vocab_size"])
    save_tokenizer(tmp_path / "target")
    config = dataclasses.replace(
        make_config(tmp_path, tmp_path / "target", tmp_path / "data"),
        validate=ValidateConfig(head="native", k=2, max_tokens=12, rungs=("P1", "P2", "P3")),
    )
    place = keep_native_head(config)
    assert place == RunDirectory.from_config(config).head
    written = (place / "model.safetensors").stat().st_mtime_ns
    report = run(config, group=GROUP)
    assert [(rung.name, rung.passed) for rung in report.rungs] == [
        ("P1", True),
        ("P2", True),
        ("P3", True),
    ]
    assert [row["k"] for row in read_json(place / "parity.json")["acceptance"]] == [1, 2, 3]
    assert keep_native_head(config) == place
    assert (place / "model.safetensors").stat().st_mtime_ns == written


def test_a_base_checkpoint_is_told_from_a_head_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_deepseek(tmp_path / "base", vocab_size=SMALL["vocab_size"])
    save_model(tmp_path / "target", "deepseekv3", rms_norm_eps=1e-6)
    save_tokenizer(tmp_path / "target")
    save_tokens(tmp_path / "data")
    config = dataclasses.replace(
        make_config(tmp_path, tmp_path / "target", tmp_path / "data"),
        head=HeadConfig(init=str(tmp_path / "base")),
        trainer=TrainerConfig(validate_every=0, dtype="float32"),
    )
    precompute(config, group=GROUP)
    inputs, _ = open_inputs(config, group=GROUP)
    own = read_native_head(tmp_path / "base", fingerprint="").tensors
    assert all(torch.equal(inputs.initial[name], own[name]) for name in own)
    assert len(inputs.fingerprint["initial_weights"]) == 64
    messages: Sequence[str] = [record.getMessage() for record in caplog.records]
    assert any("embedding 0.00e+00, lm head 0.00e+00" in message for message in messages)
