"""Chain verification: exactness, degenerate cases, and mutants that must turn the tests red."""

from __future__ import annotations

import pytest
import torch

import runtime.verify as verify_module
from runtime.request import SamplingParams
from runtime.sampling import (
    SamplingTensors,
    Stream,
    inverse_cdf,
    philox_uniform,
    sample,
    token_probs,
)
from runtime.verify import accept_chain, verify_chain
from tests.unit.runtime.model_fixtures import fused_kernels

CPU = torch.device("cpu")
V = 5


def sampling(n: int, temperature: float = 1.0) -> SamplingTensors:
    return SamplingTensors.build([SamplingParams(temperature=temperature, seed=4)], CPU).repeat(n)


def test_greedy_chain_hand_cases() -> None:
    target = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]]), V).float()
    drafts = torch.tensor([[1, 2], [1, 4], [0, 2]])
    out = verify_chain(
        "greedy", target, drafts, sampling(3, 0.0), torch.tensor([7, 7, 7]), draft_probs_BKV=None
    )
    assert out.ids_BK1.tolist() == [[1, 2, 3], [1, 2, -1], [1, -1, -1]]
    assert out.num_emitted_B.tolist() == [3, 2, 1]
    assert out.last_ids_B.tolist() == [3, 2, 1]


@pytest.mark.parametrize("mode", ["keyed", "rejection"])
def test_greedy_requests_accept_alike_in_every_mode(mode: str) -> None:
    target = torch.randn(64, 4, V, generator=torch.Generator().manual_seed(0))
    drafts = torch.randint(0, V, (64, 3), generator=torch.Generator().manual_seed(1))
    args = (target, drafts, sampling(64, 0.0), torch.arange(64))
    want = verify_chain("greedy", *args, draft_probs_BKV=None)
    got = verify_chain(mode, *args, draft_probs_BKV=None)
    assert torch.equal(got.ids_BK1, want.ids_BK1)


def test_keyed_emits_the_tokens_of_plain_decoding() -> None:
    """Whatever is drafted, the emitted tokens are the plain draws at the same positions."""
    n, k = 200, 3
    target = torch.randn(n, k + 1, V, generator=torch.Generator().manual_seed(0)) * 2
    drafts = torch.randint(0, V, (n, k), generator=torch.Generator().manual_seed(1))
    first = torch.arange(n) * 10
    out = verify_chain("keyed", target, drafts, sampling(n), first, draft_probs_BKV=None)
    for j in range(k + 1):
        plain = sample(target[:, j], sampling(n), first + j, Stream.TARGET)
        emitted = out.num_emitted_B > j
        assert torch.equal(out.ids_BK1[:, j][emitted], plain[emitted])
        assert (out.ids_BK1[:, j][~emitted] == -1).all()
    assert set(out.num_emitted_B.tolist()) == {1, 2, 3, 4}


def draw_drafts(
    q_logits_NKV: torch.Tensor, first_N: torch.Tensor, *, stream: Stream = Stream.DRAFT
) -> tuple[torch.Tensor, torch.Tensor]:
    n, k, _ = q_logits_NKV.shape
    ids, probs = [], []
    for j in range(k):
        q = token_probs(q_logits_NKV[:, j], sampling(n))
        uniform = philox_uniform(sampling(n).seed_M, first_N + j, stream)
        ids.append(inverse_cdf(q, uniform))
        probs.append(q)
    return torch.stack(ids, 1), torch.stack(probs, 1)


# G-test against exact probabilities, 4 degrees of freedom: false alarm 1e-4 per test at fixed seed.
G_LIMIT = 23.5
N = 60_000
P_LOGITS = torch.tensor([[0.3, -0.7, 1.2, 0.0, -1.5], [1.0, 0.2, -0.4, 0.6, -2.0]])
Q_LOGITS = torch.tensor([[1.1, 0.4, -0.6, 0.5, -1.0]])


def first_token_g(*, argmax: bool, stream: Stream = Stream.DRAFT) -> float:
    """G statistic of the first emitted token against p (K = 1)."""
    first = torch.arange(N) * 3
    q_logits = Q_LOGITS.expand(N, 1, V)
    if argmax:
        drafts, q = Q_LOGITS.argmax(-1)[:, None].expand(N, 1).contiguous(), None
    else:
        drafts, q = draw_drafts(q_logits, first, stream=stream)
    target = P_LOGITS.expand(N, 2, V)
    out = verify_chain("rejection", target, drafts, sampling(N), first, draft_probs_BKV=q)
    counts = torch.bincount(out.ids_BK1[:, 0], minlength=V).double()
    expected = P_LOGITS[0].double().softmax(0) * N
    return float(2 * (counts * (counts.clamp_min(1e-9) / expected).log()).sum())


@pytest.mark.parametrize("argmax", [True, False])
def test_rejection_emits_the_target_distribution(argmax: bool) -> None:
    assert first_token_g(argmax=argmax) < G_LIMIT


def test_rejection_bonus_token_follows_the_next_row() -> None:
    first = torch.arange(N) * 3
    drafts, q = draw_drafts(P_LOGITS[:1].expand(N, 1, V), first)
    target = P_LOGITS.expand(N, 2, V)
    out = verify_chain("rejection", target, drafts, sampling(N), first, draft_probs_BKV=q)
    assert (out.num_emitted_B == 2).all(), "q = p accepts everything"
    counts = torch.bincount(out.ids_BK1[:, 1], minlength=V).double()
    expected = P_LOGITS[1].double().softmax(0) * N
    assert 2 * (counts * (counts / expected).log()).sum() < G_LIMIT


def test_acceptance_is_one_minus_total_variation() -> None:
    first = torch.arange(N) * 3
    drafts, q = draw_drafts(Q_LOGITS.expand(N, 1, V), first)
    target = P_LOGITS.expand(N, 2, V)
    out = verify_chain("rejection", target, drafts, sampling(N), first, draft_probs_BKV=q)
    p, q_exact = P_LOGITS[0].double().softmax(0), Q_LOGITS[0].double().softmax(0)
    want = float(torch.minimum(p, q_exact).sum())
    got = float((out.num_emitted_B - 1).double().mean())
    # four standard deviations of a binomial share
    assert abs(got - want) < 4 * (want * (1 - want) / N) ** 0.5


def test_disjoint_supports_never_accept_and_never_emit_the_draft() -> None:
    target = torch.tensor([0.0, 0.0, -1e9, -1e9, -1e9]).expand(500, 2, V)
    q_logits = torch.tensor([-1e9, -1e9, 0.0, 0.0, 0.0]).expand(500, 1, V)
    first = torch.arange(500)
    drafts, q = draw_drafts(q_logits, first)
    out = verify_chain("rejection", target, drafts, sampling(500), first, draft_probs_BKV=q)
    assert (out.num_emitted_B == 1).all()
    assert (out.ids_BK1[:, 0] < 2).all()


def test_one_hot_q_with_zero_target_mass_is_rejected() -> None:
    target = torch.tensor([0.0, 0.0, -1e9, -1e9, -1e9]).expand(500, 2, V)
    drafts = torch.full((500, 1), 4)
    out = verify_chain(
        "rejection", target, drafts, sampling(500), torch.arange(500), draft_probs_BKV=None
    )
    assert (out.num_emitted_B == 1).all()
    assert (out.ids_BK1[:, 0] < 2).all()


def test_mutant_argmax_draft_verified_as_if_sampled_is_caught() -> None:
    """Feeding the soft q of an arg-maxed draft biases the output: the G-test must see it."""
    first = torch.arange(N) * 3
    drafts = Q_LOGITS.argmax(-1)[:, None].expand(N, 1).contiguous()
    q = Q_LOGITS.softmax(-1).expand(N, 1, V)
    target = P_LOGITS.expand(N, 2, V)
    out = verify_chain("rejection", target, drafts, sampling(N), first, draft_probs_BKV=q)
    counts = torch.bincount(out.ids_BK1[:, 0], minlength=V).double().clamp_min(1e-9)
    expected = P_LOGITS[0].double().softmax(0) * N
    assert 2 * (counts * (counts / expected).log()).sum() > 10 * G_LIMIT


def test_mutant_shared_draft_and_accept_noise_is_caught() -> None:
    assert first_token_g(argmax=False, stream=Stream.ACCEPT) > 10 * G_LIMIT


def test_mutant_residual_without_clamp_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resampling from p instead of relu(p - q) after a rejection must turn the G-test red."""

    def from_p(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        return inverse_cdf(P_LOGITS[:1].softmax(-1).expand(weights.shape), uniform)

    monkeypatch.setattr(verify_module, "inverse_cdf", from_p)
    assert first_token_g(argmax=False) > 10 * G_LIMIT


@pytest.mark.parametrize("k", [1, 3])
def test_the_kernel_accepts_what_torch_does(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    tokens = torch.randint(0, 3, (200, k + 1), generator=generator)
    ids_BK1 = torch.randint(0, 3, (200, k + 1), generator=generator)
    got = fused_kernels().accept_chain(tokens, ids_BK1[:, 1:])  # cut out
    want = accept_chain(tokens, ids_BK1[:, 1:])
    assert torch.equal(got.ids_BK1, want.ids_BK1)
    assert torch.equal(got.num_emitted_B, want.num_emitted_B)
    assert torch.equal(got.last_ids_B, want.last_ids_B)
    assert len(set(got.num_emitted_B.tolist())) == k + 1, "every count occurs"
