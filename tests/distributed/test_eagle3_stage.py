"""A head with its own ``lm_head`` under DeepSpeed, and its stage from features to acceptance."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mtp_train.config import HeadConfig, LossConfig, TrainerConfig, ValidateConfig
from mtp_train.distributed import SingleProcessGroup
from mtp_train.events import read_events
from mtp_train.features.target import cache_directory
from mtp_train.precompute import run as precompute
from mtp_train.trainer import open_inputs
from mtp_train.validate import p2, p3
from mtp_train.validate.subject import Subject
from runtime.head_spec import load_head
from tests.distributed.test_train_stage import save_tokens
from tests.distributed.trainer_worker import Job, run_jobs, run_stage
from tests.unit.features.targets import make_config, save_target
from tests.unit.runtime.model_fixtures import random_ids
from tests.unit.validate.subjects import RUNTIME

LOSS = {"hidden_weight": 0.0}
SLOW_START = {"trainer": {"max_steps": 4}, "loss": LOSS, "kind": "eagle3"}


def test_every_zero_stage_and_world_size_trains_the_same_lm_head(tmp_path):
    outcomes = {}
    for world, stages in ((1, (0, 3)), (2, (1, 3))):
        jobs = [Job(str(tmp_path), f"s{s}w{world}", zero_stage=s, **SLOW_START) for s in stages]
        done = run_jobs(jobs, world_size=world, scratch=tmp_path / f"scratch{world}")
        for job, outcome in zip(jobs, done, strict=True):
            assert "error" not in outcome, outcome.get("trace")
            outcomes[job.name] = outcome["tensors"]
    reference = outcomes.pop("s0w1")
    assert reference["draft_vocab_ids"].tolist() == [3 * i for i in range(12)]
    for name, tensors in outcomes.items():
        assert set(tensors) == set(reference)
        for key, tensor in tensors.items():
            wanted = reference[key]
            torch.testing.assert_close(tensor, wanted, rtol=1e-3, atol=2e-5, msg=f"{name} {key}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("stage")
    target = save_target(root / "target", num_hidden_layers=5)
    save_tokens(root / "data")
    config = dataclasses.replace(
        make_config(root, target, root / "data"),
        head=HeadConfig(
            kind="eagle3",
            layer_ids=(1, 3),
            recycle="pre_norm",
            first_embedding_mask=False,
            norms=dataclasses.replace(HeadConfig().norms, input=False),
            draft_vocab_size=40,
        ),
        trainer=TrainerConfig(
            epochs=2,
            tokens_per_step=60,
            validate_every=2,
            log_every=1,
            dtype="float32",
            wandb="disabled",
        ),
        validate=ValidateConfig(k=2, num_prompts=2, max_tokens=6),
        loss=LossConfig(hidden_weight=0.0, num_unroll_steps=2),
    )
    precompute(config, group=SingleProcessGroup(torch.device("cpu")))
    return config, root / "test", run_stage(config, scratch=root)


def test_a_run_leaves_a_head_with_its_vocabulary_and_a_trained_lm_head(trained):
    config, run, (first, again) = trained
    spec, tensors = load_head(run / "head")
    assert (spec.layer_ids, spec.draft_vocab.size) == ((1, 3), 40)
    assert 0.4 < spec.draft_vocab.coverage <= 1.0
    inputs, _ = open_inputs(config, group=SingleProcessGroup(torch.device("cpu")))
    assert torch.equal(tensors["draft_vocab_ids"], inputs.initial["draft_vocab_ids"])
    start = inputs.lm_head_VD[tensors["draft_vocab_ids"]]
    assert torch.equal(inputs.initial["lm_head.weight"], start)
    for name, tensor in tensors.items():
        if name != "draft_vocab_ids":
            assert not torch.equal(tensor, inputs.initial[name]), name
    losses = [e["loss"] for e in read_events(run / "events.jsonl", event="validation")]
    assert all(isinstance(loss, float) for loss in losses)
    assert again.best == first.best  # a finished run is left alone


def test_the_trained_head_is_its_runtimes_twin(trained):
    config, run, _ = trained
    subject = Subject(
        target_path=config.target.path,
        head_path=run / "head",
        runtime_dtype=torch.float32,
        engine_config=RUNTIME,
        cache_dir=cache_directory(config.target),
    )
    sequences = [random_ids(n, seed=n) for n in (30, 12)]
    assert p2.check(subject, sequences, k=3).passed
    result = p3.check(subject, sequences, k=2, max_tokens=12, min_drafts=1)
    assert result.figures["float32_steps_that_differ"] == 0


def test_features_without_its_streams_are_refused(trained):
    config, run, _ = trained
    other = dataclasses.replace(
        config,
        head=dataclasses.replace(config.head, layer_ids=(2, 3)),
        features=dataclasses.replace(config.features, path=str(run / "features")),
    )
    with pytest.raises(
        ValueError, match=r"residual streams of layers \[1, 3\], the head reads \[2"
    ):
        open_inputs(other, group=SingleProcessGroup(torch.device("cpu")))


def test_a_head_of_g_alone_trains_from_the_same_store(trained):
    config, run, _ = trained
    plain = dataclasses.replace(
        config,
        head=HeadConfig(),
        features=dataclasses.replace(config.features, path=str(run / "features")),
    )
    inputs, _ = open_inputs(plain, group=SingleProcessGroup(torch.device("cpu")))
    assert inputs.samples.get(0).layers is None
