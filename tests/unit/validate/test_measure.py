"""Acceptance measurement and validation during training, against hand counts and the trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from data_prep.config import DataConfig
from mtp_train.config import Config, LossConfig, RunConfig, TargetConfig, ValidateConfig
from mtp_train.distributed import SingleProcessGroup
from mtp_train.heads import build_training_head
from mtp_train.losses import head_loss
from mtp_train.packing import pack
from mtp_train.validate import in_training
from mtp_train.validate.bootstrap import prompt_interval
from mtp_train.validate.in_training import RuntimeValidator, ValidationRow, choose_prompts
from mtp_train.validate.measure import measure_acceptance
from runtime.config import EngineConfig
from runtime.head_spec import HeadSpec
from runtime.models.loader import Target
from runtime.request import Request, SamplingParams
from tests.unit.runtime.engine_fixtures import (
    EOS,
    VOCAB,
    head_spec,
    make_engine,
    random_head,
    random_head_tensors,
    tiny_target,
)
from tests.unit.runtime.model_fixtures import random_ids

RUNTIME = EngineConfig(max_batch_tokens=64, max_running=4, num_pages=256)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


def make_rows(count: int = 7) -> list[ValidationRow]:
    rows = []
    for index in range(count):
        ids = random_ids(9 + 3 * index, seed=index, vocab_size=VOCAB)
        prompt = 2 + index
        rows.append(ValidationRow(tuple(ids), tuple(i >= prompt for i in range(len(ids)))))
    return rows


def make_config(**validate: Any) -> Config:
    return Config(
        run=RunConfig("test"),
        target=TargetConfig("nowhere"),
        data=DataConfig(),
        loss=LossConfig(hidden_weight=0.3, logit_weight=0.7),
        runtime=RUNTIME,
        validate=ValidateConfig(**{"k": 2, "num_prompts": 5, "max_tokens": 12, **validate}),
    )


def test_measured_acceptance_equals_a_hand_count_of_the_steps(target: Target) -> None:
    prompts = [random_ids(length, seed=length, vocab_size=VOCAB) for length in (3, 20, 9, 1, 14, 7)]
    measured = measure_acceptance(
        target,
        random_head(target),
        prompts,
        k=2,
        max_tokens=25,
        temperature=0.0,
        engine_config=RUNTIME,
        prompt_set="random",
    )
    steps = [step for generation in measured.generations for step in generation.steps]
    assert measured.acceptance.num_drafts == len(steps)
    assert measured.acceptance.num_clipped == 0
    assert all(generation.steps[0].start == 1 for generation in measured.generations)
    assert all(
        sum(1 + step.num_accepted for step in g.steps) + 1 >= len(g.output_ids)
        for g in measured.generations
    ), "a token was decoded without drafting"
    assert measured.acceptance.tau == 1 + sum(s.num_accepted for s in steps) / len(steps)
    assert measured.tau_interval.low <= measured.acceptance.tau <= measured.tau_interval.high
    assert measured.tau_interval.low < measured.tau_interval.high
    plain = make_engine(target).generate(
        [Request(str(i), tuple(p), SamplingParams(max_tokens=25)) for i, p in enumerate(prompts)]
    )
    assert [g.output_ids for g in measured.generations] == [g.output_ids for g in plain]


def test_measuring_without_prompts_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="prompts: none"):
        measure_acceptance(
            target,
            random_head(target),
            [],
            k=1,
            max_tokens=4,
            temperature=0.0,
            engine_config=RUNTIME,
            prompt_set="none",
        )


def test_the_interval_resamples_prompts_not_tokens() -> None:
    """Prompts that accept all or nothing give a wide interval however many drafts they have."""

    def rate(sums: np.ndarray) -> np.ndarray:
        return sums[:, 1] / sums[:, 0]

    clustered = np.array([[1000, 1000], [1000, 0]] * 5)
    spread = np.array([[1000, 500]] * 10)
    wide, narrow = prompt_interval(clustered, rate), prompt_interval(spread, rate)
    assert wide.high - wide.low > 0.4
    assert narrow.high - narrow.low < 1e-12
    binomial_sd = np.sqrt(0.25 / 10)
    assert abs((wide.high - wide.low) - 2 * 1.96 * binomial_sd) < 0.15


@pytest.mark.parametrize("recycle", ["post_norm", "pre_norm"])
def test_validation_loss_is_the_trainers_loss_on_the_same_rows(
    target: Target, recycle: str
) -> None:
    config, rows = make_config(), make_rows()
    spec = head_spec(target, recycle=recycle)
    tensors = random_head_tensors(spec)
    group = SingleProcessGroup(torch.device("cpu"))
    result = RuntimeValidator(target, config, rows, group)(7, spec, tensors)

    head = build_training_head(spec, dtype=torch.float32)
    head.load_tensors(tensors)
    samples = [
        in_training._RuntimeSample(
            torch.tensor(rows[int(states.key)].input_ids),
            torch.tensor(rows[int(states.key)].loss_mask),
            states.hidden_TD.clone(),
        )
        for states in make_engine(target).forward_hidden([row.input_ids for row in rows])
    ]
    batch = pack(samples, num_steps=1)
    parts = head_loss(
        [state.detach() for state in head(batch, target.model.embedding_VD.clone())],
        batch,
        target.model.lm_head.dense_weight().clone(),
        config=config.loss,
    )
    weight = batch.num_active[0]
    assert result.num_loss_rows == weight
    assert result.loss == pytest.approx(float(parts.total) / weight, rel=1e-5)
    assert result.loss_hidden == pytest.approx(float(parts.hidden) / weight, rel=1e-5)
    assert result.loss_logit == pytest.approx(float(parts.logit) / weight, rel=1e-5)
    assert (result.step, result.k, result.num_prompts) == (7, 2, 5)


class FakeRank(SingleProcessGroup):
    """One of several ranks run one after the other: remembers what it contributed."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.world_size = rank, world_size
        self.sent: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor, *, op: Any = "sum") -> torch.Tensor:
        self.sent.append(tensor.clone())
        return tensor


@pytest.mark.parametrize("world_size", [2, 6])
def test_ranks_share_prompts_and_rows_without_loss_or_repeats(
    target: Target, world_size: int
) -> None:
    """Also with more ranks than prompts: an idle rank still joins every collective."""
    config, rows = make_config(), make_rows()
    spec = head_spec(target)
    tensors = random_head_tensors(spec)
    alone = FakeRank(0, 1)
    RuntimeValidator(target, config, rows, alone)(1, spec, tensors)
    ranks = [FakeRank(rank, world_size) for rank in range(world_size)]
    for rank in ranks:
        RuntimeValidator(target, config, rows, rank)(1, spec, tensors)
    assert {len(rank.sent) for rank in ranks} == {len(alone.sent)} == {2}
    for index, want in enumerate(alone.sent):
        got = torch.stack([rank.sent[index] for rank in ranks]).sum(0)
        torch.testing.assert_close(got, want)


def test_prompts_are_distinct_and_end_before_the_first_answered_token() -> None:
    rows = [*make_rows(), make_rows()[0], ValidationRow((1, 2, 3), (False,) * 3)]
    prompts = choose_prompts(rows, 100)
    assert prompts == [row.prompt_ids for row in make_rows()]
    assert len(choose_prompts(rows, 3)) == 3
    group = SingleProcessGroup(torch.device("cpu"))
    with pytest.raises(ValueError, match="validation split"):
        RuntimeValidator(None, make_config(), rows[-1:], group)  # type: ignore[arg-type]


def test_validator_shares_the_targets_embedding(target: Target) -> None:
    group = SingleProcessGroup(torch.device("cpu"))
    validator = RuntimeValidator(target, make_config(), make_rows(), group)
    assert validator._lm_head_VD.shape == (VOCAB, target.config.hidden_size)
    assert EOS in target.eos_token_ids
    spec: HeadSpec = head_spec(target)
    before = target.model.embedding_VD.clone()
    validator(0, spec, random_head_tensors(spec))
    assert torch.equal(before, target.model.embedding_VD)
