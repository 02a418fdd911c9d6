"""The unroll over K steps against the step-wise head, and what may change without changing it."""

from __future__ import annotations

import itertools

import pytest
import torch

from mtp_train.attention import BLOCKWISE
from mtp_train.attention.flash import FlashAttention
from mtp_train.attention.kernels import CpuFlashKernel
from mtp_train.config import LossConfig
from mtp_train.heads import build_training_head
from mtp_train.losses import head_loss
from mtp_train.own_tokens import own_tokens
from mtp_train.packing import pack
from tests.bench.unroll import kept_bytes
from tests.unit.trainer.reference import (
    StepwiseHead,
    random_embedding,
    random_head,
    random_sample,
    reference_loss,
    tiny_spec,
)


def rebuilt(spec, **options):
    head = build_training_head(spec, dtype=torch.float32, **options)
    head.load_tensors(random_head(spec).export_tensors())
    return head


def loss_and_gradients(head, batch, embedding, *, drafts_by=None):
    config = LossConfig(hidden_weight=0.7, logit_weight=0.9, step_decay=0.6)
    states = head(batch, embedding, drafts_by)
    total = head_loss(states, batch, embedding, config=config).total
    return total.detach(), torch.autograd.grad(total, list(head.parameters()))


def assert_same(ours, theirs, *, tol=1e-5):
    torch.testing.assert_close(ours[0], theirs[0], rtol=tol, atol=tol)
    for a, b in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tol, atol=10 * tol * b.abs().max().item())


@pytest.mark.parametrize("num_steps", [1, 2, 5, 7])
@pytest.mark.parametrize("attention", [BLOCKWISE, FlashAttention(CpuFlashKernel())])
def test_loss_and_gradients_of_k_weighted_steps_are_those_of_the_stepwise_head(
    num_steps, attention
):
    spec = tiny_spec()
    embedding = random_embedding(spec)
    samples = [random_sample(spec, n, seed=n, mask=m) for n, m in ((11, "spans"), (6, "all"))]
    head = rebuilt(spec, attention=attention)
    ours = loss_and_gradients(head, pack(samples, num_steps=num_steps), embedding)
    names = [name for name, _ in head.named_parameters()]
    tensors = {n: p.detach().clone().requires_grad_() for n, p in head.named_parameters()}
    reference = StepwiseHead(spec, tensors, embedding)
    total = torch.zeros(())
    for sample in samples:
        states = {
            (i, k): state
            for i in range(len(sample.input_ids) - 1)
            for k, state in enumerate(
                reference.unroll(sample, i, min(num_steps, len(sample.input_ids) - 1 - i))
            )
        }
        part, _ = reference_loss(
            states, sample, embedding, beta=0.6, hidden_weight=0.7, logit_weight=0.9
        )
        total = total + part
    expected = torch.autograd.grad(total, [tensors[n] for n in names])
    assert_same(ours, (total.detach(), expected), tol=2e-5)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_checkpointed_activations_and_flash_give_the_same_loss_and_gradients(num_layers):
    spec = tiny_spec(num_layers=num_layers)
    embedding = random_embedding(spec)
    samples = [random_sample(spec, n, seed=n, mask="spans") for n in (90, 3, 41)]
    batch = pack(samples, num_steps=4)
    plain = loss_and_gradients(rebuilt(spec), batch, embedding)
    again = loss_and_gradients(rebuilt(spec, activation_checkpointing=True), batch, embedding)
    assert torch.equal(again[0], plain[0])
    assert all(torch.equal(a, b) for a, b in zip(again[1], plain[1], strict=True))
    flash = loss_and_gradients(
        rebuilt(spec, attention=FlashAttention(CpuFlashKernel())), batch, embedding
    )
    assert_same(flash, plain)


def test_checkpointing_keeps_less_for_the_backward_pass():
    spec = tiny_spec()
    embedding = random_embedding(spec)
    batch = pack([random_sample(spec, 200, seed=1)], num_steps=4)
    kept = []
    for is_on in (False, True):
        head, seen = rebuilt(spec, activation_checkpointing=is_on), {}

        def pack_hook(tensor, seen=seen):
            seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
            states = head(batch, embedding)
        assert states[0].requires_grad
        kept.append(sum(seen.values()))
    assert kept[1] < 0.6 * kept[0]


def test_what_is_kept_grows_with_the_steps_and_with_the_length_not_with_their_squares():
    spec = tiny_spec()
    embedding = random_embedding(spec)

    def kept(length, num_steps, attention=BLOCKWISE):
        head = rebuilt(spec, attention=attention)
        sample = random_sample(spec, length, seed=1, mask="all")
        return kept_bytes(head, pack([sample], num_steps=num_steps), embedding)

    for attention in (BLOCKWISE, FlashAttention(CpuFlashKernel())):
        by_steps = [kept(300, num_steps, attention) for num_steps in (1, 3, 5, 7)]
        first, *others = (b - a for a, b in itertools.pairwise(by_steps))
        assert others == pytest.approx([first] * 2, rel=0.03)
        by_length = [kept(length, 2, attention) for length in (1000, 2000, 4000)]
        assert by_length[2] / by_length[1] == pytest.approx(2, rel=0.02)
        assert by_length[1] / by_length[0] == pytest.approx(2, rel=0.02)


def test_own_tokens_are_what_the_step_before_would_draft_and_carry_no_gradient():
    spec = tiny_spec()
    head, embedding = random_head(spec), random_embedding(spec)
    lm_head = random_embedding(spec, seed=8).requires_grad_()
    sample = random_sample(spec, 14, seed=2, mask="all")
    batch = pack([sample], num_steps=4, every_row=True)
    states = head(batch, embedding, lm_head)
    reference = StepwiseHead(spec, head.export_tensors(), embedding)
    for start in range(3):
        cache: dict = {}
        for i in range(start + 1):
            state, recycled = reference.row(sample.hidden[i], sample.input_ids[i + 1], i, cache)
        for k in range(1, 4):
            token = int((lm_head @ state).argmax())
            state, recycled = reference.row(recycled, token, start + k, cache)
            torch.testing.assert_close(states[k][start], state, rtol=1e-5, atol=1e-5)
    assert torch.equal(states[0], head(batch, embedding)[0])
    assert not torch.equal(states[1], head(batch, embedding)[1])
    sum(s.sum() for s in states).backward()
    assert lm_head.grad is None


def test_own_tokens_of_many_rows_are_those_of_each_row():
    states, lm_head = torch.randn(1100, 8), torch.randn(50, 8)
    expected = torch.stack([(lm_head @ row).argmax() for row in states])
    assert torch.equal(own_tokens(states, lm_head), expected)
    assert own_tokens(states[:0], lm_head).shape == (0,)
