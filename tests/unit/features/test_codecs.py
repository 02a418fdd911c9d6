from __future__ import annotations

import pytest
import torch

from mtp_train.config import Codec
from mtp_train.features.codecs import (
    FP8_MAX,
    bytes_per_row,
    decode,
    encode,
    storable_rows,
)


def round_trip(hidden_ND: torch.Tensor, codec: Codec) -> torch.Tensor:
    return decode(encode(hidden_ND, codec), dtype=torch.float32)


@pytest.fixture
def rows_ND() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scales_N = torch.logspace(-20, 20, 64)
    return torch.randn(64, 33, generator=generator) * scales_N[:, None]


def test_fp32_is_exact(rows_ND: torch.Tensor) -> None:
    assert torch.equal(round_trip(rows_ND, "fp32"), rows_ND)


def test_bf16_states_survive_the_bf16_codec_exactly(rows_ND: torch.Tensor) -> None:
    states_ND = rows_ND.bfloat16()
    assert torch.equal(decode(encode(states_ND, "bf16"), dtype=torch.bfloat16), states_ND)


def test_fp8_error_is_half_a_unit_in_the_last_place(rows_ND: torch.Tensor) -> None:
    """e4m3 has 3 mantissa bits: relative error 2^-4, and 2^-10 of the scale below 2^-6."""
    scale_N = rows_ND.abs().amax(1) / FP8_MAX
    bound_ND = torch.maximum(rows_ND.abs() * 2**-4, (scale_N * 2**-10)[:, None]) * (1 + 1e-5)
    error_ND = (round_trip(rows_ND, "fp8_e4m3") - rows_ND).abs()
    assert (error_ND <= bound_ND).all()
    assert error_ND.max() > 0


def test_fp8_keeps_the_largest_value_of_every_row(rows_ND: torch.Tensor) -> None:
    largest_N = rows_ND.abs().amax(1)
    torch.testing.assert_close(
        round_trip(rows_ND, "fp8_e4m3").abs().amax(1), largest_N, rtol=1e-6, atol=0
    )


def test_fp8_scale_is_per_row() -> None:
    rows_ND = torch.tensor([[1e-3, 2e-3], [1e3, 2e3]])
    torch.testing.assert_close(round_trip(rows_ND, "fp8_e4m3"), rows_ND, rtol=2**-4, atol=0)


@pytest.mark.parametrize("codec", ["bf16", "fp8_e4m3", "fp32"])
def test_zero_rows_stay_zero(codec: Codec) -> None:
    assert torch.equal(round_trip(torch.zeros(2, 8), codec), torch.zeros(2, 8))


@pytest.mark.parametrize("codec", ["bf16", "fp8_e4m3", "fp32"])
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 3e38])
def test_tiny_and_huge_rows_stay_finite(codec: Codec, magnitude: float) -> None:
    rows_ND = torch.tensor([[magnitude, -magnitude, magnitude / 3, 0.0]])
    assert storable_rows(rows_ND, codec).all()
    result_ND = round_trip(rows_ND, codec)
    assert result_ND.isfinite().all()
    assert ((result_ND - rows_ND).abs() <= rows_ND.abs() / 8 + 1e-40).all()


@pytest.mark.parametrize("codec", ["bf16", "fp8_e4m3", "fp32"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_told_apart(codec: Codec, bad: float) -> None:
    rows_ND = torch.ones(3, 4)
    rows_ND[1, 2] = bad
    assert storable_rows(rows_ND, codec).tolist() == [True, False, True]


def test_a_row_that_would_round_to_infinity_in_bf16_is_told_apart() -> None:
    rows_ND = torch.full((1, 2), torch.finfo(torch.float32).max)
    assert rows_ND.bfloat16().isinf().all()
    assert storable_rows(rows_ND, "bf16").tolist() == [False]
    assert storable_rows(rows_ND, "fp32").tolist() == [True]


def test_bytes_per_row_counts_the_scale() -> None:
    rows_ND = torch.ones(1, 7)
    for codec in ("bf16", "fp8_e4m3", "fp32"):
        rows = encode(rows_ND, codec)
        scale_bytes = 0 if rows.scale_N is None else rows.scale_N.nbytes
        assert bytes_per_row(codec, 7) == rows.hidden_ND.nbytes + scale_bytes
