"""Rotary angles, norms and the fused kernels of the block's small operations."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from runtime import kernel_library
from runtime.head_spec import RopeSpec
from runtime.kernel_library import load_kernels
from runtime.layers import RotaryEmbedding, norm_weight
from runtime.models.config import parse_config
from runtime.ops import BlockOps, TorchOps
from runtime.rope import inverse_frequencies
from runtime.verify import Verified
from tests.unit.runtime.model_fixtures import LLAMA3_ROPE, fused_kernels, kernel_cache

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["torch", "fused"])
def ops(request) -> BlockOps:
    if request.param == "torch":
        return TorchOps()
    return fused_kernels()


YARN = {
    "yarn": {},
    "yarn, all stated": {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, no whole dimensions": {"truncate": False},
    "yarn, mscale": {"mscale": 0.7, "mscale_all_dim": 1.1},
}


def rope_pair(kind: str) -> tuple[RopeSpec, LlamaRotaryEmbedding]:
    parameters = dict(LLAMA3_ROPE) if kind == "llama3" else {"rope_type": "default"}
    if kind == "llama3":
        parameters["original_max_position_embeddings"] = 8192
    if kind in YARN:
        parameters = {"rope_type": "yarn", "factor": 16.0} | YARN[kind]
        parameters["original_max_position_embeddings"] = 8192
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={**parameters, "rope_theta": 500000.0},
    )
    spec = parse_config(
        config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, generation={}, source="test"
    ).rope
    assert spec.kind == kind.partition(",")[0]
    return spec, LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("kind", ["default", "llama3", *YARN])
def test_rotation_equals_transformers_at_long_positions(kind, ops):
    spec, hf = rope_pair(kind)
    positions = torch.tensor([0, 1, 63, 4097, 8192, 65535, 131071])
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 4, 64, generator=generator)
    q, k = qkv[:, :2].clone(), qkv[:, 2:3].clone()
    cos, sin = hf(q, positions[None])
    q_wanted, k_wanted = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    untouched = qkv[:, 3].clone()
    ops.rotate(
        qkv, 3, RotaryEmbedding(spec, 64, device=CPU).angles(positions, torch.float32, end=131072)
    )
    assert torch.allclose(qkv[:, :2], q_wanted[0].transpose(0, 1), atol=1e-5)
    assert torch.allclose(qkv[:, 2:3], k_wanted[0].transpose(0, 1), atol=1e-5)
    assert torch.equal(qkv[:, 3], untouched)


def test_llama3_differs_from_default_at_long_wavelengths_only():
    default = RotaryEmbedding(RopeSpec(500000.0), 64, device=CPU)
    llama3 = RotaryEmbedding(rope_pair("llama3")[0], 64, device=CPU)
    positions = torch.tensor([5000])
    a = default.angles(positions, torch.float32, end=5001).cos_NC[0, :32]
    b = llama3.angles(positions, torch.float32, end=5001).cos_NC[0, :32]
    assert torch.equal(a[:8], b[:8])
    assert not torch.allclose(a[-12:], b[-12:], atol=1e-3)


@pytest.mark.parametrize("width", [32, 40])
def test_norm_adds_the_residual_in_place_and_equals_transformers(width, ops):
    generator = torch.Generator().manual_seed(0)
    x, delta = (torch.randn(5, width, generator=generator) * 3 for _ in range(2))
    hf = LlamaRMSNorm(width, eps=1e-5)
    hf.weight.data.uniform_(0.5, 1.5)
    total = x + delta
    got = ops.add_rms_norm(x, delta, norm_weight(hf.weight.data, eps=1e-5))
    assert torch.equal(x, total)
    assert torch.allclose(got, hf(total), rtol=1e-5, atol=1e-6)


def test_norm_of_one_plus_w_form(ops):
    x = torch.linspace(-1, 1, 32).view(1, 32)
    w = torch.linspace(-0.5, 0.5, 32)
    got = ops.add_rms_norm(x.clone(), None, norm_weight(w, eps=1e-6, plus_one=True))
    wanted = x / (x.square().mean() + 1e-6).sqrt() * (1 + w)
    assert torch.allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("width", [8, 12, 128])
def test_norm_of_heads_is_of_each_alone_and_leaves_the_others(width, ops):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 6, width, generator=generator) * 3
    hf = LlamaRMSNorm(width, eps=1e-5)
    hf.weight.data.uniform_(0.5, 1.5)
    before = qkv.clone()
    ops.norm_heads(qkv[:, 1:5], norm_weight(hf.weight.data, eps=1e-5))
    assert torch.allclose(qkv[:, 1:5], hf(before[:, 1:5]), rtol=1e-5, atol=1e-6)
    assert torch.equal(qkv[:, ::5], before[:, ::5])


def test_silu_mul_over_the_whole_range(ops):
    gate = torch.tensor([-1e4, -200.0, -90.0, -88.0, -20.0, -1.0, 0.0, 1.0, 20.0, 90.0, 1e4])
    up = torch.linspace(-2, 2, 11)
    got = ops.silu_mul(torch.cat((gate, up))[None])
    wanted = torch.nn.functional.silu(gate.double()) * up.double()
    assert torch.allclose(got[0].double(), wanted, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 16, 63, 64, 97, 4099])
def test_argmax_is_the_first_of_the_best(columns, dtype, ops):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, columns, generator=generator).to(dtype)
    logits[1] = -logits[1].abs() - 1
    logits[2] = 0.0
    logits[3] = -torch.inf
    logits[4, columns // 2 :] = 9.0
    wanted = [row.index(max(row)) for row in logits.tolist()]
    assert ops.argmax(logits).tolist() == wanted


def test_fused_bf16_rounds_once_and_keeps_nan():
    kernels = fused_kernels()
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(200, 96, generator=generator).bfloat16()
    wanted = TorchOps().silu_mul(gate_up.float()).bfloat16()
    got = kernels.silu_mul(gate_up)
    # One rounding of a float32 result: at most a tie apart from rounding torch's float32 result.
    assert ((got.float() - wanted.float()).abs() <= wanted.float().abs() * 2**-8).all()
    assert (got == wanted).float().mean() > 0.999
    norm = norm_weight(torch.ones(32), eps=1e-5)
    x = torch.ones(2, 32).bfloat16()
    x[1, 3] = float("nan")
    out = kernels.add_rms_norm(x, None, norm)
    assert out[1].isnan().all()
    assert not out[0].isnan().any()


def test_without_a_compiler_torch_is_used_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kernel_library.shutil, "which", lambda _: None)
    with caplog.at_level(logging.WARNING):
        assert load_kernels(tmp_path) is None
    assert "no g++ found" in caplog.text


def test_a_failing_compiler_is_reported_not_raised(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kernel_library, "_FLAGS", ("--no-such-flag",))
    with caplog.at_level(logging.WARNING):
        assert load_kernels(tmp_path) is None
    assert "did not compile" in caplog.text
    assert list((tmp_path / "kernels").iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["add_rms_norm", "rotate", "silu_mul", "argmax", "attend", "linear", "blocks"]
)
def test_a_kernel_that_does_nothing_is_found_before_it_is_used(name, dtype, monkeypatch, caplog):
    if name in ("linear", "blocks") and not fused_kernels().has_products(dtype):
        pytest.skip("no products of this dtype on this processor")
    make = kernel_library.CpuKernels

    def broken(library):
        kernels = make(library)
        kernels._functions[name, dtype] = lambda *_: None
        return kernels

    def poisoned(self, *shape, **options):
        return torch.full(shape, float("nan"), dtype=self.dtype)

    monkeypatch.setattr(kernel_library, "CpuKernels", broken)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)  # memory may happen to be right
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, float("nan")))
    with caplog.at_level(logging.WARNING):
        assert load_kernels(kernel_cache()) is None
    assert "disagree with torch" in caplog.text


def test_an_acceptance_that_does_nothing_is_found_before_it_is_used(monkeypatch, caplog):
    monkeypatch.setattr(
        kernel_library.CpuKernels,
        "accept_chain",
        lambda self, tokens, drafts: Verified(*(torch.zeros_like(tokens) for _ in range(3))),
    )
    with caplog.at_level(logging.WARNING):
        assert load_kernels(kernel_cache()) is None
    assert "disagree with torch" in caplog.text


def test_looked_up_angles_are_those_of_their_positions():
    spec = RopeSpec(theta=10000.0)
    rotary = RotaryEmbedding(spec, 20, device=CPU)
    for positions in ([5, 0, 1023], [1024, 3], [70000], [7]):
        got = rotary.angles(torch.tensor(positions), torch.bfloat16, end=max(positions) + 1)
        for row, position in enumerate(positions):
            angle = position * inverse_frequencies(spec, 20)
            assert torch.equal(got.cos_NC[row], angle.cos().bfloat16().repeat(2))
            assert torch.equal(got.sin_NC[row], torch.cat((-angle.sin(), angle.sin())).bfloat16())
