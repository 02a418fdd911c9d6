from __future__ import annotations

import itertools

import pytest
import torch

from mtp_train.config import LossConfig
from mtp_train.losses import head_loss, loss_weight
from mtp_train.packing import choose_part, count_active, pack, plan_epoch, split_step
from tests.unit.trainer.reference import (
    StepwiseHead,
    random_embedding,
    random_head,
    random_sample,
    reference_loss,
    tiny_spec,
)

LOSS = LossConfig(hidden_weight=0.7, logit_weight=0.9, num_unroll_steps=3, step_decay=0.5)


@pytest.fixture(scope="module")
def world():
    spec = tiny_spec()
    embedding = random_embedding(spec)
    samples = [
        random_sample(spec, 13, seed=1),
        random_sample(spec, 9, seed=2, mask="spans"),
        random_sample(spec, 5, seed=3, mask="none"),
        random_sample(spec, 3, seed=4, mask="all"),
        random_sample(spec, 17, seed=5),
    ]
    return spec, embedding, samples


def loss_and_gradient(spec, embedding, groups):
    """Global mean over micro-batches ``groups`` and its gradient."""
    head = random_head(spec)
    batches = [pack(group, num_steps=3) for group in groups]
    weight = sum(loss_weight(b.num_active, step_decay=0.5) for b in batches)
    total = 0.0
    for batch in batches:
        parts = head_loss(head(batch, embedding), batch, embedding, config=LOSS)
        (parts.total / weight).backward()
        total += parts.total.item() / weight
    return total, torch.cat([p.grad.flatten() for p in head.parameters()])


def test_loss_equals_the_stepwise_reference(world):
    spec, embedding, samples = world
    total, _ = loss_and_gradient(spec, embedding, [samples])
    reference = StepwiseHead(spec, random_head(spec).export_tensors(), embedding)
    expected, count = 0.0, 0.0
    for sample in samples:
        states = {
            (i, k): state
            for i in range(len(sample.input_ids) - 1)
            for k, state in enumerate(
                reference.unroll(sample, i, min(3, len(sample.input_ids) - 1 - i))
            )
        }
        part, n = reference_loss(
            states, sample, embedding, beta=0.5, hidden_weight=0.7, logit_weight=0.9
        )
        expected, count = expected + part.item(), count + n
    assert total == pytest.approx(expected / count, rel=1e-5)


def test_loss_and_gradients_do_not_depend_on_packing_or_accumulation(world):
    spec, embedding, samples = world
    total, gradient = loss_and_gradient(spec, embedding, [samples])
    for groups in ([[s] for s in samples], [samples[::-1]], [samples[:2], samples[2:]]):
        other, other_gradient = loss_and_gradient(spec, embedding, groups)
        assert other == pytest.approx(total, rel=1e-5)
        error = (other_gradient - gradient).norm() / gradient.norm()
        assert error < 1e-5


def test_tokens_behind_the_mask_change_nothing(world):
    """A sample padded with masked rows: same loss, same gradient."""
    spec, embedding, samples = world
    sample = samples[0]
    padded = type(sample)(
        torch.cat((sample.input_ids, torch.zeros(6, dtype=torch.int64))),
        torch.cat((sample.loss_mask, torch.zeros(6, dtype=torch.bool))),
        torch.cat((sample.hidden, torch.full((6, spec.hidden_size), 1e4))),
    )
    total, gradient = loss_and_gradient(spec, embedding, [[sample]])
    other, other_gradient = loss_and_gradient(spec, embedding, [[padded]])
    assert other == total
    assert torch.equal(other_gradient, gradient)


def test_a_batch_without_active_rows_gives_zero_loss_and_a_gradient_for_every_parameter(world):
    spec, embedding, samples = world
    head = random_head(spec)
    batch = pack([samples[2]], num_steps=2)
    assert batch.num_active == (0, 0)
    states = head(batch, embedding)
    parts = head_loss(states, batch, embedding, config=LOSS)
    parts.total.backward()
    assert parts.total.item() == 0.0
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_active_pairs_follow_the_shifted_mask():
    spec = tiny_spec()
    sample = random_sample(spec, 8, seed=1, mask="none")
    sample.loss_mask[[1, 4, 7]] = True
    batch = pack([sample], num_steps=2)
    # t_4 and t_7 are predicted from starts 2 and 5 at step 0, from starts 1 and 4 at step 1.
    starts = [s.rows_N[s.active_A].tolist() for s in batch.steps]
    assert starts == [[2, 5], [1, 4]]
    assert [s.labels_A.tolist() for s in batch.steps] == [sample.input_ids[[4, 7]].tolist()] * 2
    assert torch.equal(batch.steps[1].target_AD, sample.hidden[[3, 6]])
    assert batch.steps[0].rows_N.tolist() == [1, 2, 4, 5]
    assert count_active(sample.loss_mask, 2) == batch.num_active == (2, 2)


def test_every_sample_appears_once_per_epoch_in_an_order_of_its_own():
    lengths = [10 + (i * 7) % 40 for i in range(100)]
    epochs = [plan_epoch(lengths, tokens_per_step=120, seed=3, epoch=e) for e in (0, 1)]
    for plan in epochs:
        assert sorted(i for step in plan for i in step) == list(range(100))
        assert all(sum(lengths[i] for i in step) >= 120 for step in plan[:-1])
        assert all(sum(lengths[i] for i in step[:-1]) < 120 for step in plan)
    assert epochs[0] != epochs[1]
    assert epochs[0] == plan_epoch(lengths, tokens_per_step=120, seed=3, epoch=0)


def test_a_step_is_dealt_out_evenly_and_completely():
    lengths = [100, 90, 10, 20, 30, 40]
    parts = split_step(range(6), lengths, num_parts=2)
    assert sorted(i for part in parts for i in part) == list(range(6))
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= 10
    assert split_step([0], lengths, num_parts=3) == [[0], [], []]


def test_a_smaller_part_lies_in_every_larger_one_of_its_seed():
    lengths = [10 + 7 * index % 23 for index in range(200)]
    parts = [choose_part(lengths, max_tokens=limit, seed=5) for limit in (300, 600, 1200, 0)]
    sums = [sum(lengths[index] for index in part) for part in parts]
    for part, limit, total in zip(parts, (300, 600, 1200), sums, strict=False):
        assert limit - max(lengths) < total <= limit
        assert part == sorted(set(part))
    assert all(set(small) < set(large) for small, large in itertools.pairwise(parts))
    assert parts[-1] == list(range(200))
    assert parts[0] != choose_part(lengths, max_tokens=300, seed=6)
    assert len(choose_part(lengths, max_tokens=1, seed=5)) == 1  # never nothing
    assert choose_part(lengths, max_tokens=10**9, seed=5) == parts[-1]
