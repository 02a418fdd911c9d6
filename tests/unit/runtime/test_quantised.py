"""Quantised checkpoints: stored weights against what they stand for, rounded inputs against a slow
reference, and whole models against transformers with the compressed-tensors library.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from mtp_train.quantise import SCHEMES, WrittenScheme, quantise_target
from runtime.config import StoredWeights
from runtime.linear import PlainLinear
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import load_config
from runtime.models.loader import Target, load_target
from runtime.models.quantisation import InputScheme, read_quantisation
from runtime.quantised_linear import (
    InputRounding,
    IntProductLinear,
    RoundedInputLinear,
    ScaledMmLinear,
    SideBySideLinear,
    StaticRange,
    StoredLinear,
)
from runtime.stored_weight import StoredWeight, stack_weights, unpack_int8
from tests.unit.runtime.engine_fixtures import make_engine
from tests.unit.runtime.model_fixtures import random_ids, relative_error, save_model
from tests.unit.runtime.quantised_fixtures import (
    FP8,
    FP8_ROWS,
    INT8_ROWS,
    TOKENS,
    stated,
    write_quantised,
)

CPU = torch.device("cpu")


def load(
    path: Path, *, stored_weights: StoredWeights = "auto", use_kernels: bool = False
) -> Target:
    return load_target(
        path,
        dtype=torch.float32,
        device=CPU,
        use_kernels=use_kernels,
        stored_weights=stored_weights,
        cache_dir=path.parent / "cache",
    )


def states(target: Target) -> torch.Tensor:
    (rows,) = make_engine(target).forward_hidden([random_ids(40, seed=1)])
    return rows.hidden_TD


def random_int8(shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


@pytest.mark.parametrize("block", [(6, 10), (1, 10), (1, 4), (4, 3)])
@pytest.mark.parametrize("has_zero_point", [False, True])
def test_a_value_stands_for_itself_minus_zero_point_times_scale(
    block: tuple[int, int], has_zero_point: bool
) -> None:
    values_OI = random_int8((6, 10), seed=0)
    blocks = (math.ceil(6 / block[0]), math.ceil(10 / block[1]))
    scale_PQ = torch.rand(blocks, generator=torch.Generator().manual_seed(1))
    zero_PQ = random_int8(blocks, seed=2) if has_zero_point else None
    weight = StoredWeight(values_OI, scale_PQ, block, zero_PQ)
    wanted = torch.empty(6, 10)
    for row in range(6):
        for column in range(10):
            p, q = row // block[0], column // block[1]
            zero = 0 if zero_PQ is None else int(zero_PQ[p, q])
            wanted[row, column] = (int(values_OI[row, column]) - zero) * scale_PQ[p, q]
    assert torch.equal(weight.dense(torch.float32), wanted)
    assert torch.equal(weight.by_rows().dense(torch.float32), wanted)
    assert torch.equal(weight.by_rows().rows(2, 5).dense(torch.float32), wanted[2:5])
    stacked = stack_weights([weight, weight])
    assert stacked is not None
    assert torch.equal(stacked.dense(torch.float32), torch.cat([wanted, wanted]))


def test_weights_that_are_stored_differently_are_not_stacked() -> None:
    int8 = StoredWeight(random_int8((2, 4), seed=0), torch.ones(2, 1), (1, 4))
    groups = StoredWeight(random_int8((2, 4), seed=0), torch.ones(2, 2), (1, 2))
    fp8 = StoredWeight(torch.ones(2, 4).to(FP8), torch.ones(2, 1), (1, 4))
    assert stack_weights([int8, groups]) is None
    assert stack_weights([int8, fp8]) is None


def test_four_values_lie_in_a_word_lowest_byte_first() -> None:
    values_OI = random_int8((3, 10), seed=0)
    words = torch.zeros(3, 3, dtype=torch.int64)
    for row in range(3):
        for column in range(10):
            byte = int(values_OI[row, column]) + 128
            words[row, column // 4] |= byte << 8 * (column % 4)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    assert torch.equal(unpack_int8(packed, (3, 10)), values_OI)


def slow_rounding(x_MI: torch.Tensor, scheme: InputScheme) -> torch.Tensor:
    """Value by value; quotients in float32, for the largest value of a row is half a step off."""
    out = torch.empty_like(x_MI)
    for row, values in enumerate(x_MI):
        seen = values if scheme.per_token else x_MI.flatten()
        low, high = min(0.0, float(seen.min())), max(0.0, float(seen.max()))
        for column, value in enumerate(values):
            if scheme.kind == "fp8":
                scale = torch.tensor(max(-low, high)) / 448
                out[row, column] = (value / scale).clamp(-448, 448).to(FP8).float() * scale
                continue
            scale = torch.tensor(max(-low, high)) / 127.5
            zero = 0
            if not scheme.is_symmetric:
                scale = (torch.tensor(high) - low) / 255
                zero = round(min(127.0, max(-128.0, -128 - low / float(scale))))
            step = round(min(127.0, max(-128.0, float(value / scale + zero))))
            out[row, column] = (step - zero) * scale
    return out


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize(("kind", "is_symmetric"), [("int8", True), ("int8", False), ("fp8", True)])
def test_inputs_are_rounded_to_the_grid_of_their_row_or_tensor(
    kind: Any, is_symmetric: bool, per_token: bool
) -> None:
    x_MI = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    x_MI *= torch.arange(1, 8)[:, None]
    scheme = InputScheme(kind, per_token, is_dynamic=True, is_symmetric=is_symmetric)
    got = InputRounding(scheme)(x_MI)
    torch.testing.assert_close(got, slow_rounding(x_MI, scheme), rtol=1e-5, atol=1e-5)
    assert relative_error(got, x_MI) > 1e-3
    assert InputRounding(scheme)(torch.zeros(2, 4)).eq(0).all()
    assert InputRounding(scheme)(x_MI[:0]).shape == (0, 32)


def test_vllms_grid_has_127_steps_and_no_tie_at_the_largest_value() -> None:
    """Scaled rows are scaled outputs to the last bit there; on the library's grid some are not."""
    scheme = InputScheme("int8", per_token=True, is_dynamic=True)
    x_MI = -torch.rand(200, 8, generator=torch.Generator().manual_seed(0)) - 1
    largest = x_MI.min(1, keepdim=True).values
    ties = {}
    for grid in ("library", "vllm"):
        rounding = InputRounding(scheme, grid=grid)  # type: ignore[arg-type]
        scale, zero_point = rounding.scale(x_MI)
        ties[grid] = set(rounding.steps(largest, scale, zero_point).flatten().tolist())
    assert ties["library"] == {-127.0, -128.0}
    assert ties["vllm"] == {-127.0}


def test_a_stored_range_cuts_off_what_is_beyond_it() -> None:
    scheme = InputScheme("int8", per_token=False, is_dynamic=False, is_symmetric=False)
    rounding = InputRounding(scheme, StaticRange(0.5, zero_point=10))
    x_MI = torch.tensor([[0.0, 0.7, 1000.0, -1000.0]])
    assert rounding(x_MI).tolist() == [[0.0, 0.5, 58.5, -69.0]]


def test_an_integer_product_is_that_of_rounded_rows_and_plain_weights() -> None:
    weight = StoredWeight(random_int8((24, 32), seed=0), torch.rand(24, 1) / 100, (1, 32))
    rounding = InputRounding(InputScheme("int8", per_token=True, is_dynamic=True))
    assert IntProductLinear.can_hold(weight, rounding)
    x_MI, bias_O = torch.randn(5, 32), torch.randn(24)
    linear = IntProductLinear(weight, bias_O, dtype=torch.float32, rounding=rounding)
    wanted = F.linear(rounding(x_MI), weight.dense(torch.float32), bias_O)
    assert relative_error(linear(x_MI), wanted) < 1e-6
    assert linear(x_MI[:0]).shape == (0, 24)
    assert linear.num_bytes() == 24 * 32 + 24 * 4
    assert torch.equal(linear.dense_weight(), weight.dense(torch.float32))


@pytest.mark.parametrize("per_token", [True, False])
def test_an_fp8_product_is_that_of_rounded_rows_and_plain_weights(per_token: bool) -> None:
    """torch has the operator on CPUs too; its shapes and scales are those of GPUs."""
    values_OI = torch.randn(32, 64).to(FP8)
    weight = StoredWeight(values_OI, torch.rand(32, 1) / 10, (1, 64))
    rounding = InputRounding(InputScheme("fp8", per_token=per_token, is_dynamic=True))
    assert ScaledMmLinear.can_hold(weight, rounding)
    x_MI, bias_O = torch.randn(6, 64), torch.randn(32)
    linear = ScaledMmLinear(weight, bias_O, dtype=torch.float32, rounding=rounding)
    wanted = F.linear(rounding(x_MI), weight.dense(torch.float32), bias_O)
    assert relative_error(linear(x_MI), wanted) < 5e-3  # its results are bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("per_token", [True, False])
def test_an_fp8_product_on_a_gpu_is_that_on_a_cpu(per_token: bool) -> None:
    device = torch.device("cuda")
    weight = StoredWeight(torch.randn(32, 64).to(FP8), torch.rand(32, 1) / 10, (1, 64))
    rounding = InputRounding(InputScheme("fp8", per_token=per_token, is_dynamic=True))
    linear = ScaledMmLinear(weight.to(device), None, dtype=torch.bfloat16, rounding=rounding)
    x_MI = torch.randn(6, 64).bfloat16()
    wanted = F.linear(rounding(x_MI.float()), weight.dense(torch.float32))
    assert relative_error(linear(x_MI.to(device)).cpu().float(), wanted) < 1e-2


def test_sizes_that_an_fp8_product_cannot_have_are_made_dense() -> None:
    weight = StoredWeight(torch.randn(32, 24).to(FP8), torch.rand(32, 1), (1, 24))
    rounding = InputRounding(InputScheme("fp8", per_token=True, is_dynamic=True))
    assert not ScaledMmLinear.can_hold(weight, rounding)
    groups = StoredWeight(torch.randn(32, 64).to(FP8), torch.rand(32, 2), (1, 32))
    assert not ScaledMmLinear.can_hold(groups, rounding)
    assert not ScaledMmLinear.can_hold(weight, None)


def test_parts_side_by_side_are_their_outputs_one_after_the_other() -> None:
    first, second = torch.randn(3, 8), torch.randn(5, 8)
    rounding = InputRounding(InputScheme("int8", per_token=True, is_dynamic=True))
    parts = (RoundedInputLinear(PlainLinear(first), rounding), PlainLinear(second))
    x_MI = torch.randn(4, 8)
    wanted = torch.cat([rounding(x_MI) @ first.t(), x_MI @ second.t()], 1)
    assert torch.allclose(SideBySideLinear(parts)(x_MI), wanted, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3moe", "deepseekv3"])
@pytest.mark.parametrize("stored_weights", ["dense", "stored"])
def test_weights_alone_give_the_states_of_what_they_stand_for(
    family: str, stored_weights: StoredWeights, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", family)
    ignore = ["lm_head", r"re:.*mlp\.gate$", "model.layers.1.self_attn.k_proj"]
    meant = write_quantised(tmp_path / "model", stated(ignore=ignore))
    target = load(tmp_path / "model", stored_weights=stored_weights)
    save_model(tmp_path / "plain", family)
    exact = states(load(tmp_path / "plain"))
    save_file(meant, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    wanted = states(load(tmp_path / "plain"))
    assert relative_error(states(target), wanted) < 1e-5
    assert relative_error(wanted, exact) > 1e-4
    down = getattr(target.model.blocks[0].mlp, "down", None)
    if down is not None:
        assert isinstance(down.linear, StoredLinear) == (stored_weights == "stored")
    if stored_weights == "stored" and down is not None:
        outputs, inputs = down.linear.out_features, down.linear.in_features
        assert down.linear.num_bytes() == outputs * inputs + 4 * outputs


def test_integers_are_multiplied_where_both_sides_are_int8(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    ignore = ["lm_head", "model.layers.1.self_attn.k_proj"]
    write_quantised(tmp_path / "model", stated(ignore=ignore, group={"input_activations": TOKENS}))
    auto, dense = (load(tmp_path / "model", stored_weights=way) for way in ("auto", "dense"))
    first, second = (block.attention.qkv for block in auto.model.blocks)  # type: ignore[attr-defined]
    assert isinstance(first, IntProductLinear)
    assert isinstance(second, SideBySideLinear)
    x_ND = torch.randn(6, 32)
    wanted = dense.model.blocks[0].attention.qkv(x_ND)  # type: ignore[attr-defined]
    assert relative_error(first(x_ND), wanted) < 1e-5


def test_fused_kernels_compute_dense_int8_weights(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", hidden_size=64, intermediate_size=96)
    write_quantised(tmp_path / "model", stated())
    fused = load(tmp_path / "model", use_kernels=True)
    if fused.model.blocks[0].fused is None:
        pytest.skip("no kernels here")
    assert relative_error(states(fused), states(load(tmp_path / "model"))) < 1e-5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": (
        {"quant_method": "awq"},
        r"quant_method='awq'; allowed: 'fp8', 'compressed-tensors'",
    ),
    "format": ({"format": "nvfp4-pack-quantized"}, r"format='nvfp4-pack-quantized'; allowed"),
    "bits": (
        {"group": {"weights": INT8_ROWS | {"num_bits": 4}}},
        r"weights.num_bits=4; allowed: 8",
    ),
    "strategy": (
        {"group": {"weights": INT8_ROWS | {"strategy": "attn_head"}}},
        r"config_groups.group_0.weights.strategy='attn_head'; allowed: 'tensor', 'channel'",
    ),
    "mixed": (
        {"group": {"weights": FP8_ROWS, "input_activations": TOKENS}},
        r"input_activations.type: int8 inputs of fp8 weights; allowed: the same",
    ),
    "order": (
        {"group": {"weights": INT8_ROWS | {"actorder": "group"}}},
        r"weights.actorder='group'; allowed: null",
    ),
    "outputs": (
        {"group": {"output_activations": TOKENS}},
        r"group_0.output_activations=.*; allowed: null",
    ),
    "targets": ({"group": {"targets": ["LlamaMLP"]}}, r"targets: 'LlamaMLP'; allowed: names"),
    "transform": ({"transform_config": {"a": 1}}, r"transform_config={'a': 1}; allowed: nothing"),
    "kv": (
        {"kv_cache_scheme": TOKENS | {"dynamic": False}},
        r"kv_cache_scheme.type='int'; allowed",
    ),
    "block": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        r"weight_block_size=\[128\]; allowed: two",
    ),
    "activation": (
        {"quant_method": "fp8", "activation_scheme": "odd"},
        r"activation_scheme='odd'; allowed: 'dynamic', 'static'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_field_and_value(name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        read_quantisation({"quantization_config": stated(**changes)}, "conf")


def test_names_have_precedence_over_patterns_and_those_over_classes() -> None:
    config = stated(ignore=["lm_head", r"re:.*\.2\..*"])
    groups = config["config_groups"]
    groups["group_1"] = {"targets": [r"re:.*down_proj"], "weights": FP8_ROWS}
    groups["group_2"] = {
        "targets": ["model.layers.1.mlp.down_proj"],
        "weights": INT8_ROWS,
        "input_activations": TOKENS,
    }
    quantisation = read_quantisation({"quantization_config": config}, "conf")
    assert quantisation is not None

    def label(name: str) -> str | None:
        scheme = quantisation.scheme_of(name)
        return None if scheme is None else scheme.label

    assert label("model.layers.0.mlp.up_proj.weight") == "int8-channel w8a16"
    assert label("model.layers.0.mlp.down_proj.weight") == "fp8-channel w8a16"
    assert label("model.layers.1.mlp.down_proj.weight") == "int8-channel w8a8-token-dynamic"
    assert label("model.layers.2.mlp.down_proj.weight") is None
    assert label("lm_head.weight") is None
    assert label("model.embed_tokens.weight") is None


def test_a_checkpoint_that_is_not_what_its_configuration_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_model(path, "llama")
    name = "model.layers.0.mlp.up_proj.weight"
    write_quantised(path, stated())
    tensors = load_file(path / "model.safetensors")

    def refuse(words: str, **changes: torch.Tensor) -> None:
        save_file(tensors | changes, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=words):
            load(path)

    refuse("up_proj.weight is stored as F32, config.json says int8", **{name: torch.ones(48, 32)})
    refuse(r"up_proj.weight_scale has shape \[3\]", **{name + "_scale": torch.ones(3)})
    refuse("unexpected tensor .*g_idx", **{name + "_g_idx": torch.ones(3)})
    lm_head = random_int8((97, 32), seed=0)
    refuse("lm_head.weight is stored in int8; config.json has to", **{"lm_head.weight": lm_head})


def test_rounded_inputs_that_would_not_be_computed_are_refused(tmp_path: Path) -> None:
    rounded = {"group": {"input_activations": TOKENS}}
    for family, ignore, words in (
        ("deepseekv3", ["lm_head", r"re:.*mlp\.gate$"], "with latent attention"),
        ("qwen3moe", ["lm_head"], "rounds the inputs of model.layers.0.mlp.gate"),
        ("llama", [], "rounds the inputs of lm_head"),
    ):
        save_model(tmp_path / family, family)
        write_quantised(tmp_path / family, stated(ignore=ignore, **rounded))
        with pytest.raises(ValueError, match=words):
            load(tmp_path / family)


def test_fp8_per_tensor_checkpoints_round_their_inputs(tmp_path: Path) -> None:
    """``quant_method=fp8`` without blocks; ``activation_scheme=static`` has ranges in the file."""
    save_model(tmp_path / "model", "llama")
    file = tmp_path / "model" / "model.safetensors"
    stored = {}
    for name, tensor in load_file(file).items():
        stored[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max() / 448
            stored[name] = (tensor / scale).to(FP8)
            stored[name + "_scale"] = scale
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02)
    save_file(stored, file, {"format": "pt"})
    path = tmp_path / "model" / "config.json"
    raw = json.loads(path.read_text())
    found = []
    for scheme in ("static", "dynamic"):
        config = {"quant_method": "fp8", "activation_scheme": scheme}
        path.write_text(json.dumps(raw | {"quantization_config": config}))
        if scheme == "dynamic":
            kept = {n: t for n, t in stored.items() if not n.endswith("input_scale")}
            save_file(kept, file, {"format": "pt"})
        target = load(tmp_path / "model")
        attention = target.model.blocks[0].attention
        assert isinstance(attention.qkv, RoundedInputLinear)  # type: ignore[attr-defined]
        found.append(states(target))
    assert relative_error(*found) > 1e-3


LIBRARY = {
    **SCHEMES,
    "int8-asymmetric-inputs": WrittenScheme(
        {"type": "int", "strategy": "channel", "symmetric": False},
        {"type": "int", "strategy": "token", "symmetric": False},
    ),
    "int8-tensor": WrittenScheme(
        {"type": "int", "strategy": "tensor"}, {"type": "int", "strategy": "tensor"}
    ),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_logits_are_those_of_transformers_with_the_library(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    save_model(tmp_path / "model", "llama", vocab_size=97)
    quantise_target(tmp_path / "model", tmp_path / "out", LIBRARY[name])
    ids = random_ids(24, seed=3)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = hf(torch.tensor([ids])).logits[0]
    plain = load(tmp_path / "model")
    for stored_weights in ("dense", "stored", "auto"):
        target = load(tmp_path / "out", stored_weights=stored_weights)  # type: ignore[arg-type]
        (rows,) = make_engine(target).forward_hidden([ids])
        logits = target.model.logits(rows.hidden_TD)
        assert relative_error(logits, wanted) < 1e-4
    (exact,) = make_engine(plain).forward_hidden([ids])
    assert relative_error(plain.model.logits(exact.hidden_TD), wanted) > 1e-3


def test_packed_zero_points_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    """transformers 5.24 refuses to load them, so the library's own decompression is asked."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    save_model(tmp_path / "model", "llama")
    fields = {"type": "int", "strategy": "group", "group_size": 16, "symmetric": False}
    quantise_target(tmp_path / "model", tmp_path / "out", WrittenScheme(fields))
    checkpoint = Checkpoint.of(tmp_path / "out", load_config(tmp_path / "out"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=8, **fields))
    for name in ("self_attn.k_proj.", "mlp.down_proj."):
        prefix = "model.layers.1." + name
        own = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
        assert own["weight_zero_point"].any()
        wanted = PackedQuantizationCompressor.decompress(own, scheme)["weight"]
        got = checkpoint.read(prefix + "weight", dtype=torch.float32, device=CPU)
        assert torch.equal(got, wanted)


def test_an_unquantised_configuration_has_no_quantisation() -> None:
    assert read_quantisation({}, "conf") is None
    with pytest.raises(ValueError, match="quantization_config='x'; expected an object"):
        read_quantisation({"quantization_config": "x"}, "conf")
