from __future__ import annotations

import itertools
import math

import pytest
import torch

from mtp_train.config import TrainerConfig
from mtp_train.optim import learning_rate, make_adamw


def rates(total=100, **changes):
    config = TrainerConfig(**({"learning_rate": 2.0, "warmup_share": 0.1} | changes))
    return [learning_rate(i, total=total, config=config) for i in range(total)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_every_schedule_warms_up_linearly_peaks_and_ends_low(schedule):
    values = rates(schedule=schedule)
    assert values[:10] == pytest.approx([2.0 * (i + 1) / 10 for i in range(10)])
    assert max(values) == 2.0
    assert values[-1] <= 0.11
    assert all(a >= b for a, b in itertools.pairwise(values[10:]))


def test_linear_cosine_and_wsd_have_their_shapes():
    assert rates(schedule="linear")[55] == pytest.approx(1.0)
    assert rates(schedule="cosine")[40] == pytest.approx(1 + math.cos(math.pi / 3))
    wsd = rates(schedule="wsd", decay_share=0.2)
    assert wsd[10:80] == [2.0] * 70
    assert wsd[90] == pytest.approx(1.0)


def test_minimum_rate_is_where_the_schedule_ends():
    config = TrainerConfig(learning_rate=2.0, min_lr_share=0.25, warmup_share=0.0)
    assert learning_rate(50, total=100, config=config) == pytest.approx(2 * 0.625)
    assert learning_rate(100, total=100, config=config) == pytest.approx(0.5)


def test_a_single_step_without_warm_up_has_the_full_rate():
    assert rates(total=1, warmup_share=0.0) == [2.0]


def test_closed_gate_keeps_weights_and_moments():
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = make_adamw([weight], config=TrainerConfig(learning_rate=0.1))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    after_one = weight.detach().clone()
    moments = {k: v.clone() for k, v in optimizer.state[weight].items()}
    optimizer.is_closed = True
    weight.grad = torch.full_like(weight, float("nan"))
    optimizer.step()
    assert torch.equal(weight, after_one)
    assert all(torch.equal(v, moments[k]) for k, v in optimizer.state[weight].items())


def test_weight_decay_spares_norm_weights():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make_adamw([matrix, vector], config=TrainerConfig(weight_decay=0.5))
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert (matrix < 1).all()
    assert torch.equal(vector, torch.ones(2))
