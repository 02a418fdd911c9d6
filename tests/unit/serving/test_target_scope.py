"""What vLLM is told of a quantised target, and what an export says about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from mtp_train.config import HeadConfig
from mtp_train.export import write_export
from mtp_train.export.record import EXPORT_NAME, ExportRecord
from mtp_train.heads.init import make_head_spec
from mtp_train.run_dir import read_json, write_json_atomic
from mtp_train.serving.target_scope import vllm_layout_for
from runtime.head_spec import save_head
from runtime.models.config import load_config
from runtime.models.loader import fingerprint_target
from runtime.models.quantisation import read_quantisation
from tests.unit.runtime.engine_fixtures import random_head_tensors
from tests.unit.runtime.model_fixtures import save_model
from tests.unit.runtime.quantised_fixtures import INT8_ROWS, stated, write_quantised


def test_the_draft_layer_is_left_out_of_a_quantised_target(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    assert vllm_layout_for("mimo", tmp_path).hf_overrides == {"num_nextn_predict_layers": 1}
    write_quantised(tmp_path, stated())
    overrides = vllm_layout_for("mimo", tmp_path).hf_overrides
    assert overrides["num_nextn_predict_layers"] == 1
    changed = overrides["quantization_config"]
    assert changed["config_groups"] == stated()["config_groups"]
    assert changed["ignore"] == ["lm_head", r"re:model\.layers\.2\..*"]
    quantisation = read_quantisation(overrides, "overrides")
    assert quantisation is not None
    assert quantisation.scheme_of("model.layers.2.mlp.up_proj.weight") is None
    assert quantisation.scheme_of("model.layers.1.mlp.up_proj.weight") is not None
    assert vllm_layout_for("eagle3", tmp_path).hf_overrides == {}


def test_a_target_that_leaves_it_out_already_is_not_changed(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    write_quantised(tmp_path, stated(ignore=["lm_head", r"re:model\.layers\.2\..*"]))
    assert vllm_layout_for("mimo", tmp_path).hf_overrides == {"num_nextn_predict_layers": 1}


def test_an_fp8_target_names_linears_one_by_one(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    raw = json.loads((tmp_path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": fp8}))
    changed = vllm_layout_for("mimo", tmp_path).hf_overrides["quantization_config"]
    assert "model.layers.2.mlp.down_proj" in changed["ignored_layers"]
    assert len(changed["ignored_layers"]) == 7


def test_linears_of_latent_attention_and_experts_are_named_as_vllm_asks(tmp_path: Path) -> None:
    raw = save_model(tmp_path, "deepseekv3").config.to_dict()
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    fp8 |= {"modules_to_not_convert": ["model.layers.0.mlp.up_proj"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": fp8}))
    changed = vllm_layout_for("deepseek", tmp_path).hf_overrides["quantization_config"]
    assert "ignored_layers" not in changed  # vLLM would read it instead of the other list
    first, *rest = changed["modules_to_not_convert"]
    assert first == "model.layers.0.mlp.up_proj"
    layer = f"model.layers.{raw['num_hidden_layers']}."
    parts = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert {layer + f"self_attn.{name}" for name in parts} < set(rest)
    assert {layer + "mlp.experts", layer + "mlp.shared_experts.gate_proj"} < set(rest)


@pytest.mark.parametrize("quantises_lm_head", [False, True])
def test_an_export_is_plain_and_says_what_its_target_is(
    quantises_lm_head: bool, tmp_path: Path
) -> None:
    target, head, out = tmp_path / "target", tmp_path / "head", tmp_path / "out"
    save_model(target, "llama")
    config = stated(ignore=[] if quantises_lm_head else ["lm_head"])
    meant = write_quantised(target, config)
    fingerprint = fingerprint_target(target, cache_dir=tmp_path / "cache")
    spec = make_head_spec(HeadConfig(), load_config(target), fingerprint=fingerprint)
    save_head(head, spec, random_head_tensors(spec))
    write_export(head, out, format="mimo", target_dir=target, unvalidated=True)
    assert "quantization_config" not in read_json(out / "config.json")
    with safe_open(out / "model.safetensors", framework="pt") as file:
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert file.get_tensor("lm_head.weight").equal(meant["lm_head.weight"])
    assert dtypes == {"F32"}
    record = ExportRecord.read(out / EXPORT_NAME)
    assert record.quantization.startswith("compressed-tensors int8-channel w8a16")
    assert r"re:model\\.layers\\.2\\..*" in record.commands["vllm"]
    text = (out / "README.md").read_text()
    assert "The weights here are float32 and not quantised. The target is: compressed-t" in text
    assert "says that this layer is not quantised" in text


def test_records_from_before_are_of_unquantised_targets(tmp_path: Path) -> None:
    target, head, out = tmp_path / "target", tmp_path / "head", tmp_path / "out"
    save_model(target, "llama")
    fingerprint = fingerprint_target(target, cache_dir=tmp_path / "cache")
    spec = make_head_spec(HeadConfig(), load_config(target), fingerprint=fingerprint)
    save_head(head, spec, random_head_tensors(spec))
    write_export(head, out, format="mimo", target_dir=target, unvalidated=True)
    raw = read_json(out / EXPORT_NAME)
    assert "A quantised copy of the target is another" in (out / "README.md").read_text()
    older = {k: v for k, v in raw.items() if k not in ("quantization", "hf_overrides")}
    write_json_atomic(out / EXPORT_NAME, older)
    record = ExportRecord.read(out / EXPORT_NAME)
    assert (record.quantization, record.hf_overrides) == ("", {"num_nextn_predict_layers": 1})


def test_groups_of_other_layers_do_not_reach_the_draft_layer(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    group = {"targets": [r"re:model\.layers\.[01]\..*"], "weights": INT8_ROWS}
    write_quantised(tmp_path, stated(group=group))
    assert vllm_layout_for("mimo", tmp_path).hf_overrides == {"num_nextn_predict_layers": 1}
