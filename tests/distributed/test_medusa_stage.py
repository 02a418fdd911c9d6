"""A Medusa head under DeepSpeed, and its stage from features to acceptance."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mtp_train.config import HeadConfig, HeadNorms, LossConfig, TrainerConfig, ValidateConfig
from mtp_train.distributed import SingleProcessGroup
from mtp_train.events import read_events
from mtp_train.features.target import cache_directory
from mtp_train.precompute import run as precompute
from mtp_train.validate import p2, p3
from mtp_train.validate.subject import Subject
from runtime.head_spec import load_head
from tests.distributed.test_train_stage import save_tokens
from tests.distributed.trainer_worker import Job, run_jobs, run_stage
from tests.unit.features.targets import make_config, save_target
from tests.unit.runtime.model_fixtures import random_ids
from tests.unit.validate.subjects import RUNTIME

LOSS = {"hidden_weight": 0.0, "num_unroll_steps": 3, "step_decay": 0.8}


@pytest.mark.parametrize("kind", ["medusa", "medusa_own"])
def test_every_zero_stage_and_world_size_trains_the_same_blocks(kind, tmp_path):
    outcomes = {}
    for world, stages in ((1, (0, 3)), (2, (1, 3))):
        variants = [(stage, {}) for stage in stages]
        if world == 2:
            variants.append((1, {"sequence_parallel": 2}))
        jobs = [
            Job(
                str(tmp_path),
                f"s{stage}w{world}{''.join(more)}",
                zero_stage=stage,
                trainer={"max_steps": 4, **more},
                loss=LOSS,
                kind=kind,
            )
            for stage, more in variants
        ]
        done = run_jobs(jobs, world_size=world, scratch=tmp_path / f"scratch{world}")
        for job, outcome in zip(jobs, done, strict=True):
            assert "error" not in outcome, outcome.get("trace")
            outcomes[job.name] = outcome["tensors"]
    reference = outcomes.pop("s0w1")
    assert len(outcomes) == 4
    for name, tensors in outcomes.items():
        assert set(tensors) == set(reference)
        for key, tensor in tensors.items():
            wanted = reference[key]
            torch.testing.assert_close(tensor, wanted, rtol=1e-3, atol=2e-5, msg=f"{name} {key}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("stage")
    target = save_target(root / "target")
    save_tokens(root / "data")
    config = dataclasses.replace(
        make_config(root, target, root / "data"),
        head=HeadConfig(
            kind="medusa",
            num_blocks=2,
            num_layers=0,
            init="zero",
            recycle="pre_norm",
            first_embedding_mask=False,
            projection_bias=True,
            norms=HeadNorms(
                enorm=False, hnorm=False, input=False, post_attention=False, final=False
            ),
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
        loss=LossConfig(hidden_weight=0.0, num_unroll_steps=2, step_decay=0.8),
    )
    precompute(config, group=SingleProcessGroup(torch.device("cpu")))
    return config, root / "test", run_stage(config, scratch=root)


def test_a_run_leaves_a_head_all_of_whose_blocks_have_moved(trained):
    _, run, (first, again) = trained
    spec, tensors = load_head(run / "head")
    assert (spec.kind, spec.num_blocks, spec.num_layers) == ("medusa", 2, 0)
    assert all(bool(tensor.any()) for tensor in tensors.values())  # they started at zero
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
    assert p2.check(subject, sequences, k=2).passed
    result = p3.check(subject, sequences, k=2, max_tokens=12, min_drafts=1)
    assert result.figures["float32_steps_that_differ"] == 0
