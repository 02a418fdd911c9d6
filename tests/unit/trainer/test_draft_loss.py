"""The loss of a head with its own ``lm_head``, against the formula and plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_train.config import LossConfig
from mtp_train.draft_loss import DraftTarget, draft_cross_entropy_sum, draft_head_loss
from mtp_train.losses import target_log_normaliser
from mtp_train.packing import pack
from tests.unit.trainer.reference import (
    StepwiseHead,
    draft_ids,
    eagle3,
    random_embedding,
    random_head,
    random_sample,
    tiny_spec,
)

ROWS, WIDTH, VOCAB = 23, 8, 40
IDS = torch.tensor([0, 3, 4, 9, 17, 30, 39])


def plain_loss(state, target, weight, own, lm_head, ids):
    """``sum_a w_a sum_{v in W} p_a(v) * -log q_a(v)``, p over everything, q over W."""
    total = torch.zeros((), dtype=state.dtype)
    for h, g, w in zip(state, target, weight, strict=True):
        p = torch.softmax(lm_head @ g, 0)[ids]
        total = total - w * (p * torch.log_softmax(own @ h, 0)).sum()
    return total


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return draw(ROWS, WIDTH), draw(ROWS, WIDTH), draw(ROWS).abs(), draw(VOCAB, WIDTH)


@pytest.mark.parametrize("row_chunk", [1, 5, 64])
@pytest.mark.parametrize("is_whole", [False, True])
def test_loss_and_both_gradients_are_those_of_the_formula(rows, row_chunk, is_whole):
    state, target, weight, lm_head = rows
    ids = torch.arange(VOCAB) if is_whole else IDS
    own = torch.randn(len(ids), WIDTH, dtype=torch.float64)
    wanted_inputs = [x.clone().requires_grad_() for x in (state, own)]
    wanted = plain_loss(wanted_inputs[0], target, weight, wanted_inputs[1], lm_head, ids)
    wanted_grads = torch.autograd.grad(3.0 * wanted, wanted_inputs)
    inputs = [x.float().requires_grad_() for x in (state, own)]
    lm_head = lm_head.float()
    lse = target_log_normaliser(target.float(), lm_head, row_chunk=7)
    got = draft_cross_entropy_sum(
        inputs[0],
        target.float(),
        weight.float(),
        inputs[1],
        DraftTarget.of(lm_head, None if is_whole else ids),
        row_chunk=row_chunk,
        target_lse_A=None if is_whole else lse,
    )
    torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=1e-5)
    for grad, wanted_grad in zip(torch.autograd.grad(3.0 * got, inputs), wanted_grads, strict=True):
        torch.testing.assert_close(grad, wanted_grad.float(), rtol=1e-4, atol=1e-5)


def test_a_row_counts_with_the_targets_mass_on_the_list(rows):
    """All of the target's mass outside: nothing to learn, whatever the head says."""
    _, _, _, lm_head = rows
    lm_head = lm_head.float()
    outside = torch.tensor([v for v in range(VOCAB) if v not in IDS.tolist()])
    target = (200.0 * lm_head[outside[:1]]).contiguous()  # all but certain of an id outside
    assert int((target @ lm_head.t()).argmax()) == int(outside[0])
    state, own = torch.randn(1, WIDTH).requires_grad_(), torch.randn(len(IDS), WIDTH)
    loss = draft_cross_entropy_sum(
        state,
        target,
        torch.ones(1),
        own,
        DraftTarget.of(lm_head, IDS),
        row_chunk=4,
        target_lse_A=target_log_normaliser(target, lm_head, row_chunk=4),
    )
    (grad,) = torch.autograd.grad(loss, [state])
    assert float(loss.detach()) < 1e-6
    assert float(grad.abs().max()) < 1e-6


def test_a_reduced_list_needs_the_whole_normaliser(rows):
    state, target, weight, lm_head = (x.float() for x in rows)
    with pytest.raises(ValueError, match="target_lse_A is required"):
        draft_cross_entropy_sum(
            state, target, weight, lm_head[IDS], DraftTarget.of(lm_head, IDS), row_chunk=8
        )


def test_bfloat16_is_the_fp32_gradient_up_to_rounding(rows):
    state, target, weight, lm_head = (x.float() for x in rows)
    own = torch.randn(len(IDS), WIDTH)
    lse = target_log_normaliser(target, lm_head, row_chunk=8)
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(dtype).requires_grad_() for x in (state, own)]
        loss = draft_cross_entropy_sum(
            inputs[0],
            target.to(dtype),
            weight,
            inputs[1],
            DraftTarget.of(lm_head.to(dtype), IDS),
            row_chunk=4,
            target_lse_A=lse,
        )
        grads.append(torch.autograd.grad(loss, inputs))
        assert [g.dtype for g in grads[-1]] == [dtype, dtype]
    for exact, rounded in zip(*grads, strict=True):
        error = (rounded.float() - exact).norm() / exact.norm()
        assert float(error) < 0.05


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_no_logits_of_all_rows_exist_at_once(rows):
    lm_head = rows[3].float()
    count = 400
    largest = {}
    for row_chunk in (8, count):
        state = torch.randn(count, WIDTH, requires_grad=True)
        own = lm_head.clone().requires_grad_()
        with Largest() as watch:
            draft_cross_entropy_sum(
                state,
                torch.randn(count, WIDTH),
                torch.ones(count),
                own,
                DraftTarget.of(lm_head, None),
                row_chunk=row_chunk,
            ).backward()
        largest[row_chunk] = watch.numel
    assert largest == {8: count * WIDTH, count: count * VOCAB}


@pytest.mark.parametrize("draft_vocab", [0, 12])
def test_every_parameter_gets_the_gradient_of_plain_autograd(draft_vocab):
    """Head, unroll and loss together, the own ``lm_head`` included."""
    changes = eagle3(draft_vocab, fusion_norm="each")
    spec = tiny_spec(**changes)
    head, embedding = random_head(spec), random_embedding(spec)
    lm_head = torch.randn(spec.vocab_size, spec.hidden_size) * 0.3
    ids = draft_ids(spec) if draft_vocab else None
    sample = random_sample(spec, 11, seed=5)
    lse = target_log_normaliser(sample.hidden, lm_head, row_chunk=4)
    config = LossConfig(hidden_weight=0.0, num_unroll_steps=3, step_decay=0.8, row_chunk=4)
    batch = pack([sample], num_steps=3, of_layers=True, target_lse=[lse] if draft_vocab else None)
    *states, own = head(batch, embedding, with_lm_head=True)
    parts = draft_head_loss(states, batch, own, DraftTarget.of(lm_head, ids), config=config)
    names = [n for n, _ in head.named_parameters()]
    grads = torch.autograd.grad(parts.total, list(head.parameters()))

    tensors = {n: p.detach().clone().requires_grad_() for n, p in head.named_parameters()}
    reference = StepwiseHead(spec, tensors, embedding)
    wanted, columns = 0.0, torch.arange(spec.vocab_size) if ids is None else ids
    for i in range(10):
        for k, state in enumerate(reference.unroll(sample, i, min(3, 10 - i))):
            label = i + 2 + k
            if label < 11 and sample.loss_mask[label]:
                p = torch.softmax(lm_head @ sample.hidden[i + 1 + k], 0)[columns]
                log_q = torch.log_softmax(tensors["lm_head.weight"] @ state, 0)
                wanted = wanted - 0.8**k * (p * log_q).sum()
    torch.testing.assert_close(parts.total, wanted, rtol=1e-5, atol=1e-5)
    assert float(parts.hidden) == 0.0
    expected = torch.autograd.grad(wanted, [tensors[n] for n in names])
    for name, ours, theirs in zip(names, grads, expected, strict=True):
        atol = 1e-4 * theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol, msg=name)
