"""Every attention of the trainer against dense masks, gradients included."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.nn.attention.flex_attention import flex_attention

from mtp_train.attention import (
    AttentionPlan,
    BlockwiseAttention,
    ChainStep,
    choose_attention,
    cut_queries,
    extend_chain,
)
from mtp_train.attention.flash import FlashAttention
from mtp_train.attention.flex import TILE, FlexAttention, block_mask
from mtp_train.attention.kernels import CpuFlashKernel, CudaFlashKernel

HEADS, GROUPS, WIDTH = 4, 2, 4


class DenseVarlen:
    """The two operators of ``torch.ops.aten`` behind :class:`CudaFlashKernel`, with dense masks.

    Bottom-right causal, ``[H, P]`` log-sum-exps, and a backward that trusts the log-sum-exp, the
    output and the gradient that it is given, as the kernel does.
    """

    def _flash_attention_forward(
        self,
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
    ):
        scores, values = self._scores(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        assert is_causal
        out = torch.softmax(scores, -1) @ values
        return out.transpose(0, 1), scores.logsumexp(-1), None, None, None

    def _flash_attention_backward(
        self,
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        rng_state,
        unused,
    ):
        scores, values = self._scores(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        assert is_causal
        assert rng_state.dtype == torch.uint64
        ratio = query.shape[1] // key.shape[1]
        probs = (scores - logsumexp[..., None]).exp()
        grad, scale = grad_out.transpose(0, 1), query.shape[-1] ** -0.5
        delta = (grad * out.transpose(0, 1)).sum(-1, keepdim=True)
        d_scores = probs * (grad @ values.mT - delta) * scale
        keys = key.repeat_interleave(ratio, 1).transpose(0, 1)
        d_q = d_scores @ keys
        d_k = d_scores.mT @ query.transpose(0, 1)
        d_v = probs.mT @ grad
        d_k, d_v = (x.view(key.shape[1], ratio, *x.shape[1:]).sum(1) for x in (d_k, d_v))
        return tuple(x.transpose(0, 1) for x in (d_q, d_k, d_v))

    def _scores(self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k):
        assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
        assert cum_seq_q[-1] == len(query)
        assert cum_seq_k[-1] == len(key)
        assert max_q == cum_seq_q.diff().max()
        assert max_k == cum_seq_k.diff().max()
        seen = torch.zeros(len(query), len(key), dtype=torch.bool)
        for q0, q1, k0, k1 in zip(cum_seq_q, cum_seq_q[1:], cum_seq_k, cum_seq_k[1:], strict=False):
            rows = torch.arange(int(q1 - q0)) + int(k1 - k0) - int(q1 - q0)
            seen[q0:q1, k0:k1] = rows[:, None] >= torch.arange(int(k1 - k0))
        ratio = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(ratio, 1).transpose(0, 1) for x in (key, value))
        scores = query.transpose(0, 1) @ keys.mT * query.shape[-1] ** -0.5
        return scores.masked_fill(~seen, float("-inf")), values


BACKENDS = {
    "blockwise": BlockwiseAttention(),
    "flash on a CPU": FlashAttention(CpuFlashKernel()),
    "flash on a GPU": FlashAttention(CudaFlashKernel(DenseVarlen())),
    "flex on a CPU": FlexAttention.on(torch.device("cpu")),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one step: rows of three samples (one without queries), and a chain of ``steps``
    earlier steps, each of which has a few rows more than the next."""

    plan: AttentionPlan
    borders: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]  # q, k, v, chain keys, chain values
    rows: tuple[torch.Tensor, ...]

    @property
    def num_steps(self):
        return len(self.rows)

    def chain(self, tensors):
        keys, values = tensors[3 : 3 + self.num_steps], tensors[3 + self.num_steps :]
        return tuple(ChainStep(k, v, r) for k, v, r in zip(keys, values, self.rows, strict=True))


def make_case(steps, *, dtype=torch.float64, scale=1, block=4):
    generator = torch.Generator().manual_seed(steps)
    borders = (0, 3 * scale, 4 * scale, 12 * scale, 19 * scale)
    wanted = [
        *range(1, 3 * scale),
        *range(6 * scale, 8 * scale),
        *range(10 * scale, 12 * scale),
        *range(12 * scale, 18 * scale),
    ]
    rows = torch.tensor(wanted)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    chain_rows = []
    for j in range(steps):
        longer = len(rows) + steps - j
        chain_rows.append(torch.randperm(longer, generator=generator)[: len(rows)].sort().values)
    own = [len(rows) + steps - j for j in range(steps)]
    tensors = (
        random(len(rows), HEADS, WIDTH),
        *(random(borders[-1], GROUPS, WIDTH) for _ in range(2)),
        *(random(n, GROUPS, WIDTH) for _ in range(2) for n in own),
    )
    plan = AttentionPlan(cut_queries(rows, borders, block=block), rows)
    return Case(plan, borders, tensors, tuple(chain_rows))


def dense(case, *tensors):
    """One mask over all keys: packed rows, then every entry of every chain step."""
    q, k, v = tensors[:3]
    keys = torch.cat((k, *tensors[3 : 3 + case.num_steps]))
    values = torch.cat((v, *tensors[3 + case.num_steps :]))
    rows = case.plan.rows_N
    sample = torch.bucketize(rows, torch.tensor(case.borders), right=True)
    seen = torch.zeros(len(q), len(keys), dtype=torch.bool)
    for n, row in enumerate(rows.tolist()):
        seen[n, case.borders[int(sample[n]) - 1] : row + 1] = True
        start = len(k)
        for j, index in enumerate(case.rows):
            seen[n, start + int(index[n])] = True
            start += len(tensors[3 + j])
    keys, values = (x.repeat_interleave(HEADS // GROUPS, 1).transpose(0, 1) for x in (keys, values))
    scores = q.transpose(0, 1) @ keys.mT * WIDTH**-0.5
    return (torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ values).transpose(0, 1)


def attend(backend, case, *tensors):
    return backend(*tensors[:3], case.plan, case.chain(tensors))


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_output_and_gradients_equal_those_of_a_dense_mask(backend, steps):
    case = make_case(steps, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in case.tensors]
    ours, expected = attend(backend, case, *inputs), dense(case, *inputs)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn(ours.shape, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_gradient_through_the_merge_is_exact(backend, steps):
    case = make_case(steps)
    inputs = [t.requires_grad_() for t in case.tensors]
    assert torch.autograd.gradcheck(
        lambda *tensors: attend(backend, case, *tensors),
        inputs,
        fast_mode=steps != 1 or isinstance(backend, FlexAttention),
    )


def test_a_merge_that_forgets_the_log_sum_exps_gradient_is_found_out():
    """The kernel's own output and log-sum-exp in the backward: what a naive merge amounts to."""

    class Naive(CpuFlashKernel):
        def backward(self, grad, q, k, v, plan, *, out_NHC, lse_NH):
            own_out, own_lse = self.forward(q, k, v, plan)
            share = (own_lse - lse_NH).exp()[..., None]
            return super().backward(grad * share, q, k, v, plan, out_NHC=own_out, lse_NH=own_lse)

    case = make_case(2)
    inputs = [t.requires_grad_() for t in case.tensors]
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(
            lambda *tensors: attend(FlashAttention(Naive()), case, *tensors),
            inputs,
            fast_mode=True,
        )


@pytest.mark.parametrize("name", list(BACKENDS)[1:])
def test_backends_agree_in_float32(name):
    case = make_case(4, dtype=torch.float32, scale=30, block=64)
    inputs = [t.requires_grad_() for t in case.tensors]
    outs = [attend(b, case, *inputs) for b in (BACKENDS["blockwise"], BACKENDS[name])]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    grad = torch.randn(outs[0].shape)
    first, second = (torch.autograd.grad(out, inputs, grad) for out in outs)
    for a, b in zip(second, first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_chain_points_into_earlier_steps_without_copies():
    keys = [torch.randn(n, GROUPS, WIDTH) for n in (6, 5, 3)]
    chain = ()
    for k, parents in zip(keys, ([0, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5], [0, 1, 4]), strict=True):
        chain = extend_chain(chain, torch.tensor(parents), k, k)
    assert [step.rows_N.tolist() for step in chain] == [[0, 2, 5], [0, 1, 4], [0, 1, 2]]
    assert all(step.k_MGC is k for step, k in zip(chain, keys, strict=True))


@pytest.mark.parametrize(("scale", "block"), [(1, 4), (30, 64), (100, 64)])
def test_tiles_of_the_block_mask_are_those_that_hold_a_visible_pair_and_few_more(scale, block):
    case = make_case(0, scale=scale, block=block)
    num_keys = case.borders[-1]
    mask = block_mask(case.plan, num_keys=num_keys)
    rows = case.plan.rows_N
    starts = torch.tensor(case.borders)[
        torch.bucketize(rows, torch.tensor(case.borders), right=True) - 1
    ]
    keys = torch.arange(num_keys)
    seen = (keys >= starts[:, None]) & (keys <= rows[:, None])
    every = torch.arange(len(rows))[:, None]
    assert torch.equal(mask.mask_mod(0, 0, every, keys), seen)
    listed = mask.to_dense()[0, 0].bool()
    needed = torch.zeros_like(listed)
    for i, j in seen.nonzero().tolist():
        needed[i // TILE, j // TILE] = True
    assert bool((listed | ~needed).all())
    # beyond those: keys of samples without queries, and rows behind the last query of its block
    assert int((listed & ~needed).sum()) <= len(listed)


@pytest.mark.slow
def test_compiled_flex_attention_visits_the_tiles_that_it_is_told():
    """Forward only and without log-sum-exps: compiled, there is no more of it on a CPU."""
    case = make_case(0, dtype=torch.float32, scale=60, block=64)
    mask = block_mask(case.plan, num_keys=case.borders[-1])
    q, k, v = (x.transpose(0, 1)[None] for x in case.tensors)
    compiled = torch.compile(flex_attention, dynamic=True)
    with torch.no_grad():
        ours = compiled(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(ours, dense(case, *case.tensors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_flash_attention_backward"])
def test_the_stand_in_takes_the_arguments_of_torchs_operator(name):
    schema = getattr(torch.ops.aten, name).default._schema
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    assert list(inspect.signature(getattr(DenseVarlen(), name)).parameters) == positional


def test_choice_is_named_and_refusals_say_what_to_do():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def choose(name, device, dtype=torch.bfloat16, head_dim=64):
        return choose_attention(name, device=device, dtype=dtype, head_dim=head_dim)

    assert isinstance(choose("auto", cpu), BlockwiseAttention)
    assert isinstance(choose("auto", cuda), FlashAttention)
    assert isinstance(choose("auto", cuda, torch.float32), BlockwiseAttention)
    assert isinstance(choose("flash", cpu, torch.float32), FlashAttention)
    with pytest.raises(ValueError, match=r"trainer\.attention=flash: .*float32.*blockwise"):
        choose("flash", cuda, torch.float32)
    with pytest.raises(ValueError, match="head_dim=36"):
        choose("flash", cuda, head_dim=36)
    assert isinstance(choose("flex", cpu, torch.float32), FlexAttention)
    assert isinstance(choose("flex", cuda, torch.float32), FlexAttention)
    with pytest.raises(ValueError, match=r"trainer\.attention=flex: .*head_dim=8; use .*blockwise"):
        choose("flex", cuda, head_dim=8)


@pytest.mark.parametrize(
    ("name", "device", "said"),
    [
        ("auto", "cpu", "blockwise, the device is a CPU"),
        ("auto", "cuda", "flash, torch's kernel on cuda, variable lengths in one call"),
        ("blockwise", "cpu", "blockwise, as trainer.attention says"),
        ("flex", "cpu", "flex, un-compiled over dense scores on a CPU"),
        ("flex", "cuda", "flex, compiled at its first step"),
    ],
)
def test_the_log_says_which_and_why(name, device, said, caplog):
    with caplog.at_level("INFO"):
        choose_attention(name, device=torch.device(device), dtype=torch.bfloat16, head_dim=64)
    assert said in caplog.text
