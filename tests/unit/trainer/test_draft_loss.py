"""The loss of a head with its own ``lm_head``, against the formula and plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_train.config import LossConfig
from mtp_train.draft_loss import DraftTarget, draft_head_loss, draft_loss_sum
from mtp_train.losses import row_formula, target_log_normaliser
from mtp_train.packing import pack
from tests.unit.trainer.reference import (
    StepwiseHead,
    draft_ids,
    eagle3,
    medusa,
    random_embedding,
    random_head,
    random_sample,
    tiny_spec,
)

ROWS, WIDTH, VOCAB = 23, 8, 40
IDS = torch.tensor([0, 3, 4, 9, 17, 30, 39])


KINDS = ("soft_ce", "forward_kl", "reverse_kl", "tv", "lk_alpha", "lk_lambda")
OVER_A_LIST = ("soft_ce", "reverse_kl", "tv", "lk_alpha")  # finite where q is zero outside of it
ETA = 3.0


def formula(kind="soft_ce"):
    return row_formula(LossConfig(kind=kind, lk_eta=ETA))


def row_loss(kind, h, g, own, lm_head, ids):
    """One row: p over everything, q over W and zero elsewhere, straight from the definition."""
    p, log_q = torch.softmax(lm_head @ g, 0)[ids], torch.log_softmax(own @ h, 0)
    if kind == "soft_ce":
        return -(p * log_q).sum()
    q = log_q.exp()
    overlap = torch.minimum(p, q).sum()
    divergence = (p * (p.log() - log_q)).sum()
    weight = torch.exp(-ETA * overlap.detach())
    return {
        "forward_kl": divergence,
        "reverse_kl": (q * (log_q - p.log())).sum(),
        "tv": 1 - overlap,
        "lk_alpha": -overlap.log(),
        "lk_lambda": weight * divergence + (1 - weight) * (1 - overlap),
    }[kind]


def plain_loss(state, target, weight, own, lm_head, ids, kind="soft_ce"):
    rows = zip(state, target, weight, strict=True)
    return sum(w * row_loss(kind, h, g, own, lm_head, ids) for h, g, w in rows)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return draw(ROWS, WIDTH), draw(ROWS, WIDTH), draw(ROWS).abs(), draw(VOCAB, WIDTH)


@pytest.mark.parametrize("row_chunk", [1, 5, 64])
@pytest.mark.parametrize(
    ("kind", "is_whole"),
    [(kind, True) for kind in KINDS] + [(kind, False) for kind in OVER_A_LIST],
)
def test_loss_and_both_gradients_are_those_of_the_formula(rows, row_chunk, kind, is_whole):
    state, target, weight, lm_head = rows
    ids = torch.arange(VOCAB) if is_whole else IDS
    own = torch.randn(len(ids), WIDTH, dtype=torch.float64)
    wanted_inputs = [x.clone().requires_grad_() for x in (state, own)]
    wanted = plain_loss(wanted_inputs[0], target, weight, wanted_inputs[1], lm_head, ids, kind)
    wanted_grads = torch.autograd.grad(3.0 * wanted, wanted_inputs)
    inputs = [x.float().requires_grad_() for x in (state, own)]
    lm_head = lm_head.float()
    lse = target_log_normaliser(target.float(), lm_head, row_chunk=7)
    got = draft_loss_sum(
        inputs[0],
        target.float(),
        weight.float(),
        [inputs[1]],
        DraftTarget.of(lm_head, None if is_whole else ids),
        formula=formula(kind),
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
    loss = draft_loss_sum(
        state,
        target,
        torch.ones(1),
        [own],
        DraftTarget.of(lm_head, IDS),
        formula=formula(),
        row_chunk=4,
        target_lse_A=target_log_normaliser(target, lm_head, row_chunk=4),
    )
    (grad,) = torch.autograd.grad(loss, [state])
    assert float(loss.detach()) < 1e-6
    assert float(grad.abs().max()) < 1e-6


def test_a_reduced_list_needs_the_whole_normaliser(rows):
    state, target, weight, lm_head = (x.float() for x in rows)
    with pytest.raises(ValueError, match="target_lse_A is required"):
        draft_loss_sum(
            state,
            target,
            weight,
            [lm_head[IDS]],
            DraftTarget.of(lm_head, IDS),
            formula=formula(),
            row_chunk=8,
        )


@pytest.mark.parametrize("kind", ["forward_kl", "lk_lambda"])
def test_what_is_infinite_over_a_list_is_refused(rows, kind):
    state, target, weight, lm_head = (x.float() for x in rows)
    with pytest.raises(ValueError, match="cannot draft some tokens is infinite"):
        draft_loss_sum(
            state,
            target,
            weight,
            [lm_head[IDS]],
            DraftTarget.of(lm_head, IDS),
            formula=formula(kind),
            row_chunk=8,
            target_lse_A=weight,
        )


@pytest.mark.parametrize("kind", ["tv", "reverse_kl"])
def test_over_a_list_a_distance_is_that_of_the_whole_vocabulary(rows, kind):
    """q with zeros outside of the list, against p over everything."""
    state, target, weight, lm_head = rows
    own = torch.randn(len(IDS), WIDTH, dtype=torch.float64)
    wanted = 0.0
    for h, g, w in zip(state, target, weight, strict=True):
        p, q = torch.softmax(lm_head @ g, 0), torch.zeros(VOCAB, dtype=torch.float64)
        q[IDS] = torch.softmax(own @ h, 0)
        distance = 0.5 * (p - q).abs().sum() if kind == "tv" else torch.xlogy(q, q / p).sum()
        wanted += float(w * distance)
    lse = target_log_normaliser(target.float(), lm_head.float(), row_chunk=7)
    got = draft_loss_sum(
        state.float(),
        target.float(),
        weight.float(),
        [own.float()],
        DraftTarget.of(lm_head.float(), IDS),
        formula=formula(kind),
        row_chunk=5,
        target_lse_A=lse,
    )
    assert float(got) == pytest.approx(wanted, rel=1e-5)


def test_bfloat16_is_the_fp32_gradient_up_to_rounding(rows):
    state, target, weight, lm_head = (x.float() for x in rows)
    own = torch.randn(len(IDS), WIDTH)
    lse = target_log_normaliser(target, lm_head, row_chunk=8)
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(dtype).requires_grad_() for x in (state, own)]
        loss = draft_loss_sum(
            inputs[0],
            target.to(dtype),
            weight,
            [inputs[1]],
            DraftTarget.of(lm_head.to(dtype), IDS),
            formula=formula(),
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
            draft_loss_sum(
                state,
                torch.randn(count, WIDTH),
                torch.ones(count),
                [own],
                DraftTarget.of(lm_head, None),
                formula=formula(),
                row_chunk=row_chunk,
            ).backward()
        largest[row_chunk] = watch.numel
    assert largest == {8: count * WIDTH, count: count * VOCAB}


HEADS = {
    "eagle3": (eagle3(fusion_norm="each"), 0),
    "eagle3 over a list": (eagle3(12, fusion_norm="each"), 12),
    "medusa": (medusa(lm_head="own"), 0),
}


@pytest.mark.parametrize("kind", ["soft_ce", "reverse_kl", "expected_length"])
@pytest.mark.parametrize("name", HEADS)
def test_every_parameter_gets_the_gradient_of_plain_autograd(name, kind):
    """Head, unroll and loss together, every ``lm_head`` of the head's own included."""
    changes, draft_vocab = HEADS[name]
    spec = tiny_spec(**changes)
    head, embedding = random_head(spec), random_embedding(spec)
    with torch.no_grad():  # the blocks' own start as equal copies
        for number, lm_head in enumerate(spec.own_lm_heads):
            head.get_parameter(lm_head).mul_(1.0 + 0.1 * number)
    lm_head = torch.randn(spec.vocab_size, spec.hidden_size) * 0.3
    ids = draft_ids(spec) if draft_vocab else None
    sample = random_sample(spec, 11, seed=5)
    lse = target_log_normaliser(sample.hidden, lm_head, row_chunk=4)
    config = LossConfig(
        kind=kind, hidden_weight=0.0, num_unroll_steps=3, step_decay=0.8, row_chunk=4
    )
    reads = spec.reads_layers
    batch = pack([sample], num_steps=3, of_layers=reads, target_lse=[lse] if draft_vocab else None)
    outputs = head(batch, embedding, with_lm_head=True)
    target = DraftTarget.of(lm_head, ids)
    parts = draft_head_loss(outputs[:3], batch, outputs[3:], target, config=config)
    names = [n for n, _ in head.named_parameters()]
    grads = torch.autograd.grad(parts.total, list(head.parameters()))

    tensors = {n: p.detach().clone().requires_grad_() for n, p in head.named_parameters()}
    reference = StepwiseHead(spec, tensors, embedding)
    own = [tensors[n] for n in spec.own_lm_heads]
    wanted, columns = 0.0, torch.arange(spec.vocab_size) if ids is None else ids
    for i in range(10):
        reached = 1.0
        for k, state in enumerate(reference.unroll(sample, i, min(3, 10 - i))):
            label = i + 2 + k
            if label >= 11 or not sample.loss_mask[label]:
                continue
            g, weight = sample.hidden[i + 1 + k], own[k if len(own) > 1 else 0]
            if kind == "expected_length":
                reached = reached * (1 - row_loss("tv", state, g, weight, lm_head, columns))
                wanted = wanted + 0.8**k * (1 - reached)
            else:
                wanted = wanted + 0.8**k * row_loss(kind, state, g, weight, lm_head, columns)
    torch.testing.assert_close(parts.total, wanted, rtol=1e-5, atol=1e-5)
    assert float(parts.hidden) == 0.0
    expected = torch.autograd.grad(wanted, [tensors[n] for n in names])
    for name, ours, theirs in zip(names, grads, expected, strict=True):
        atol = 1e-4 * theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol, msg=name)
