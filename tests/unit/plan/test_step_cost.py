"""What a step is counted to cost, against arithmetic by hand and against real tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mtp_train.config import LossConfig
from mtp_train.losses import head_loss
from mtp_train.packing import pack
from mtp_train.plan.operator_meter import OperatorMeter
from mtp_train.plan.step_cost import Rows, StepCost, StepCosts, count_step
from tests.unit.trainer.reference import (
    TinySample,
    eagle3,
    medusa,
    random_embedding,
    random_head,
    tiny_spec,
)

FP32 = torch.float32
ROWS = Rows(40, 30)


def test_the_meter_follows_what_lives() -> None:
    known = torch.ones(4, 8)
    with OperatorMeter([known]) as meter:
        known.add_(1)
        view = known.t()
        assert (meter.now, meter.peak) == (0, 0)
        product = view @ known  # 8 x 4 x 8
        assert (meter.now, meter.flops) == (8 * 8 * 4, 2 * 8 * 4 * 8)
        twice = product * 2
        del product
        assert (meter.now, meter.peak) == (256, 512)
        meter.restart_peak()
        assert meter.peak == 256
        del twice
    assert meter.now == 0


def test_products_are_those_of_the_layers_by_hand() -> None:
    """One step, two rows of 40: 30 of each are answers, of which the first pair predicts row 10."""
    spec = tiny_spec()
    cost = count_step(spec, LossConfig(), ROWS, num_tokens=80, dtype=FP32)
    active = 2 * 30
    computed = 2 * 38  # the pair (i, 0) predicts i + 2, so that nobody needs the last two rows
    queries = active
    d, inner, q_dim, kv_dim = 32, 48, 32, 16
    linears = computed * (2 * d * d + 2 * d * kv_dim) + queries * (2 * d * q_dim + 3 * d * inner)
    attention = 2 * 30 * 4 * 38 * 8 * 2  # 30 queries, 4 heads, 38 keys, 8 wide: scores and values
    assert cost.forward_flops == 2 * (linears + attention)
    assert cost.loss_flops == 2 * 3 * active * 61 * d  # both logits and the gradient


@pytest.mark.parametrize("draft_vocab", [0, 12])
def test_products_of_a_head_with_an_lm_head_of_its_own(draft_vocab: int) -> None:
    """``fc`` over two streams, projections over ``[e; x]``, and a gradient for its ``lm_head``."""
    spec = tiny_spec(**eagle3(draft_vocab))
    loss = LossConfig(hidden_weight=0.0)
    cost = count_step(spec, loss, ROWS, num_tokens=80, dtype=FP32)
    computed, queries = 2 * 38, 2 * 30
    d, inner, q_dim, kv_dim = 32, 48, 32, 16
    linears = computed * (2 * d * d + 2 * 2 * d * kv_dim)
    linears += queries * (2 * d * q_dim + d * q_dim + 3 * d * inner)
    attention = 2 * 30 * 4 * 38 * 8 * 2
    assert cost.forward_flops == 2 * (linears + attention)
    assert cost.loss_flops == 2 * 4 * queries * (draft_vocab or 61) * d
    assert (
        cost.batch_bytes
        > count_step(tiny_spec(), loss, ROWS, num_tokens=80, dtype=FP32).batch_bytes
    )


def test_products_of_medusa_are_a_matrix_per_block() -> None:
    spec = tiny_spec(**medusa())
    loss = LossConfig(hidden_weight=0.0, num_unroll_steps=3)
    cost = count_step(spec, loss, ROWS, num_tokens=80, dtype=FP32)
    queries = 2 * (32 + 31 + 30)  # later steps start at earlier rows
    assert cost.forward_flops == 2 * queries * 32 * 32
    assert cost.loss_flops == 2 * 3 * 3 * 2 * 30 * 61 * 32


def test_lm_heads_of_medusas_own_cost_their_gradient_too() -> None:
    spec = tiny_spec(**medusa(lm_head="own"))
    loss = LossConfig(hidden_weight=0.0, num_unroll_steps=3)
    cost = count_step(spec, loss, ROWS, num_tokens=80, dtype=FP32)
    assert cost.loss_flops == 2 * 4 * 3 * 2 * 30 * 61 * 32


def test_bytes_kept_are_those_of_the_same_step_on_real_tensors() -> None:
    spec, loss = tiny_spec(), LossConfig(num_unroll_steps=3, row_chunk=16)
    counted = count_step(spec, loss, ROWS, num_tokens=80, dtype=FP32)
    mask = torch.arange(40) >= 10
    samples = [TinySample(torch.zeros(40, dtype=torch.int64), mask, torch.randn(40, 32))] * 2
    batch = pack(samples, num_steps=3)
    head, embedding = random_head(spec), random_embedding(spec)
    saved: dict[int, int] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
        states = head(batch, embedding)
    for tensor in (embedding, batch.hidden_SD, *head.parameters()):
        saved.pop(tensor.untyped_storage()._cdata, None)
    for part in (batch, *batch.steps):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, torch.Tensor):
                saved.pop(value.untyped_storage()._cdata, None)
    for state in states:  # the caller holds them
        saved[state.untyped_storage()._cdata] = state.untyped_storage().nbytes()
    assert counted.kept_bytes == pytest.approx(sum(saved.values()), rel=0.05)
    with OperatorMeter([embedding, *head.parameters()]) as meter:
        head_loss(states, batch, embedding, config=loss).total.backward()
    assert meter.flops == pytest.approx(counted.loss_flops + counted.backward_flops, rel=1e-9)


def test_a_long_micro_batch_is_extended_from_shorter_ones() -> None:
    spec, loss = tiny_spec(), LossConfig(sub_vocab_size=20, tail_sample_size=8, row_chunk=16)
    costs = StepCosts(spec, loss, ROWS, dtype=FP32)
    far, real = costs.of(4000), count_step(spec, loss, ROWS, num_tokens=4000, dtype=FP32)
    for field in dataclasses.fields(StepCost):
        expected = getattr(real, field.name)
        assert getattr(far, field.name) == pytest.approx(expected, rel=0.03), field.name


def test_a_sub_vocabulary_makes_the_loss_cheaper_and_nothing_else() -> None:
    spec = tiny_spec()
    full = count_step(spec, LossConfig(), ROWS, num_tokens=80, dtype=FP32)
    hot = LossConfig(sub_vocab_size=20, tail_sample_size=8)
    cheap = count_step(spec, hot, ROWS, num_tokens=80, dtype=FP32)
    assert cheap.forward_flops == full.forward_flops
    assert cheap.loss_flops == 2 * 60 * 32 * (20 + 2 * 28)  # target: kept ids; head and gradient
