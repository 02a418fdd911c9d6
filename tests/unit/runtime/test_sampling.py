"""Sampling against slow, obvious references."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.request import SamplingParams
from runtime.sampling import (
    SamplingTensors,
    Stream,
    best_tokens,
    inverse_cdf,
    philox_uniform,
    sample,
    token_probs,
)

CPU = torch.device("cpu")


def philox_reference(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in plain integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (p1 >> 32) ^ c[1] ^ k[0],
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c[3] ^ k[1],
            p0 & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def test_reference_reproduces_the_published_vector() -> None:
    # Random123 known-answer test: philox4x32-10, counter and key all ones.
    ones = 0xFFFFFFFF
    assert philox_reference((ones,) * 4, (ones,) * 2) == (
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 17, -5])
def test_philox_matches_integer_reference(seed: int) -> None:
    positions = [0, 1, 77, 2**33 + 5]
    got = philox_uniform(torch.tensor([seed] * 4), torch.tensor(positions), Stream.ACCEPT)
    for value, position in zip(got.tolist(), positions, strict=True):
        bits = philox_reference(
            (position & 0xFFFFFFFF, position >> 32, int(Stream.ACCEPT), 0),
            (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
        )
        assert value == ((bits[0] >> 5) * 2**26 + (bits[1] >> 6)) / 2**53


def test_streams_are_different_draws() -> None:
    seeds, positions = torch.zeros(64, dtype=torch.int64), torch.arange(64)
    draws = [philox_uniform(seeds, positions, stream) for stream in Stream]
    for a, b in itertools.combinations(draws, 2):
        assert not torch.isclose(a, b).any()


def slow_probs(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p by sorting Python lists."""
    if params.temperature == 0:
        best = max(range(len(logits)), key=lambda i: (logits[i], -i))
        return [float(i == best) for i in range(len(logits))]
    weights = torch.tensor(logits).double().div(params.temperature).softmax(0).tolist()
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if params.top_k:
        for i in order[params.top_k :]:
            weights[i] = 0.0
    if params.top_p < 1:
        total, mass = sum(weights), 0.0
        for i in order:
            if mass / total >= params.top_p:
                weights[i] = 0.0
            mass += weights[i] if weights[i] else 0.0
    total = sum(weights)
    weights = [w / total for w in weights]
    if params.min_p:
        floor = params.min_p * max(weights)
        weights = [w if w >= floor else 0.0 for w in weights]
    total = sum(weights)
    return [w / total for w in weights]


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=0.9, top_k=5, top_p=0.8),
    SamplingParams(temperature=1.1, min_p=0.2),
    SamplingParams(temperature=1.0, top_k=6, top_p=0.9, min_p=0.05),
]


def test_token_probs_match_slow_reference() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(PARAMS), 11, generator=generator) * 2
    got = token_probs(logits, SamplingTensors.build(PARAMS, CPU))
    for row, params in enumerate(PARAMS):
        want = torch.tensor(slow_probs(logits[row].tolist(), params))
        torch.testing.assert_close(got[row].double(), want.double(), rtol=1e-5, atol=1e-7)


def test_batch_neighbours_do_not_change_a_row() -> None:
    logits = torch.randn(len(PARAMS), 50, generator=torch.Generator().manual_seed(1))
    together = token_probs(logits, SamplingTensors.build(PARAMS, CPU))
    for row, params in enumerate(PARAMS):
        alone = token_probs(logits[row : row + 1], SamplingTensors.build([params], CPU))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_lowest_id_on_a_tie(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 40, (64, 49152), generator=generator).to(dtype)
    want = [row.index(max(row)) for row in logits.tolist()]
    assert best_tokens(logits).tolist() == want


def test_inverse_cdf_never_returns_zero_weight() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0]]).repeat(4, 1)
    uniform = torch.tensor([0.0, 1 / 3 - 1e-9, 1 / 3 + 1e-9, 1.0 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(weights, uniform).tolist() == [1, 1, 3, 3]


def test_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0)).repeat(6, 1)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2, 3, 1, 2, 3)]
    positions = torch.tensor([5, 6, 7, 5, 6, 7])
    ids = sample(logits, SamplingTensors.build(params, CPU), positions, Stream.TARGET)
    assert ids[:3].tolist() == ids[3:].tolist()


def test_sampled_frequencies_follow_the_distribution() -> None:
    n = 40_000
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.0]])
    params = SamplingTensors.build([SamplingParams(temperature=1.0, seed=9)], CPU).repeat(n)
    ids = sample(logits.expand(n, -1), params, torch.arange(n), Stream.TARGET)
    counts = torch.bincount(ids, minlength=5).double()
    expected = logits[0].double().softmax(0) * n
    # G-test, 4 degrees of freedom; 23.5 is the 1e-4 quantile: false alarms once in 10,000.
    g = 2 * (counts * (counts / expected).log()).sum()
    assert g < 23.5


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop=\('a', ''\): a stop string must have at least"):
        SamplingParams(stop=("a", ""))
