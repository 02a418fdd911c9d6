from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from mtp_train.config import LossConfig
from mtp_train.losses import (
    TailSampler,
    objective,
    smooth_l1_sum,
    soft_cross_entropy_sum,
    target_log_normaliser,
)
from mtp_train.packing import pack
from tests.unit.trainer.reference import random_embedding, random_sample, tiny_spec

A, D, V = 37, 24, 211


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    state = torch.randn(A, D, requires_grad=True)
    return state, torch.randn(A, D), torch.rand(A) + 0.5, torch.randn(V, D)


def naive(state, target, weight, lm_head):
    p = torch.softmax(target @ lm_head.t(), -1)
    log_q = torch.log_softmax(state @ lm_head.t(), -1)
    return -((p * log_q).sum(-1) * weight).sum()


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(("row_chunk", "vocab_chunk"), [(8, 0), (64, 0), (8, 50), (16, 211)])
@pytest.mark.parametrize("with_lse", [False, True])
def test_chunked_loss_and_gradient_equal_the_naive_ones(tensors, row_chunk, vocab_chunk, with_lse):
    state, target, weight, lm_head = tensors
    lse = target_log_normaliser(target, lm_head, row_chunk=10) if with_lse else None
    ours = soft_cross_entropy_sum(
        state,
        target,
        weight,
        lm_head,
        row_chunk=row_chunk,
        vocab_chunk=vocab_chunk,
        target_lse_A=lse,
    )
    expected = naive(state, target, weight, lm_head)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(ours * 0.3, state)
    (expected_grad,) = torch.autograd.grad(expected * 0.3, state)
    assert relative(grad, expected_grad) < 1e-5


@pytest.mark.parametrize("vocab_chunk", [0, 50])
def test_bfloat16_gradient_is_within_rounding(tensors, vocab_chunk):
    state, target, weight, lm_head = tensors
    low = [x.detach().bfloat16() for x in (state, target, lm_head)]
    low[0].requires_grad_()
    ours = soft_cross_entropy_sum(
        low[0], low[1], weight, low[2], row_chunk=16, vocab_chunk=vocab_chunk
    )
    same = [x.detach().float() for x in low]
    same[0].requires_grad_()
    expected = naive(same[0], same[1], weight, same[2])
    (grad,) = torch.autograd.grad(ours, low[0])
    (expected_grad,) = torch.autograd.grad(expected, same[0])
    assert grad.dtype == torch.bfloat16
    assert relative(grad.float(), expected_grad) < 0.02
    assert ours.item() == pytest.approx(expected.item(), rel=0.01)


def sub_vocab_reference(state, target, weight, lm_head, kept):
    """Distributions over the kept ids and one bucket for everything else, both exact."""

    def bucketed(hidden):
        log_p = torch.log_softmax(hidden @ lm_head.t(), -1)
        outside = torch.ones(V, dtype=torch.bool)
        outside[kept] = False
        rest = torch.logsumexp(log_p[:, outside], -1, keepdim=True)
        return torch.cat((log_p[:, kept], rest), -1)

    return -((bucketed(target).exp() * bucketed(state)).sum(-1) * weight).sum()


def test_sub_vocabulary_with_the_whole_tail_equals_the_bucketed_distributions(tensors):
    state, target, weight, lm_head = tensors
    kept = torch.randperm(V)[:60].sort().values
    lse = target_log_normaliser(target, lm_head, row_chunk=16)
    sub = TailSampler(kept, lm_head, sample_size=V).draw(seed=1)
    ours = soft_cross_entropy_sum(
        state, target, weight, lm_head, row_chunk=8, target_lse_A=lse, sub_vocab=sub
    )
    expected = sub_vocab_reference(state, target, weight, lm_head, kept)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(ours, state)
    (expected_grad,) = torch.autograd.grad(expected, state)
    assert relative(grad, expected_grad) < 1e-5


def test_a_sampled_tail_stands_for_everything_outside(tensors):
    state, target, weight, lm_head = tensors
    kept = torch.arange(60)
    lse = target_log_normaliser(target, lm_head, row_chunk=16)
    sub = TailSampler(kept, lm_head, sample_size=30).draw(seed=4)
    ours = soft_cross_entropy_sum(
        state, target, weight, lm_head, row_chunk=8, target_lse_A=lse, sub_vocab=sub
    )
    p = torch.softmax(target @ lm_head.t(), -1)
    logits = state @ lm_head.t()
    rest = torch.logsumexp(logits[:, sub.ids_W[60:]], -1, keepdim=True)
    rest = rest + torch.tensor((V - 60) / 30).log()
    log_q = torch.log_softmax(torch.cat((logits[:, kept], rest), -1), -1)
    bucketed = torch.cat((p[:, kept], p[:, 60:].sum(-1, keepdim=True)), -1)
    expected = -((bucketed * log_q).sum(-1) * weight).sum()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(ours, state)
    (expected_grad,) = torch.autograd.grad(expected, state)
    assert relative(grad, expected_grad) < 1e-5


def test_sampled_tail_estimates_the_partition_function_without_bias(tensors):
    state, _, _, lm_head = tensors
    kept = torch.arange(60)
    sampler = TailSampler(kept, lm_head, sample_size=30)
    logits = state.detach() @ lm_head.t()
    exact = logits[:, 60:].exp().sum(-1)
    estimates = []
    for seed in range(3000):
        sub = sampler.draw(seed=seed)
        z = logits[:, sub.ids_W[sub.num_kept :]] + sub.tail_log_scale
        estimates.append(z.exp().sum(-1))
    samples = torch.stack(estimates)
    # 6 standard errors for 37 rows: false alarm below 1e-7
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - exact).abs() < 6 * error).all()
    assert samples.std(0).min() > 0


def test_sub_vocabulary_needs_the_targets_normaliser(tensors):
    state, target, weight, lm_head = tensors
    sub = TailSampler(torch.arange(5), lm_head, sample_size=9).draw(seed=0)
    with pytest.raises(ValueError, match="target_lse_A"):
        soft_cross_entropy_sum(state, target, weight, lm_head, row_chunk=8, sub_vocab=sub)


def test_sub_vocabulary_gradient_holds_the_tail_down(tensors):
    """A head that puts its mass outside is pushed back, which a renormalised loss cannot see."""
    _, target, weight, lm_head = tensors
    kept = torch.arange(190)
    lse = target_log_normaliser(target, lm_head, row_chunk=16)
    state = (lm_head[200] * 0.3).expand(A, D).clone().requires_grad_()
    sub = TailSampler(kept, lm_head, sample_size=V).draw(seed=0)
    loss = soft_cross_entropy_sum(
        state, target, weight, lm_head, row_chunk=8, target_lse_A=lse, sub_vocab=sub
    )
    (grad,) = torch.autograd.grad(loss, state)

    def tail_mass(x):
        return torch.softmax(x @ lm_head.t(), -1)[:, 190:].sum(-1)

    has_little_outside = tail_mass(target) < 0.5
    assert has_little_outside.sum() > A // 2
    lower = tail_mass(state - 0.01 * grad) < tail_mass(state)
    assert lower[has_little_outside].all()


def test_no_rows_give_zero_and_no_gradient(tensors):
    _, _, _, lm_head = tensors
    state = torch.empty(0, D, requires_grad=True)
    none = torch.empty(0)
    loss = soft_cross_entropy_sum(state, torch.empty(0, D), none, lm_head, row_chunk=8)
    loss = loss + smooth_l1_sum(state, torch.empty(0, D), none)
    loss.backward()
    assert loss.item() == 0.0
    assert state.grad.shape == (0, D)


def test_smooth_l1_is_a_weighted_sum_of_row_means(tensors):
    state, target, weight, _ = tensors
    rows = torch.stack([F.smooth_l1_loss(s, t) for s, t in zip(state, target, strict=True)])
    torch.testing.assert_close(smooth_l1_sum(state, target, weight), (rows * weight).sum())


@pytest.mark.parametrize("scale", [0.3, 1.0])
@pytest.mark.parametrize("num_kept", [240, 150])
def test_bfloat16_tail_mass_is_exact_but_for_the_rounding_of_the_logits(num_kept, scale):
    """Against fp64. With a zero state the head is uniform, so that each row's loss tells its mass:
    ``log V - rest * log(V - kept)`` (V a power of two, where the uniform softmax is exact)."""
    torch.manual_seed(3)
    vocab_size, num_rows = 256, 60
    lm_head = torch.randn(vocab_size, D).bfloat16()
    target = (torch.randn(num_rows, D) * scale).bfloat16()
    kept = torch.arange(num_kept)
    sub = TailSampler(kept, lm_head, sample_size=vocab_size).draw(seed=0)
    lse = target_log_normaliser(target, lm_head, row_chunk=16)
    logits = target.double() @ lm_head.double().t()
    exact = torch.softmax(logits, -1)[:, num_kept:].sum(-1)
    moved = logits.abs().amax(-1) * 2**-8  # what rounding does to one logit
    assert ((lse - torch.logsumexp(logits, -1)).abs() <= moved + 1e-5).all()
    rest = torch.empty(num_rows, dtype=torch.float64)
    state, one = torch.zeros(1, D).bfloat16(), torch.ones(1)
    for row in range(num_rows):
        part = slice(row, row + 1)
        loss = soft_cross_entropy_sum(
            state, target[part], one, lm_head, row_chunk=1, target_lse_A=lse[part], sub_vocab=sub
        )
        rest[row] = (math.log(vocab_size) - loss.double()) / math.log(vocab_size - num_kept)
    bound = torch.expm1(2 * moved) * exact * (1 - exact) + 1e-5
    assert ((rest - exact).abs() <= bound).all()
    assert (rest - exact).abs().max() < 0.01


def test_wide_bfloat16_rows_are_normalised_in_float32():
    torch.manual_seed(0)
    lm_head = torch.randn(100_000, 4).bfloat16()
    target = torch.randn(7, 4).bfloat16() * 8
    ours = target_log_normaliser(target, lm_head, row_chunk=7)
    expected = torch.logsumexp((target @ lm_head.t()).double(), -1)
    torch.testing.assert_close(ours, expected.float(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("unused", ["hidden", "logit"])
def test_a_part_without_weight_is_not_computed(unused, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError(f"the {unused} loss was computed")

    name = {"hidden": "smooth_l1_sum", "logit": "distribution_loss_sum"}[unused]
    monkeypatch.setattr(objective, name, refuse)
    spec = tiny_spec()
    batch = pack([random_sample(spec, 9, seed=1)])
    state = torch.randn(len(batch.steps[0].rows_N), spec.hidden_size, requires_grad=True)
    config = LossConfig(**{f"{unused}_weight": 0.0})
    parts = objective.head_loss([state], batch, random_embedding(spec), config=config)
    parts.total.backward()
    assert state.grad.abs().sum() > 0
    assert getattr(parts, unused) == 0
    assert parts.hidden + parts.logit > 0
