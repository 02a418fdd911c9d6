"""`mtp_train.trainer.run`: features, target, and validation through the runtime."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from data_prep.ids import hash_token_ids
from data_prep.token_set import load_token_set
from mtp_train.app import dump_config
from mtp_train.config import HeadConfig, LossConfig, TrainerConfig, ValidateConfig
from mtp_train.distributed import SingleProcessGroup
from mtp_train.errors import StageRefusedError
from mtp_train.events import read_events
from mtp_train.features.target import cache_directory
from mtp_train.precompute import run as precompute
from mtp_train.run_dir import RunDirectory
from mtp_train.trainer import frequent_answer_ids, open_inputs
from mtp_train.trainer import run as run_training
from mtp_train.validate import p2
from mtp_train.validate.in_subprocess import SubprocessValidator, validate_directory
from mtp_train.validate.subject import Subject
from runtime.head_spec import load_head, save_head
from runtime.layer_parts import LayerParts
from runtime.models.loader import load_target
from tests.distributed.trainer_worker import run_stage
from tests.unit.features.targets import make_config, save_target
from tests.unit.runtime.model_fixtures import SMALL


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
    content = {"train": "t" * 64, "validation": "v" * 64}
    inputs = {"tokenizer": "tokenizer", "chat_template": "template"}
    fingerprint = {"version": 1, "inputs": inputs, "fingerprint": "tokens", "content": content}
    (path / "fingerprint.json").write_text(json.dumps(fingerprint))


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


@pytest.mark.parametrize(
    ("family", "parts"),
    [("qwen2", LayerParts(qkv_bias=True)), ("qwen3", LayerParts(qk_norm=True))],
)
def test_a_head_for_another_family_starts_as_its_last_layer_and_passes_p2(family, parts, tmp_path):
    target = save_target(tmp_path / "target", family=family)
    save_tokens(tmp_path / "data")
    config = dataclasses.replace(
        make_config(tmp_path, target, tmp_path / "data"),
        head=HeadConfig(init="last_layer"),
        trainer=TrainerConfig(
            epochs=2, tokens_per_step=60, validate_every=4, learning_rate=1e-2, dtype="float32"
        ),
        validate=ValidateConfig(k=2, num_prompts=2, max_tokens=6),
    )
    group = SingleProcessGroup(torch.device("cpu"))
    precompute(config, group=group)
    initial = open_inputs(config, group=group)[0].initial
    run_stage(config, scratch=tmp_path)
    spec, tensors = load_head(tmp_path / "test" / "head")
    assert spec.layer_parts == parts
    stored = load_file(target / "model.safetensors")
    added = [name for name in tensors if ".bias" in name or "q_norm" in name or "k_norm" in name]
    assert len(added) == (3 if parts.qkv_bias else 2)
    for name in added:
        assert torch.equal(initial[name], stored[f"model.{name.replace('s.0.', 's.1.')}"])
        assert (tensors[name] - initial[name]).abs().max() > 1e-4, f"{name} was not trained"
    subject = Subject(target, tmp_path / "test" / "head", torch.float32, config.runtime)
    sequences = [list(row["input_ids"]) for row in load_token_set(tmp_path / "data").train]
    assert p2.check(subject, sequences[-3:], k=2).passed


def test_a_finished_run_is_left_alone(trained):
    _, run, (first, second) = trained
    assert (second.steps, second.best, second.head_dir) == (first.steps, first.best, first.head_dir)
    assert second.final is None
    assert len(list(read_events(run / "events.jsonl", event="start"))) == 1


def test_another_run_over_the_store_takes_the_targets_normalisers_from_it(trained):
    config, _, _ = trained
    group = SingleProcessGroup(torch.device("cpu"))
    inputs, _ = open_inputs(dataclasses.replace(config, seed=7), group=group)
    assert sorted(inputs.normalisers) == list(range(12))
    for index, values_T in inputs.normalisers.items():
        sample = inputs.samples.get(index, dtype=torch.float32)
        rows = sample.loss_mask[2:].nonzero()[:, 0] + 1
        assert torch.equal(values_T.isfinite().nonzero()[:, 0], rows)
        wanted = torch.logsumexp(sample.hidden[rows] @ inputs.lm_head_VD.t(), -1)
        torch.testing.assert_close(values_T[rows], wanted)
    chunked = dataclasses.replace(config, loss=dataclasses.replace(config.loss, row_chunk=7))
    assert open_inputs(chunked, group=group)[0].normalisers == {}
    full = dataclasses.replace(config, loss=LossConfig())
    assert open_inputs(full, group=group)[0].normalisers == {}


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
    assert not (run / "validation").exists(), "the head handed over is left behind"


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
    ids = np.array([7, 7, 7, 1, 1, 2, 3])
    rows = [(ids, np.array([False, False, False, True, True, True, True]))]
    assert frequent_answer_ids(rows, size=2, vocab_size=9).tolist() == [1, 2]
    with pytest.raises(ValueError, match="sub_vocab_size=9"):
        frequent_answer_ids(rows, size=9, vocab_size=9)


def take_tokens(config, path, *, train):
    """A token set with some of the rows of ``config``'s."""
    whole = load_token_set(config.data.path)
    whole.train.select(train).save_to_disk(str(path / "train"))
    whole.validation.save_to_disk(str(path / "validation"))
    fingerprint = {"version": 1, "content": {"train": str(train), "validation": "v" * 64}}
    (path / "fingerprint.json").write_text(json.dumps(fingerprint))
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=str(path)),
        features=dataclasses.replace(
            config.features, path=str(RunDirectory.from_config(config).features)
        ),
        trainer=dataclasses.replace(config.trainer, validate_every=0),
    )


def test_only_samples_of_the_train_split_are_trained_on(trained, tmp_path):
    config, _, _ = trained
    group = SingleProcessGroup(torch.device("cpu"))
    some = take_tokens(config, tmp_path, train=[1, 3, 4, 3])
    inputs, _ = open_inputs(some, group=group)
    rows = load_token_set(tmp_path).train
    assert list(inputs.samples.sample_ids) == sorted(set(rows["sample_id"]))
    assert inputs.fingerprint["tokens"] == {"train": "[1, 3, 4, 3]"}
    answers = {
        token
        for index in range(len(inputs.samples))
        for token in (lambda s: s.input_ids[s.loss_mask].tolist())(
            inputs.samples.get(index, dtype=torch.float32)
        )
    }
    rare = dataclasses.replace(some, loss=LossConfig(sub_vocab_size=len(answers)))
    kept = open_inputs(rare, group=group)[0].kept_ids
    assert set(kept.tolist()) == answers, "ids are counted over other rows than those trained on"


def test_a_row_without_features_is_refused_unless_it_was_quarantined(trained, tmp_path):
    config, _, _ = trained
    group = SingleProcessGroup(torch.device("cpu"))
    some = take_tokens(config, tmp_path / "data", train=[0, 1, 2])
    store = RunDirectory.from_config(some).features / "train"
    lost = load_token_set(some.data.path).train["sample_id"][1]
    shutil.copytree(store, tmp_path / "features" / "train")
    file = tmp_path / "features" / "train" / "manifest.json"
    raw = json.loads(file.read_text())
    for shard in raw["shards"]:
        if lost in shard["sample_ids"]:
            shard["sample_ids"][shard["sample_ids"].index(lost)] = "0" * 32
    file.write_text(json.dumps(raw))
    holed = dataclasses.replace(
        some, features=dataclasses.replace(some.features, path=str(tmp_path / "features"))
    )
    with pytest.raises(ValueError, match=f"1 of 3 .*{lost}.*mtp precompute"):
        open_inputs(holed, group=group)
    bad = {"sample_id": lost, "num_rows": 9, "num_bad_rows": 1}
    raw["shards"][0]["quarantined"].append(bad)
    file.write_text(json.dumps(raw))
    assert len(open_inputs(holed, group=group)[0].samples) == 2


@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_validation_measures_in_the_served_dtype(trained, served, caplog):
    config, _, _ = trained
    other = dataclasses.replace(config, target=dataclasses.replace(config.target, dtype=served))
    with caplog.at_level(logging.INFO):
        inputs, validator = open_inputs(other, group=SingleProcessGroup(torch.device("cpu")))
    assert inputs.embedding_VD.dtype == inputs.lm_head_VD.dtype == torch.float32
    model = validator._target.model
    assert model.embedding_VD.dtype == getattr(torch, served)
    assert (model.embedding_VD is inputs.embedding_VD) == (served == "float32")
    assert ("bytes for an embedding" in caplog.text) == (served == "bfloat16")


def test_a_subprocess_validates_in_the_served_dtype(trained, tmp_path):
    config, run, _ = trained
    group = SingleProcessGroup(torch.device("cpu"))
    other = dataclasses.replace(config, target=dataclasses.replace(config.target, dtype="bfloat16"))
    spec, tensors = load_head(run / "head")
    save_head(tmp_path, spec, tensors)
    (tmp_path / "settings.yaml").write_text(dump_config(other))
    _, inline = open_inputs(other, group=group)
    _, full = open_inputs(config, group=group)
    want = inline(1, spec, tensors).loss
    assert validate_directory(tmp_path, 1).loss == pytest.approx(want, rel=1e-5)
    assert want != pytest.approx(full(1, spec, tensors).loss, rel=1e-5)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("validate", "k", 3),
        ("validate", "num_prompts", 1),
        ("validate", "max_tokens", 7),
        ("validate", "temperature", 0.5),
        ("runtime", "verify", "greedy"),
    ],
)
def test_a_run_that_chose_its_best_head_by_another_measure_is_refused(
    trained, section, field, value
):
    config, _, _ = trained
    changed = dataclasses.replace(getattr(config, section), **{field: value})
    other = dataclasses.replace(config, **{section: changed})
    with pytest.raises(ValueError, match=rf"{section}\.{field} was .*, is"):
        run_training(other, group=SingleProcessGroup(torch.device("cpu")))


def test_another_validation_split_is_refused(trained, tmp_path):
    config, _, _ = trained
    shutil.copytree(config.data.path, tmp_path / "data")
    content = {"train": "t" * 64, "validation": "w" * 64}
    file = tmp_path / "data" / "fingerprint.json"
    file.write_text(json.dumps({"version": 1, "inputs": {}, "content": content}))
    other = dataclasses.replace(
        config, data=dataclasses.replace(config.data, path=str(tmp_path / "data"))
    )
    with pytest.raises(ValueError, match=r"tokens\.validation was"):
        run_training(other, group=SingleProcessGroup(torch.device("cpu")))


def test_training_goes_on_from_a_head(trained, tmp_path, caplog):
    config, run, _ = trained
    group = SingleProcessGroup(torch.device("cpu"))
    spec, tensors = load_head(run / "head")

    def start_from(path, **changes):
        head = dataclasses.replace(config.head, init=str(path), **changes)
        return open_inputs(dataclasses.replace(config, head=head), group=group)[0]

    inputs = start_from(run / "head")
    assert all(torch.equal(tensors[name].float(), inputs.initial[name]) for name in tensors)
    save_head(tmp_path / "other", dataclasses.replace(spec, target_fingerprint="0" * 64), tensors)
    assert start_from(tmp_path / "other").spec.target_fingerprint == spec.target_fingerprint
    assert "trained for another target" in caplog.text
    bumped = {name: tensor + 1 for name, tensor in tensors.items()}
    save_head(tmp_path / "bumped", spec, bumped)
    assert start_from(tmp_path / "bumped").fingerprint != inputs.fingerprint
    with pytest.raises(ValueError, match=r"head\.init=.*num_layers=1, not 2"):
        start_from(run / "head", num_layers=2)
