"""`mtp_train.trainer.run`: features, target, and validation through the runtime."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from datasets import Dataset

from data_prep.ids import hash_token_ids
from mtp_train.config import LossConfig, TrainerConfig, ValidateConfig
from mtp_train.distributed import SingleProcessGroup
from mtp_train.errors import StageRefusedError
from mtp_train.events import read_events
from mtp_train.features.target import cache_directory
from mtp_train.precompute import run as precompute
from mtp_train.trainer import frequent_answer_ids, open_inputs
from mtp_train.validate.in_subprocess import SubprocessValidator
from runtime.head_spec import load_head
from runtime.models.loader import load_target
from tests.distributed.trainer_worker import run_stage
from tests.unit.features.targets import make_config, save_target
from tests.unit.runtime.model_fixtures import SMALL
from tests.unit.trainer.reference import TinySample


def save_tokens(path):
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("validation", 3)):
        rows = []
        for index in range(count):
            ids = torch.randint(3, SMALL["vocab_size"], (12 + index,), generator=generator).tolist()
            rows.append(
                {
                    "sample_id": hash_token_ids(ids),
                    "conversation_id": f"{split}{index}",
                    "source": "test",
                    "input_ids": ids,
                    "loss_mask": [position >= 4 for position in range(len(ids))],
                    "cut_off": False,
                }
            )
        Dataset.from_list(rows).save_to_disk(str(path / split))
    (path / "fingerprint.json").write_text(json.dumps({"version": 1, "inputs": {}, "content": "x"}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("stage")
    target = save_target(root / "target")
    save_tokens(root / "data")
    config = dataclasses.replace(
        make_config(root, target, root / "data"),
        trainer=TrainerConfig(
            epochs=2,
            tokens_per_step=60,
            validate_every=2,
            log_every=1,
            dtype="float32",
            wandb="offline",
        ),
        validate=ValidateConfig(k=2, num_prompts=2, max_tokens=6),
        loss=LossConfig(sub_vocab_size=40),
    )
    precompute(config, group=SingleProcessGroup(torch.device("cpu")))
    return config, root / "test", run_stage(config, scratch=root)


def test_a_run_leaves_the_best_head_measured_in_the_runtime(trained):
    config, run, (report, _) = trained
    validations = list(read_events(run / "events.jsonl", event="validation"))
    assert len(validations) >= 3
    best = max(validations, key=lambda e: (e["tau"], -e["loss"]))
    assert report.best.step == best["step"]
    spec, tensors = load_head(run / "head")
    target = load_target(
        config.target.path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        cache_dir=cache_directory(config.target),
    )
    assert spec.target_fingerprint == target.fingerprint
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    steps = [e["step"] for e in read_events(run / "events.jsonl", event="step")]
    assert steps == list(range(1, report.steps + 1))
    assert any((run / "tensorboard").iterdir())
    assert any((run / "wandb").glob("offline-run-*"))


def test_a_finished_run_is_left_alone(trained):
    _, run, (first, second) = trained
    assert (second.steps, second.best, second.head_dir) == (first.steps, first.best, first.head_dir)
    assert second.final is None
    assert len(list(read_events(run / "events.jsonl", event="start"))) == 1


def test_training_starts_from_the_targets_own_storage_and_the_chosen_head(trained):
    config, _, _ = trained
    inputs, validator = open_inputs(config, group=SingleProcessGroup(torch.device("cpu")))
    assert inputs.embedding_VD is validator._target.model.embedding_VD
    assert inputs.kept_ids.numel() == 40
    assert inputs.spec.hidden_size == SMALL["hidden_size"]


def test_validation_in_a_subprocess_gives_the_inline_figures(trained, monkeypatch):
    config, run, _ = trained
    group = SingleProcessGroup(torch.device("cpu"))
    _, inline = open_inputs(config, group=group)
    apart = dataclasses.replace(
        config, validate=dataclasses.replace(config.validate, placement="subprocess")
    )
    _, subprocess = open_inputs(apart, group=group)
    spec, tensors = load_head(run / "head")
    monkeypatch.setenv("RANK", "0")  # what torchrun leaves must not reach the process
    monkeypatch.setenv("WORLD_SIZE", "2")
    want, got = inline(7, spec, tensors), subprocess(7, spec, tensors)
    assert got.wall_s > 0
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    for name in ("step", "tau", "rates", "num_drafts", "num_loss_rows", "num_prompts"):
        assert getattr(got, name) == getattr(want, name)
    assert not any((run / "validation").iterdir()), "the head handed over is left behind"


def test_a_failing_validation_process_is_told_with_its_last_words(trained):
    config, run, _ = trained
    broken = dataclasses.replace(
        config,
        target=dataclasses.replace(config.target, path="/nowhere"),
        validate=dataclasses.replace(config.validate, placement="subprocess"),
    )
    validator = SubprocessValidator(broken, group=SingleProcessGroup(torch.device("cpu")))
    spec, tensors = load_head(run / "head")
    with pytest.raises(StageRefusedError, match=r"(?s)step 3 failed in its process.*/nowhere"):
        validator(3, spec, tensors)


def test_features_of_another_target_are_refused(trained, tmp_path):
    config, run, _ = trained
    other = save_target(tmp_path / "other", seed=5)
    moved = dataclasses.replace(
        config,
        target=dataclasses.replace(config.target, path=str(other)),
        features=dataclasses.replace(config.features, path=str(run / "features")),
    )
    with pytest.raises(ValueError, match="made with a target whose fingerprint"):
        open_inputs(moved, group=SingleProcessGroup(torch.device("cpu")))


def test_the_sub_vocabulary_is_what_answers_use_most():
    class Store:
        sample = TinySample(
            torch.tensor([7, 7, 7, 1, 1, 2, 3]),
            torch.tensor([False, False, False, True, True, True, True]),
            torch.zeros(7, 2),
        )

        def __len__(self):
            return 1

        def get(self, index, *, dtype):
            return self.sample

    assert frequent_answer_ids(Store(), size=2, vocab_size=9).tolist() == [1, 2]
    with pytest.raises(ValueError, match="sub_vocab_size=9"):
        frequent_answer_ids(Store(), size=9, vocab_size=9)
