"""What `mtp inspect` says: which format, what is wrong, what each engine would do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.config import ExportFormat, ForeignConfig
from mtp_train.foreign.formats import FORMATS
from mtp_train.foreign.inspection import inspect_head
from mtp_train.foreign.readers import READERS
from mtp_train.foreign.sizes import read_target
from mtp_train.run_dir import read_json
from runtime.head_spec import SPEC_VERSION
from tests.unit.export.test_eagle_layouts import export, make_head, make_target
from tests.unit.foreign.heads import (
    AUTO,
    DEFAULT_LAYERS,
    IDS,
    NARROW,
    NUM_LAYERS,
    Tensors,
    bring_in,
    change_config,
    change_tensors,
    codes,
    look,
    make_export,
    make_medusa,
    outcomes,
    put,
    rename,
    why,
)

ROPE = {"rope_theta": 10000.0}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 11,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 1,
    **ROPE,
}


def layer(prefix: str, *, inputs: int = 32, norms: bool = False) -> Tensors:
    shapes = {
        "self_attn.q_proj.weight": (32, inputs),
        "self_attn.k_proj.weight": (16, inputs),
        "self_attn.v_proj.weight": (16, inputs),
        "self_attn.o_proj.weight": (32, 32),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
    }
    if norms:
        shapes |= {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
    return {prefix + name: torch.rand(shape) for name, shape in shapes.items()}


def test_every_format_has_a_reader() -> None:
    assert READERS.keys() == FORMATS.keys()
    assert SPEC_VERSION == 4, "a new field of HeadSpec has to be said by every reader"


@pytest.mark.parametrize(
    ("format", "key", "engines"),
    [
        ("mimo", "mimo", {"vLLM": "loads", "SGLang": "loads"}),
        ("eagle3", "eagle3", {"vLLM": "loads", "SGLang": "loads"}),
        ("medusa", "medusa", {"vLLM": "loads", "SGLang": "cannot"}),
        ("speculators", "speculators_eagle3", {"vLLM": "loads", "SGLang": "cannot"}),
        ("eagle", "eagle", {"vLLM": "loads", "SGLang": "loads, drafts wrongly"}),
        ("eagle_sglang", "eagle", {"vLLM": "refuses", "SGLang": "loads"}),
    ],
)
def test_our_own_exports_are_clean_with_their_target(
    format: ExportFormat, key: str, engines: dict[str, str], tmp_path: Path
) -> None:
    out = make_export(tmp_path, format)
    inspection = look(out)
    assert inspection.format is not None
    assert inspection.format.key == key
    assert not inspection.has_errors
    assert not inspection.why_not_read
    assert outcomes(inspection) == engines
    beside = look(out, target_dir=tmp_path / "target")
    assert codes(beside) <= {"fingerprint", "layer-ids"}


def test_an_export_with_its_record_is_held_against_it(tmp_path: Path) -> None:
    make_head(tmp_path, {**DEFAULT_LAYERS, "layer_ids": (1, 3)}, ids=IDS)
    out = export(tmp_path, "eagle3")
    assert not look(out, target_dir=tmp_path / "target").findings
    change_tensors(out, lambda t: t["norm.weight"].mul_(2))
    assert "changed" in codes(look(out))


def test_a_native_head_is_one(tmp_path: Path) -> None:
    make_head(tmp_path, DEFAULT_LAYERS, ids=IDS, num_layers=NUM_LAYERS)
    inspection = look(tmp_path / "head", target_dir=tmp_path / "target")
    assert inspection.format is not None
    assert inspection.format.key == "native"
    assert not inspection.findings
    make_target(tmp_path / "other", num_layers=NUM_LAYERS, rms_norm_eps=1e-6)
    other = look(tmp_path / "head", target_dir=tmp_path / "other")
    assert codes(other) == {"fingerprint", "target-eps"}
    assert not other.has_errors


@pytest.mark.parametrize(
    ("change", "code", "vllm", "sglang"),
    [
        pytest.param(
            lambda t: t.pop("layers.0.hidden_norm.weight"),
            "tensor-missing",
            "stays at ones without a word",
            "stays at ones without a word",
            id="missing norm",
        ),
        pytest.param(
            lambda t: t.pop("layers.0.mlp.up_proj.weight"),
            "tensor-missing",
            "stays uninitialised memory without a word",
            "stays uninitialised memory without a word",
            id="missing linear",
        ),
        pytest.param(
            lambda t: t.update({"layers.0.extra.weight": torch.ones(2)}),
            "tensor-unexpected",
            "layers.0.extra.weight: it has no such parameter",
            "skips layers.0.extra.weight without a word",
            id="unexpected",
        ),
        pytest.param(
            lambda t: t.update({"fc.weight": t["fc.weight"].t().contiguous()}),
            "tensor-shape",
            "fc.weight: of another shape",
            "fc.weight: of another shape",
            id="swapped shape",
        ),
        pytest.param(
            lambda t: t.update(d2t=torch.tensor(IDS)),
            "d2t-absolute",
            "draft other tokens, without a word",
            "draft other tokens, without a word",
            id="absolute d2t",
        ),
        pytest.param(
            lambda t: t.update(d2t=t["d2t"] + 50),
            "d2t-values",
            "d2t",
            "d2t",
            id="d2t beyond the vocabulary",
        ),
        pytest.param(
            lambda t: t.update({"lm_head.weight": torch.rand(11, 32)[t["d2t"]]}),
            "lm-head-rows",
            "picked by offsets",
            "picked by offsets",
            id="lm_head pruned by offsets",
        ),
    ],
)
def test_faults_of_an_eagle3_directory(
    change: Callable[[Tensors], object], code: str, vllm: str, sglang: str, tmp_path: Path
) -> None:
    out = make_export(tmp_path, "eagle3")
    change_tensors(out, change)
    inspection = look(out)
    assert code in {f.code for f in inspection.findings if f.severity == "error"}
    assert vllm in why(inspection, "vLLM")
    assert sglang in why(inspection, "SGLang")
    assert "loads" not in outcomes(inspection).values()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda c: c.update(tie_word_embeddings=True), "tied"),
        (lambda c: c.pop("draft_vocab_size"), "draft-vocab-size"),
        (lambda c: c["rope_parameters"].update(rope_theta=5e5), "rope-schemas"),
        (lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")), "rope-theta"),
        (lambda c: c.update(fc_norm=False, num_aux_hidden_states=2), "target-width"),
        (lambda c: c.pop("hidden_size"), "config-key"),
        (lambda c: c.pop("rms_norm_eps"), "config-default"),
        (lambda c: c.update(norm_before_residual=True), "norm-before-residual"),
        (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[4, 2, 3]), "layer-order"),
        (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 3]), "layer-count"),
        (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3]), "layer-ids-vllm-only"),
        (
            lambda c: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
            "layer-ids-sglang-only",
        ),
    ],
)
def test_keys_that_mislead_engines_are_named(
    change: Callable[[dict[str, Any]], object], code: str, tmp_path: Path
) -> None:
    out = make_export(tmp_path, "eagle3")
    change_config(out, change)
    assert code in codes(look(out))


def test_a_list_for_the_whole_vocabulary_stops_vllm(tmp_path: Path) -> None:
    out = make_export(tmp_path, "speculators")
    head = torch.rand(11, 32)
    change_config(out, lambda c: c.update(draft_vocab_size=11))
    change_tensors(
        out,
        lambda t: t.update({"lm_head.weight": head, "d2t": torch.zeros(11, dtype=torch.int64)}),
    )
    inspection = look(out)
    assert "d2t-whole-vocabulary" in codes(inspection)
    assert outcomes(inspection)["vLLM"] == "refuses"
    assert not inspection.why_not_read


def test_a_missing_norm_stops_vllm_in_an_mtp_head_only(tmp_path: Path) -> None:
    out = make_export(tmp_path, "mimo")
    change_tensors(out, lambda t: t.pop("model.mtp_layers.0.token_layernorm.weight"))
    assert outcomes(look(out)) == {"vLLM": "refuses", "SGLang": "loads, drafts wrongly"}


def test_a_head_narrower_than_its_target_is_recognised(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3", **NARROW)
    change_config(out, lambda c: c.pop("target_hidden_size"))
    assert "target-width" in codes(look(out))
    change_config(out, lambda c: c.update(target_hidden_size=32))
    inspection = look(out, target_dir=tmp_path / "target")
    assert not inspection.has_errors
    assert not inspection.why_not_read
    facts = dict(inspection.reading.facts)  # type: ignore[union-attr]
    assert "32 wide each" in facts["reads"]
    assert outcomes(inspection) == {"vLLM": "loads", "SGLang": "loads"}
    assert "puts the target's embedding" not in why(inspection, "SGLang")
    wide = make_target(tmp_path / "wide", num_layers=NUM_LAYERS, hidden_size=64)
    beside = look(out, target_dir=Path(wide.path))
    assert "target-hidden-size" in {f.code for f in beside.findings if f.severity == "error"}


def test_an_embedding_of_its_own_is_told_beside_the_target(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    change_tensors(out, lambda t: t["embed_tokens.weight"].mul_(2))
    assert "copy-differs" not in codes(look(out))
    assert "copy-differs" in codes(look(out, target_dir=tmp_path / "target"))


def test_a_target_of_another_vocabulary_rope_or_length_is_told(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle")
    rope = {"rope_type": "default", "rope_theta": 5e5}
    from tests.unit.runtime.model_fixtures import save_model

    save_model(
        tmp_path / "other",
        "llama",
        vocab_size=13,
        rope_parameters=rope,
        max_position_embeddings=1024,
    )
    found = codes(look(out, target_dir=tmp_path / "other"))
    assert {"target-vocab-size", "target-rope", "target-length"} <= found


def test_pickles_are_refused_with_advice(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    (out / "model.safetensors").unlink()
    (out / "pytorch_model.bin").write_bytes(b"no pickle at all: it is never opened")
    inspection = look(out)
    finding = next(f for f in inspection.findings if f.code == "pickle-only")
    assert finding.severity == "error"
    assert "weights_only=True" in finding.action
    assert inspection.format is not None  # config.json alone says so much


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    out = make_export(tmp_path, "eagle3")
    tensors = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    names = sorted(tensors)
    halves = (names[:5], names[5:])
    weight_map = {name: file for half, file in zip(halves, files, strict=True) for name in half}
    for half, file in zip(halves, files, strict=True):
        save_file({name: tensors[name] for name in half}, out / file)
    index = out / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert not look(out).has_errors
    (out / files[1]).unlink()
    assert "file-missing" in codes(look(out))
    index.write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(ValueError, match="expected files beside it"):
        look(out)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
        look(out)


def test_medusa_in_both_sets_of_names(tmp_path: Path) -> None:
    out = make_medusa(tmp_path)
    old = look(out)
    assert old.format is not None
    assert old.format.key == "medusa"
    assert not old.has_errors
    assert outcomes(old) == {"vLLM": "refuses", "SGLang": "cannot"}
    assert "blocks.* only" in why(old, "vLLM")
    change_config(out, lambda c: c.update(medusa_num_heads=5))
    assert "block-count" in codes(look(out))
    change_config(out, lambda c: c.update(medusa_num_heads=3))
    change_tensors(out, lambda t: t.pop("1.0.linear.bias"))
    missing = look(out)
    assert [f.field for f in missing.findings] == ["1.0.linear.bias"]
    assert look(tmp_path / "head").format is FORMATS["native"]


@pytest.mark.parametrize(
    ("config", "extra", "key"),
    [
        (
            {
                "architectures": ["DFlashDraftModel"],
                "block_size": 16,
                "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 9},
            },
            {},
            "dflash",
        ),
        (
            {"architectures": ["DSparkDraftModel"], "dflash_config": {"target_layer_ids": [1, 3]}},
            {"markov_head.markov_w1.weight": torch.rand(11, 4)},
            "dspark",
        ),
        (
            {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 4]},
            {},
            "dflash",
        ),
    ],
)
def test_block_drafters_are_recognised_only(
    config: dict[str, Any], extra: Tensors, key: str, tmp_path: Path
) -> None:
    tensors = {
        "fc.weight": torch.rand(32, 64),
        "hidden_norm.weight": torch.rand(32),
        "norm.weight": torch.rand(32),
        **layer("layers.0.", norms=True),
        **extra,
    }
    inspection = look(put(tmp_path / "head", {**SIZES, **config}, tensors))
    assert inspection.format is not None
    assert inspection.format.key == key
    assert not inspection.has_errors
    assert "k = 2, 4" in dict(inspection.reading.facts)["reads"]  # type: ignore[union-attr]
    assert "not trained here" in inspection.why_not_read


def test_p_eagle_is_an_eagle3_head_with_a_mask(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    change_tensors(out, lambda t: t.update(mask_hidden=torch.rand(1, 1, 96)))
    inspection = look(out)
    assert inspection.format is not None
    assert inspection.format.key == "peagle"
    assert not inspection.has_errors
    assert outcomes(inspection)["SGLang"] == "cannot"
    as_eagle3 = look(out, ForeignConfig(format="eagle3"))
    assert as_eagle3.format is FORMATS["eagle3"]


def test_qwens_module_is_read_from_its_targets_checkpoint(tmp_path: Path) -> None:
    module = {
        "mtp.fc.weight": torch.rand(32, 64),
        "mtp.pre_fc_norm_embedding.weight": torch.rand(32),
        "mtp.pre_fc_norm_hidden.weight": torch.rand(32),
        "mtp.norm.weight": torch.rand(32),
        **layer("mtp.layers.0.", norms=True),
        "mtp.layers.0.self_attn.q_proj.weight": torch.rand(64, 32),
    }
    target = {**layer("model.layers.0."), "model.norm.weight": torch.rand(32)}
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForCausalLM"],
        "text_config": SIZES,
    }
    out = put(tmp_path / "head", config, {**module, **target})
    inspection = look(out)
    assert inspection.recognised is not None
    assert inspection.recognised.in_target
    assert not inspection.has_errors
    assert "output gates" in inspection.why_not_read
    change_tensors(out, lambda t: t.pop("mtp.norm.weight"))
    assert [f.field for f in look(out).findings] == ["mtp.norm.weight"]


def test_deepseeks_own_module_is_checked_and_not_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from tests.unit.runtime.model_fixtures import save_model

    save_model(tmp_path / "target", "deepseekv3", vocab_size=11, num_hidden_layers=2)
    stored = load_file(tmp_path / "target" / "model.safetensors")
    module = {
        name.replace("layers.1.", "layers.2."): tensor
        for name, tensor in stored.items()
        if name.startswith("model.layers.1.")
    }
    width = read_json(tmp_path / "target" / "config.json")["hidden_size"]
    module |= {
        "model.layers.2.enorm.weight": torch.rand(width),
        "model.layers.2.hnorm.weight": torch.rand(width),
        "model.layers.2.eh_proj.weight": torch.rand(width, 2 * width),
        "model.layers.2.shared_head.norm.weight": torch.rand(width),
    }
    config = read_json(tmp_path / "target" / "config.json")
    config["num_nextn_predict_layers"] = 1
    out = put(tmp_path / "alone", config, module)
    inspection = look(out)
    assert inspection.format is FORMATS["deepseek_mtp"]
    assert not inspection.has_errors
    assert "latent attention and experts" in inspection.why_not_read
    assert outcomes(inspection)["vLLM"] == "loads"
    change_tensors(out, lambda t: t.pop("model.layers.2.self_attn.kv_b_proj.weight"))
    assert "model.layers.2.self_attn.kv_b_proj.weight" in why(look(out), "vLLM")
    change_config(out, lambda c: c.update(num_hidden_layers=4))
    assert "module-index" in codes(look(out))


def test_what_wrote_it_is_said_where_it_can_be_told(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    change_config(out, lambda c: c.update(_torchspec_version="0.1"))
    assert look(out).recognised.writer == "TorchSpec 0.1"  # type: ignore[union-attr]
    change_config(out, lambda c: c.pop("_torchspec_version"))
    rename(out, ("layers.0.", "midlayer."))
    assert "SpecForge" in look(out).recognised.writer  # type: ignore[union-attr]


def test_a_missing_tensor_is_named_as_its_neighbours_are(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    rename(out, ("layers.0.", "midlayer."))
    change_tensors(out, lambda t: t.pop("midlayer.mlp.up_proj.weight"))
    assert [f.field for f in look(out).findings if f.severity == "error"] == [
        "midlayer.mlp.up_proj.weight"
    ]


def test_an_unknown_directory_is_an_error_that_lists_what_is_known(tmp_path: Path) -> None:
    out = put(tmp_path / "x", {"architectures": ["Bert"]}, {"a.weight": torch.ones(1)})
    inspection = look(out)
    assert inspection.format is None
    assert "eagle3" in next(f for f in inspection.findings if f.code == "unrecognised").allowed
    assert json.loads(json.dumps(inspection.to_dict()))["format"] is None


def test_quantised_weights_are_looked_at_and_not_read(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    name = "layers.0.mlp.up_proj.weight"
    packed = {
        name + "_packed": torch.ones(48, 4, dtype=torch.int32),
        name + "_scale": torch.ones(48, 1),
    }
    change_tensors(out, lambda t: (t.pop(name), t.update(packed)))
    assert "no quantization_config" not in why(look(out), "vLLM")
    scope = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
    }
    change_config(out, lambda c: c.update(quantization_config=scope))
    inspection = look(out)
    assert not inspection.has_errors
    assert "all but lm_head" in dict(inspection.reading.facts)["quantisation"]  # type: ignore[union-attr]
    assert "its weights are quantised" in inspection.why_not_read
    with pytest.raises(ValueError, match="weights are quantised"):
        bring_in(tmp_path, out)


def test_a_quantised_target_asks_for_a_scope_of_the_heads_own(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    scope = {"quant_method": "fp8"}
    change_config(tmp_path / "target", lambda c: c.update(quantization_config=scope))
    target = read_target(tmp_path / "target")
    found = inspect_head(out, AUTO, target=target)
    assert "target-quantisation" in codes(found)


def test_a_checkpoint_that_lost_its_modules_is_told_so(tmp_path: Path) -> None:
    config = {**SIZES, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    out = put(tmp_path / "x", config, layer("model.layers.0."))
    (finding,) = look(out).findings
    assert "a fine-tune that lost them" in finding.action


def test_the_two_norms_of_vllms_mistral_class_make_an_mtp_head(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle")
    extra = {n: torch.rand(32) for n in ("layers.0.input_layernorm.weight", "norm.weight")}
    change_tensors(out, lambda t: t.update(extra))
    assert outcomes(look(out)) == {"vLLM": "refuses", "SGLang": "loads, drafts wrongly"}
    change_config(out, lambda c: c.update(architectures=["EagleMistralForCausalLM"]))
    assert outcomes(look(out))["vLLM"] == "loads"
    head = bring_in(tmp_path, out)
    assert head.spec.kind == "mtp"
    assert not head.spec.norms.enorm
    assert torch.equal(head.tensors["norm.weight"], extra["norm.weight"])
    assert head.tensors.keys() == head.spec.tensor_shapes().keys()
