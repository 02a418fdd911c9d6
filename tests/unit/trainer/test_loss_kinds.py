"""Each loss between distributions against float64 autograd, however rows and columns are cut."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_train.config import LossConfig
from mtp_train.losses import (
    ChunkSizes,
    ExpectedLength,
    TailSampler,
    distribution_loss_sum,
    head_loss,
    row_formula,
    target_log_normaliser,
)
from mtp_train.packing import pack
from tests.unit.trainer.loss_reference import (
    KINDS,
    log_distribution,
    merge_outside,
    row_losses,
    sampled_distribution,
)
from tests.unit.trainer.reference import random_embedding, random_sample, tiny_spec

A, D, V = 37, 24, 211
ETA = 2.0
KINDS_AND_CUTS = [
    (kind, cut)
    for kind in KINDS
    for cut in ("rows", "columns", "sub-vocabulary")
    if (kind, cut) != ("reverse_kl", "sub-vocabulary")
]
MERGED = tuple(kind for kind in KINDS if kind != "reverse_kl")  # fit for a sub-vocabulary
CUTS = [ChunkSizes(8), ChunkSizes(64), ChunkSizes(8, 50), ChunkSizes(64, 1), ChunkSizes(16, V)]


@pytest.fixture
def tensors():
    """States near the target's: some rows overlap almost wholly, some hardly."""
    torch.manual_seed(0)
    target, lm_head = torch.randn(A, D), torch.randn(V, D)
    state = target + torch.linspace(0.01, 1.0, A)[:, None] * torch.randn(A, D)
    return state.requires_grad_(), target, torch.rand(A) + 0.5, lm_head


def ours(kind, state, target, weight, lm_head, *, chunks=CUTS[0], **options):
    formula = row_formula(LossConfig(kind=kind, lk_eta=ETA))
    return distribution_loss_sum(
        state, target, weight, lm_head, formula=formula, chunks=chunks, **options
    )


def check(loss, expected, state, *, rel=1e-5):
    torch.testing.assert_close(loss.double(), expected, rtol=rel, atol=1e-6)
    (grad,) = torch.autograd.grad(loss * 0.3, state)
    (expected_grad,) = torch.autograd.grad(expected * 0.3, state)
    assert expected_grad.norm() > 0.01
    assert ((grad - expected_grad).norm() / expected_grad.norm()).item() < rel
    return grad


@pytest.mark.parametrize("chunks", CUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_lse", [False, True])
def test_loss_and_gradient_equal_the_reference(tensors, kind, chunks, with_lse):
    state, target, weight, lm_head = tensors
    lse = target_log_normaliser(target, lm_head, row_chunk=10) if with_lse else None
    loss = ours(kind, state, target, weight, lm_head, chunks=chunks, target_lse_A=lse)
    log_p, log_q = log_distribution(target, lm_head), log_distribution(state, lm_head)
    check(loss, (row_losses(kind, log_p, log_q, eta=ETA) * weight).sum(), state, rel=2e-5)


@pytest.mark.parametrize("sample_size", [V, 30])
@pytest.mark.parametrize("kind", MERGED)
def test_a_sub_vocabulary_merges_everything_outside(tensors, kind, sample_size):
    state, target, weight, lm_head = tensors
    kept = torch.randperm(V)[:60].sort().values
    sub = TailSampler(kept, lm_head, sample_size=sample_size).draw(seed=4)
    lse = target_log_normaliser(target, lm_head, row_chunk=16)
    loss = ours(kind, state, target, weight, lm_head, target_lse_A=lse, sub_vocab=sub)
    log_p = merge_outside(log_distribution(target, lm_head), kept)
    log_q = sampled_distribution(state, lm_head, kept, sub.ids_W[60:])
    check(loss, (row_losses(kind, log_p, log_q, eta=ETA) * weight).sum(), state, rel=5e-5)


@pytest.mark.parametrize("kind", ["forward_kl", "tv", "lk_alpha"])
def test_merging_makes_distributions_no_less_alike(tensors, kind):
    state, target, _, lm_head = tensors
    kept = torch.arange(60)
    sub = TailSampler(kept, lm_head, sample_size=V).draw(seed=1)
    lse = target_log_normaliser(target, lm_head, row_chunk=16)
    for row in range(A):
        part = (state[row : row + 1], target[row : row + 1], torch.ones(1), lm_head)
        merged = ours(kind, *part, target_lse_A=lse[row : row + 1], sub_vocab=sub)
        assert merged <= ours(kind, *part) + 1e-5


@pytest.mark.parametrize(("kind", "cut"), KINDS_AND_CUTS)
def test_bfloat16_is_within_the_rounding_of_probabilities(tensors, kind, cut):
    state, target, weight, lm_head = tensors
    low = [x.detach().bfloat16() for x in (state[18:], target[18:], lm_head)]
    low[0].requires_grad_()
    same = low[0].detach().double().requires_grad_()
    weight, kept, options = weight[18:], torch.arange(180), {}
    log_p, log_q = log_distribution(low[1], low[2]), log_distribution(same, low[2])
    if cut == "sub-vocabulary":
        options["sub_vocab"] = TailSampler(kept, low[2], sample_size=V).draw(seed=0)
        options["target_lse_A"] = target_log_normaliser(low[1], low[2], row_chunk=16)
        log_p, log_q = merge_outside(log_p, kept), merge_outside(log_q, kept)
    chunks = ChunkSizes(16, 50 if cut == "columns" else 0)
    loss = ours(kind, low[0], low[1], weight, low[2], chunks=chunks, **options)
    expected = (row_losses(kind, log_p, log_q, eta=ETA) * weight).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    (grad,) = torch.autograd.grad(loss, low[0])
    (expected_grad,) = torch.autograd.grad(expected, same)
    assert grad.dtype == torch.bfloat16
    if kind not in ("soft_ce", "forward_kl", "reverse_kl"):
        # the overlap has a kink where p = q, and which side of it a row is on is up to rounding
        is_near = ((log_p - log_q).abs() < 0.15) & (log_q.exp() > 1e-3)
        grad, expected_grad = (x[~is_near.any(-1)] for x in (grad, expected_grad))
        assert len(grad) >= 5
    assert ((grad - expected_grad).norm() / expected_grad.norm()).item() < 0.04


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_chunk", [0, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_distributions_without_overlap_stay_finite(tensors, kind, vocab_chunk, dtype):
    _, target, weight, lm_head = tensors
    state = (-100 * target).to(dtype).requires_grad_()
    far = (100 * target).to(dtype), weight, lm_head.to(dtype)
    loss = ours(kind, state, *far, chunks=ChunkSizes(8, vocab_chunk))
    losses = [loss]
    if kind in MERGED:
        lse = target_log_normaliser(far[0], far[2], row_chunk=8)
        sub = TailSampler(torch.arange(60), far[2], sample_size=9).draw(seed=0)
        losses.append(ours(kind, state, *far, target_lse_A=lse, sub_vocab=sub))
    (grad,) = torch.autograd.grad(sum(losses), state)
    assert all(loss.isfinite() for loss in losses)
    assert grad.isfinite().all()
    assert loss > 0.9 * weight.sum()


class LargestTensors(TorchDispatchMode):
    """How many elements the memory behind each operator's result has, once per address: the most,
    for memory that was given back is used again.
    """

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                size = storage.nbytes() // tensor.element_size()
                address = storage.data_ptr()
                self.sizes[address] = max(size, self.sizes.get(address, 0))
        return out


@pytest.mark.parametrize(("kind", "cut"), KINDS_AND_CUTS)
def test_no_more_than_three_chunks_of_logits_exist(kind, cut):
    rows, vocab_size = 64, 4000
    target, lm_head = torch.randn(rows, D), torch.randn(vocab_size, D)
    state, width, options = torch.randn(rows, D, requires_grad=True), vocab_size, {}
    given = [lm_head]
    if cut == "sub-vocabulary":
        options["sub_vocab"] = TailSampler(torch.arange(500), lm_head, sample_size=100).draw(seed=0)
        options["target_lse_A"] = target_log_normaliser(target, lm_head, row_chunk=16)
        given, width = [lm_head, options["sub_vocab"].weight_WD], 600
    elif cut == "columns":
        options["chunks"], width = ChunkSizes(8, 700), 700
    with LargestTensors() as seen:
        ours(kind, state, target, torch.ones(rows), lm_head, **options).backward()
    for tensor in given:
        seen.sizes.pop(tensor.untyped_storage().data_ptr(), None)
    sizes = sorted(seen.sizes.values())
    assert sizes[-1] == 3 * 8 * width
    if cut != "columns":  # there the normalisers have a chunk of their own
        assert sizes[-2] < 8 * width


@pytest.mark.parametrize("kind", KINDS[1:])
def test_equal_distributions_lose_nothing_and_are_left_alone(tensors, kind):
    _, target, weight, lm_head = tensors
    state = target.clone().requires_grad_()
    loss = ours(kind, state, target, weight, lm_head)
    (grad,) = torch.autograd.grad(loss, state)
    assert abs(loss.item()) < 1e-4
    assert grad.abs().max() < 1e-5


def test_forward_kl_has_the_gradient_of_soft_cross_entropy(tensors):
    state, target, weight, lm_head = tensors
    kinds = ("forward_kl", "soft_ce")
    grads = [torch.autograd.grad(ours(k, state, target, weight, lm_head), state)[0] for k in kinds]
    assert torch.equal(*grads)


def test_total_variation_is_how_often_rejection_sampling_turns_a_draft_down(tensors):
    state, target, _, lm_head = tensors
    p, q = (log_distribution(x, lm_head).exp() for x in (target, state.detach()))
    generator = torch.Generator().manual_seed(3)
    draws = 20_000
    drafts = torch.multinomial(q, draws, replacement=True, generator=generator)
    accept = (p.gather(1, drafts) / q.gather(1, drafts)).clamp(max=1)
    uniform = torch.rand(A, draws, generator=generator, dtype=torch.float64)
    rejected = (uniform >= accept).double().mean(-1)
    for row in range(A):
        part = state[row : row + 1], target[row : row + 1], torch.ones(1), lm_head
        loss = ours("tv", *part).item()
        # 5 standard errors for 37 rows: false alarm below 1e-4
        assert abs(rejected[row] - loss) < 5 * (0.25 / draws) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_zero_and_no_gradient(tensors, kind):
    lm_head = tensors[3]
    state = torch.empty(0, D, requires_grad=True)
    loss = ours(kind, state, torch.empty(0, D), torch.empty(0), lm_head)
    loss.backward()
    assert loss.item() == 0.0
    assert state.grad.shape == (0, D)


def test_the_adaptive_weight_turns_kl_into_total_variation(tensors):
    """With eta 0 the hybrid is KL; with a large one what overlaps at all is total variation."""
    state, target, weight, lm_head = tensors
    for eta, kind in ((0.0, "forward_kl"), (1e6, "tv")):
        formula = row_formula(LossConfig(kind="lk_lambda", lk_eta=eta))
        hybrid = distribution_loss_sum(
            state, target, weight, lm_head, formula=formula, chunks=ChunkSizes(8)
        )
        plain = ours(kind, state, target, weight, lm_head)
        torch.testing.assert_close(hybrid, plain)
        grads = [torch.autograd.grad(loss, state)[0] for loss in (hybrid, plain)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def unrolled(*, every_row=False):
    """Samples with gaps in the mask, and states of three steps near those of the target."""
    spec = tiny_spec()
    samples = [
        random_sample(spec, 13, seed=1),
        random_sample(spec, 9, seed=2, mask="spans"),
        random_sample(spec, 5, seed=3, mask="none"),
        random_sample(spec, 11, seed=4, mask="all"),
    ]
    batch = pack(samples, num_steps=3, every_row=every_row)
    generator = torch.Generator().manual_seed(7)
    states = []
    for step in batch.steps:
        state = torch.randn(step.rows_N.numel(), spec.hidden_size, generator=generator)
        state[step.active_A] = step.target_AD + 0.3 * state[step.active_A]
        states.append(state.requires_grad_())
    return samples, batch, states, random_embedding(spec)


def slow_missing_length(samples, batch, states, lm_head, *, beta, every_row):
    """Start by start: products over the steps that carry loss, in float64."""
    of_row = {}
    for k, step in enumerate(batch.steps):
        for index, row in enumerate(step.rows_N.tolist()):
            of_row[row, k] = states[k][index]
    total, first_row = torch.zeros((), dtype=torch.float64), 0
    borders = iter(batch.cu_seqlens[1:])
    for sample in samples:
        length = len(sample.input_ids)
        if not every_row and not sample.loss_mask[2:].any():
            continue  # nothing of it is packed
        for i in range(length):
            reached = torch.ones((), dtype=torch.float64)
            for k in range(len(batch.steps)):
                label = i + 2 + k
                if label >= length or not sample.loss_mask[label]:
                    continue
                p, q = (
                    log_distribution(x[None], lm_head).exp()
                    for x in (sample.hidden[i + 1 + k], of_row[first_row + i, k])
                )
                reached = reached * torch.minimum(p, q).sum()
                total = total + beta**k * (1 - reached)
        first_row = next(borders)
    return total


@pytest.mark.parametrize("every_row", [False, True])
@pytest.mark.parametrize("beta", [1.0, 0.6])
@pytest.mark.parametrize("vocab_chunk", [0, 17])
def test_expected_length_couples_the_steps_of_each_start(every_row, beta, vocab_chunk):
    samples, batch, states, lm_head = unrolled(every_row=every_row)
    config = LossConfig(
        kind="expected_length",
        hidden_weight=0.0,
        num_unroll_steps=3,
        step_decay=beta,
        row_chunk=7,
        vocab_chunk=vocab_chunk,
    )
    parts = head_loss(states, batch, lm_head, config=config)
    expected = slow_missing_length(samples, batch, states, lm_head, beta=beta, every_row=every_row)
    assert parts.logit.item() == pytest.approx(expected.item(), rel=1e-5)
    grads = torch.autograd.grad(parts.total, states)
    expected_grads = torch.autograd.grad(expected, states)
    for k, (grad, reference) in enumerate(zip(grads, expected_grads, strict=True)):
        assert reference.norm() > 1e-6, k
        assert ((grad - reference).norm() / reference.norm()).item() < 2e-5, k


def test_expected_length_of_certain_drafts_is_the_number_of_steps():
    _, batch, _, _ = unrolled()
    accepted = torch.ones(sum(batch.num_active))
    loss, slope = ExpectedLength(batch.steps, 1.0)(accepted)
    assert loss.item() == 0.0
    # the first step of a chain decides about all that follow it
    assert slope.min() == -3.0
    assert slope[-batch.num_active[2] :].eq(-1.0).all()


def test_expected_length_with_one_step_is_total_variation(tensors):
    _, batch, states, lm_head = unrolled()
    one = type(batch)(
        batch.hidden_SD, batch.next_ids_S, batch.positions_S, batch.cu_seqlens, batch.steps[:1]
    )
    losses = [
        head_loss(states[:1], one, lm_head, config=LossConfig(kind=kind, hidden_weight=0.0)).total
        for kind in ("expected_length", "tv")
    ]
    torch.testing.assert_close(*losses)
    grads = [torch.autograd.grad(loss, states[0])[0] for loss in losses]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def test_expected_length_of_a_batch_without_active_rows_is_zero():
    spec = tiny_spec()
    batch = pack([random_sample(spec, 5, seed=3, mask="none")], num_steps=2)
    states = [torch.randn(1, spec.hidden_size, requires_grad=True) for _ in range(2)]
    config = LossConfig(kind="expected_length", num_unroll_steps=2)
    parts = head_loss(states, batch, random_embedding(spec), config=config)
    parts.total.backward()
    assert parts.total.item() == 0.0
    assert not any(state.grad.any() for state in states)


def test_a_sub_vocabulary_is_not_spread_over_ranks(tensors):
    from mtp_train.distributed import SingleProcessGroup

    state, target, weight, lm_head = tensors
    sub = TailSampler(torch.arange(5), lm_head, sample_size=9).draw(seed=0)
    group = SingleProcessGroup(torch.device("cpu"))
    with pytest.raises(ValueError, match="whole lm_head and no group"):
        ours("tv", state, target, weight, lm_head, sub_vocab=sub, target_lse_A=weight, group=group)


def test_reverse_kl_is_refused_a_place_to_hide(tensors):
    state, target, weight, lm_head = tensors
    sub = TailSampler(torch.arange(5), lm_head, sample_size=9).draw(seed=0)
    with pytest.raises(ValueError, match="ReverseKL: it would reward mass outside"):
        ours("reverse_kl", state, target, weight, lm_head, sub_vocab=sub, target_lse_A=weight)
