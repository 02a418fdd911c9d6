"""Facts of targets: weights as published, what a config.json can lack, names that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtp_train.config import HeadConfig
from mtp_train.plan.facts import (
    count_weights,
    find_known,
    known_targets,
    parse_facts,
    plan_head_spec,
    read_facts,
)
from runtime.models.config import load_config
from tests.unit.runtime.model_fixtures import save_llama

# The `total` that the published safetensors indexes state.
PUBLISHED = {
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Qwen3-8B": 8_190_735_360,
    "DeepSeek-V2-Lite": 15_706_484_224,
}


def test_the_weights_of_every_known_target_are_those_published() -> None:
    facts = {
        name: parse_facts(raw, name=name, source=name) for name, raw in known_targets().items()
    }
    assert {name: fact.num_weights for name, fact in facts.items()} == PUBLISHED
    for name, fact in facts.items():
        assert (fact.num_active_weights < fact.num_weights) == (name == "DeepSeek-V2-Lite")
        assert (fact.latent is None) == (name != "DeepSeek-V2-Lite")
        assert fact.is_runnable


def test_latent_attention_keeps_one_latent_and_one_rotary_key_per_layer() -> None:
    name, raw = find_known("deepseek-ai/DeepSeek-V2-Lite-Chat") or pytest.fail("not known")
    assert parse_facts(raw, name=name, source=name).kv_width == 512 + 64


@pytest.mark.parametrize(
    "given", ["Llama-3.1-8B", "llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"]
)
def test_a_known_target_is_found_under_its_usual_names(given: str) -> None:
    found = find_known(given)
    assert found is not None
    assert found[0] == "Llama-3.1-8B"
    assert find_known("Llama-9") is None


def test_weights_and_head_of_a_directory_are_those_of_its_tensor_list(tmp_path: Path) -> None:
    save_llama(tmp_path)
    model = load_config(tmp_path)
    expected = 0
    for shape in model.tensor_shapes().values():
        size = 1
        for length in shape:
            size *= length
        expected += size
    facts = read_facts(tmp_path)
    assert facts.num_weights == facts.num_active_weights == expected
    assert read_facts(tmp_path / "config.json").num_weights == expected
    width, inner = model.hidden_size, model.intermediate_size
    linears = 2 * width * width + 2 * width * (model.q_dim + model.kv_dim) + 3 * width * inner
    assert count_weights(plan_head_spec(facts, HeadConfig())) == linears + 5 * width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            r"model_type='gpt2'; a plan can be made for llama, mistral, qwen2, qwen3",
        ),
        ({"hidden_size": None}, r"config.json: hidden_size=None; expected a positive integer"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config.quant_method=None; allowed"),
    ],
)
def test_a_configuration_that_cannot_be_counted_is_refused_by_name(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    raw = known_targets()["Llama-3.1-8B"] | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        read_facts(tmp_path)


def test_quantised_weights_take_a_byte_and_their_scales() -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128}
    quantised = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }
    }
    raw = known_targets()["Llama-3.1-8B"]
    plain = parse_facts(raw, name="a", source="a")
    facts = parse_facts(raw | quantised, name="a", source="a")
    linears = plain.num_weights - plain.num_embedding_weights - 65 * 4096
    assert facts.num_stored_weights == linears
    assert facts.num_scales == linears // 128
    others = plain.num_weights - linears
    assert facts.weight_bytes(2, stored=True) == linears + 4 * linears // 128 + 2 * others
    assert facts.weight_bytes(2, stored=False) == plain.weight_bytes(2, stored=True)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        read_facts(tmp_path)
