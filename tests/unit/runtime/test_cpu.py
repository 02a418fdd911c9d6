"""Packed linear weights, threads and the dtype probe."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional as F

from runtime import cpu
from runtime.cpu import (
    OneDnnLinear,
    best_dtype,
    can_pack,
    choose_linear,
    has_fast_bf16,
    set_threads,
)
from runtime.linear import PlainLinear
from runtime.panel_linear import PanelLinear
from runtime.processor import count_physical_cores
from tests.unit.runtime.model_fixtures import fused_kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 4, 16, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_equals_plain(dtype, has_bias, rows):
    if not can_pack(dtype, CPU):
        pytest.skip("weights cannot be packed here")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(97, 50, generator=generator).to(dtype)
    bias = torch.randn(97, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(rows, 50, generator=generator).to(dtype)
    got = OneDnnLinear(weight, bias)(x)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert got.dtype is dtype
    assert torch.allclose(got, F.linear(x, weight, bias), rtol=tolerance, atol=10 * tolerance)


def test_the_plain_weight_comes_back_bit_for_bit():
    weight = torch.randn(33, 20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(PlainLinear(weight).dense_weight(), weight)
    if can_pack(weight.dtype, CPU):
        assert torch.equal(OneDnnLinear(weight).dense_weight(), weight)


def test_linears_are_panels_with_kernels_and_packed_or_plain_without(monkeypatch):
    weight = torch.zeros(32, 20, dtype=torch.bfloat16)
    kernels = fused_kernels()
    panels = kernels.has_products(torch.bfloat16)
    packed = can_pack(torch.bfloat16, CPU)
    fallback = OneDnnLinear if packed else PlainLinear
    assert type(choose_linear(weight.dtype, CPU)(weight, None)) is fallback
    make = choose_linear(weight.dtype, CPU, kernels)
    assert type(make(weight, None)) is (PanelLinear if panels else fallback)
    assert type(make(weight[:, :19].contiguous(), None)) is fallback  # 19 bfloat16: no whole words
    monkeypatch.setattr(cpu, "can_pack", lambda dtype, device: False)
    assert type(choose_linear(weight.dtype, CPU)(weight, None)) is PlainLinear


def test_missing_private_operators_fall_back_with_a_warning(monkeypatch, caplog):
    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute")

    monkeypatch.setattr(cpu, "_reorder", missing)
    with caplog.at_level(logging.WARNING):
        assert not can_pack(torch.float32, CPU)
    assert "using F.linear" in caplog.text


def test_wrong_private_operators_fall_back_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(cpu, "_packed_linear", lambda x, w, b: F.linear(x, w.to_dense()) + 1)
    with caplog.at_level(logging.WARNING):
        assert not can_pack(torch.float32, CPU)
    assert "other results" in caplog.text


def test_a_packed_weight_that_does_not_come_back_exactly_is_not_used(monkeypatch, caplog):
    reorder = cpu._reorder
    monkeypatch.setattr(cpu, "_reorder", lambda weight: reorder(weight * (1 + 1e-6)))
    with caplog.at_level(logging.WARNING):
        assert not can_pack(torch.float32, CPU)
    assert "other results" in caplog.text


def test_other_dtypes_and_devices_are_not_packed():
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize("name", ["_is_avx512_bf16_supported", "_is_amx_tile_supported"])
def test_a_missing_private_probe_is_replaced_by_the_flags_of_the_processor(
    name, monkeypatch, caplog
):
    monkeypatch.delattr(torch.cpu, name)
    for flags, wanted in (({"avx512_bf16", "fma"}, True), ({"amx_bf16"}, True), ({"fma"}, False)):
        monkeypatch.setattr(cpu, "processor_flags", lambda flags=flags: flags)
        with caplog.at_level(logging.INFO):
            assert has_fast_bf16() is wanted
        assert name in caplog.text


def test_threads_and_dtype():
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == 1
        assert torch.get_num_threads() == 1
        assert set_threads(0) == count_physical_cores()
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="num_threads=-1"):
        set_threads(-1)
    assert best_dtype() in (torch.bfloat16, torch.float32)
