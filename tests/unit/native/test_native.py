"""A target's own MTP module: found, computed as published, trained on, put back."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Qwen2ForCausalLM

from mtp_train.config import HeadConfig
from mtp_train.export import check_export, read_export, write_export
from mtp_train.export.layouts import LAYOUTS
from mtp_train.export.splice import splice_export
from mtp_train.heads.init import make_head_spec
from mtp_train.native.drift import measure_drift
from mtp_train.native.reader import (
    initial_base_head,
    initial_native_head,
    is_checkpoint,
    native_spec,
    read_native_head,
)
from mtp_train.run_dir import read_json
from mtp_train.serving.target_scope import vllm_layout_for
from mtp_train.validate import p2
from mtp_train.validate.subject import Subject
from mtp_train.validate.unroll import HiddenSequence, runtime_chain
from runtime.head_spec import HeadSpec, save_head
from runtime.models.config import load_config, parse_config
from runtime.models.heads import build_head
from runtime.models.loader import load_target
from tests.unit.native.checkpoints import (
    add_tensors,
    rewrite_config,
    save_deepseek,
    save_mimo,
    share_vocabulary,
)
from tests.unit.runtime.engine_fixtures import VOCAB
from tests.unit.runtime.model_fixtures import YARN_ROPE, random_ids, relative_error, save_model
from tests.unit.runtime.quantised_fixtures import FP8_ROWS, INT8_ROWS, stated, write_quantised
from tests.unit.runtime.test_sparse_targets import BLOCK, PUBLISHED, store_in_fp8
from tests.unit.validate.subjects import RUNTIME, make_prompts

CPU = torch.device("cpu")
PREFIX = "model.layers.2."
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
KINDS = ["deepseekv3", "deepseekv2", "mimo"]
CLASSES = {
    "deepseekv3": DeepseekV3ForCausalLM,
    "deepseekv2": DeepseekV2ForCausalLM,
    "mimo": Qwen2ForCausalLM,
}


def save(path: Path, kind: str) -> dict[str, torch.Tensor]:
    return save_mimo(path) if kind == "mimo" else save_deepseek(path, kind)


def load(path: Path) -> Any:
    return load_target(path, dtype=torch.float32, device=CPU, cache_dir=path.parent)


def published_v3() -> dict[str, Any]:
    (raw,) = (raw for name, (_, raw) in PUBLISHED.items() if name.startswith("DeepSeek-V3"))
    return {**raw, "num_nextn_predict_layers": 1}


def mimo_config() -> Any:
    raw = {
        "architectures": ["MiMoForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151680,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640000,
        "attention_bias": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "num_nextn_predict_layers": 1,
    }
    return parse_config(raw, generation={}, source="conf")


class PublishedModule:
    """The module over whole sequences, its decoder layer computed by transformers."""

    def __init__(self, path: Path, kind: str, module: dict[str, torch.Tensor]) -> None:
        self.is_mimo = kind == "mimo"
        cls = CLASSES[kind]
        config = cls.config_class.from_pretrained(path) if not self.is_mimo else None
        hf = cls(config or self._qwen_config(path)).eval()
        layer = hf.model.layers[1]
        prefix = "model.mtp_layers.0." if self.is_mimo else PREFIX
        self.w = {name.removeprefix(prefix): tensor for name, tensor in module.items()}
        names = layer.state_dict().keys()
        stored = {}
        for name in names:
            if name in self.w:
                stored[name] = self.w[name]
            elif name.endswith("experts.gate_up_proj"):
                stored[name] = torch.stack(
                    [torch.cat((self.expert(i, "gate"), self.expert(i, "up"))) for i in range(8)]
                )
            elif name.endswith("experts.down_proj"):
                stored[name] = torch.stack([self.expert(i, "down") for i in range(8)])
        layer.load_state_dict(stored)
        layer.self_attn.layer_idx = 0
        hf.model.layers = torch.nn.ModuleList([layer])
        hf.model.config.num_hidden_layers = 1
        final = "final_layernorm.weight" if self.is_mimo else "shared_head.norm.weight"
        hf.model.norm.weight.data.copy_(self.w[final])
        self.hf, self.eps = hf, hf.config.rms_norm_eps
        self.embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]

    def _qwen_config(self, path: Path) -> Any:
        raw = json.loads((path / "config.json").read_text())
        raw.pop("architectures")
        raw.pop("model_type")
        return Qwen2ForCausalLM.config_class(**raw)

    def expert(self, index: int, kind: str) -> torch.Tensor:
        return self.w[f"mlp.experts.{index}.{kind}_proj.weight"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.w[name]

    def joined(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """DeepSeek-V3 (arXiv:2412.19437, 2.2) and MiMo; the first embedding of a sequence is zero
        as vLLM computes both.
        """
        e = self.embedding[ids].clone()
        e[0] = 0
        if self.is_mimo:
            parts = (
                self.norm(hidden, "hidden_layernorm.weight"),
                self.norm(e, "token_layernorm.weight"),
            )
            return torch.cat(parts, -1) @ self.w["input_proj.weight"].T
        parts = self.norm(e, "enorm.weight"), self.norm(hidden, "hnorm.weight")
        return torch.cat(parts, -1) @ self.w["eh_proj.weight"].T

    def chain(self, ids: torch.Tensor, hidden: torch.Tensor, start: int, steps: int) -> list:
        """States of ``steps`` chained steps from ``start``; the rows so far, again for each."""
        rows, tokens, states = hidden[: start + 1], ids[1 : start + 2], []
        for step in range(steps):
            x = self.joined(tokens, rows)
            with torch.no_grad():
                out = self.hf.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
            states.append(out[-1])
            rows = torch.cat((rows, out[-1:]))
            tokens = ids[1 : start + 3 + step]
        return states


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_computed_as_published_over_chained_steps(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "target"
    module = save(path, kind)
    target = load(path)
    found = read_native_head(path, fingerprint=target.fingerprint)
    head = build_head(found.spec, found.tensors, target.model)
    ids = torch.tensor(random_ids(24, seed=1, vocab_size=VOCAB))
    hidden = torch.randn(24, 32, generator=torch.Generator().manual_seed(2))
    starts = [0, 7, 20]
    steps = runtime_chain(head, HiddenSequence(ids, hidden), starts, 3)
    published = PublishedModule(path, kind, module)
    for index, start in enumerate(starts):
        for step, wanted in enumerate(published.chain(ids, hidden, start, 3)):
            assert relative_error(steps[step].states_SD[index], wanted) < 1e-4
    lm_head = load_file(path / "model.safetensors")["lm_head.weight"]
    wanted = steps[2].states_SD @ lm_head.T
    assert relative_error(steps[2].logits_SV, wanted) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("concat", ["embedding_hidden", "hidden_embedding"])
def test_training_starts_from_the_module_whatever_the_order(
    kind: str, concat: Any, tmp_path: Path
) -> None:
    path = tmp_path / "target"
    save(path, kind)
    target = load(path)
    spec = make_head_spec(
        HeadConfig(init="native", concat=concat), target.config, fingerprint=target.fingerprint
    )
    tensors = initial_native_head(path, spec)
    found = read_native_head(path, fingerprint=target.fingerprint)
    ids = torch.tensor(random_ids(9, seed=1, vocab_size=VOCAB))
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    chains = [
        runtime_chain(build_head(*head, target.model), HiddenSequence(ids, hidden), [3], 2)
        for head in ((spec, tensors), (found.spec, found.tensors))
    ]
    for ours, theirs in zip(*chains, strict=True):
        assert relative_error(ours.states_SD, theirs.states_SD) < 1e-5
    wrong = replace(spec, norms=replace(spec.norms, final=False))
    with pytest.raises(ValueError, match=r"norms=.*Set head\.\* to what they are"):
        initial_native_head(path, wrong)


def test_block_fp8_weights_of_the_module_are_dequantised(tmp_path: Path) -> None:
    path = tmp_path / "target"
    module = save_deepseek(path)
    meant = store_in_fp8(path)
    rewrite_config(path, quantization_config=FP8_BLOCKS)
    share_vocabulary(path, PREFIX)  # as published: not quantised
    found = read_native_head(path, fingerprint="f" * 64)
    name = "layers.0.mlp.experts.3.up_proj.weight"
    stored = PREFIX + name.removeprefix("layers.0.")
    assert found.tensors[name].dtype == torch.bfloat16
    assert torch.equal(found.tensors[name], meant[stored].bfloat16())
    assert 1e-4 < relative_error(found.tensors[name], module[stored]) < 0.1
    bias = "mlp.gate.e_score_correction_bias"
    assert torch.equal(found.tensors["layers.0." + bias], module[PREFIX + bias])


def test_what_is_missing_is_named_with_where_to_take_it_from(tmp_path: Path) -> None:
    save_deepseek(tmp_path / "whole")
    save_model(tmp_path / "plain", "deepseekv3", vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers.*head\.init=<its directory>"):
        read_native_head(tmp_path / "plain", fingerprint="")
    rewrite_config(tmp_path / "plain", num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.2\.eh_proj.* is missing; a fine-"):
        read_native_head(tmp_path / "plain", fingerprint="")
    raw = {"architectures": ["Qwen3NextForCausalLM"]}
    with pytest.raises(ValueError, match=r"Qwen3Next.*linear attention.*not computed.*supported"):
        parse_config(raw, generation={}, source="conf")


def test_copies_of_the_vocabulary_that_differ_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "target"
    save_deepseek(path)
    read_native_head(path, fingerprint="")
    assert not caplog.records
    stored = load_file(path / "model.safetensors")
    add_tensors(path, {PREFIX + "shared_head.head.weight": stored["lm_head.weight"] * 1.5})
    read_native_head(path, fingerprint="")
    (record,) = caplog.records
    assert "shared_head.head.weight differs from the target's lm_head.weight (5.00e-01" in (
        record.getMessage()
    )


def test_a_fine_tune_takes_the_module_of_its_base_and_hears_how_far_it_has_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    save_deepseek(base)
    save_model(tuned, "deepseekv3", vocab_size=VOCAB, rms_norm_eps=1e-6)  # the same, without
    stored = load_file(tuned / "model.safetensors")
    add_tensors(tuned, {"lm_head.weight": stored["lm_head.weight"] * 2})
    drift = measure_drift(base, tuned)
    assert (drift.embedding, drift.lm_head, drift.final_norm) == (0.0, 0.5, 0.0)
    target = load(tuned)
    spec = make_head_spec(HeadConfig(), target.config, fingerprint=target.fingerprint)
    assert is_checkpoint(base)
    tensors = initial_base_head(base, spec, target_dir=tuned)
    own = read_native_head(base, fingerprint="").tensors
    assert all(torch.equal(tensors[name], own[name].float()) for name in own)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "lm head 5.00e-01" in record.getMessage()
    assert "measure it (mtp validate)" in record.getMessage()
    save_deepseek(tmp_path / "wider", moe_intermediate_size=40)
    with pytest.raises(ValueError, match=r"they are for experts="):
        initial_base_head(tmp_path / "wider", spec, target_dir=tuned)


def random_native(path: Path, kind: str, *, is_fp8: bool = False) -> HeadSpec:
    """``target`` and a ``head`` of its kind with other weights than its module."""
    save(path / "target", kind)
    if is_fp8:
        store_in_fp8(path / "target")
        rewrite_config(path / "target", quantization_config=FP8_BLOCKS)
        if kind != "mimo":
            share_vocabulary(path / "target", PREFIX)
    target = load(path / "target")
    found = read_native_head(path / "target", fingerprint=target.fingerprint)
    tensors = {name: tensor * 1.25 for name, tensor in found.tensors.items()}
    save_head(path / "head", found.spec, tensors)
    return found.spec


def export(path: Path, kind: str) -> Path:
    format = "mimo" if kind == "mimo" else "deepseek"
    place = path / "out" / format
    write_export(path / "head", place, format=format, target_dir=path / "target", unvalidated=True)
    return place


def subject(path: Path, head: Path) -> Subject:
    return Subject(path, head, torch.float32, RUNTIME, cache_dir=path.parent)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_reads_back_with_p2_and_a_copy_of_the_target_holds_it(
    kind: str, is_fp8: bool, tmp_path: Path
) -> None:
    spec = random_native(tmp_path, kind, is_fp8=is_fp8)
    place = export(tmp_path, kind)
    check_export(place, target_dir=tmp_path / "target")
    assert [is_checkpoint(tmp_path / name) for name in ("target", "head")] == [True, False]
    assert not is_checkpoint(place)
    sequences = [ids for ids in make_prompts() if len(ids) > 4]
    assert p2.check(subject(tmp_path / "target", place), sequences, k=3).passed
    source = tmp_path / "target"
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    copied = splice_export(place, source, tmp_path / "copy")
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert (copied.linked, len(copied.rewritten)) == ((), 1)  # the file held the old module
    target = load(tmp_path / "copy")
    found = read_native_head(tmp_path / "copy", fingerprint=target.fingerprint)
    assert found.spec == replace(spec, target_fingerprint=target.fingerprint)
    assert all(torch.equal(found.tensors[n], t) for n, t in read_export(place)[1].items())
    save_head(tmp_path / "copied_head", found.spec, found.tensors)
    copy = subject(tmp_path / "copy", tmp_path / "copied_head")
    assert p2.check(copy, sequences, k=3).passed
    prefix = target.config.native_prefix(0)
    old, new = (
        {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
        for directory in (source, tmp_path / "copy")
    )
    scales = {name for name in old if name.startswith(prefix) and name.endswith("_scale_inv")}
    assert bool(scales) == is_fp8
    assert old.keys() - scales == new.keys()
    assert all(torch.equal(new[n], old[n]) for n in old if not n.startswith(prefix))
    scope = read_json(tmp_path / "copy" / "config.json").get("quantization_config")
    assert scope == (vllm_layout_for("mimo", source).hf_overrides.get("quantization_config"))
    assert ("model.layers.2.self_attn.o_proj" in scope["ignored_layers"]) if is_fp8 else not scope
    with pytest.raises(ValueError, match="exists"):
        splice_export(place, source, tmp_path / "copy")


@pytest.mark.parametrize("is_left_out", [False, True])
@pytest.mark.parametrize("rows", [INT8_ROWS, FP8_ROWS], ids=["int8", "fp8"])
def test_a_copy_of_a_target_that_is_quantised_by_name_holds_a_plain_module(
    rows: dict[str, Any], is_left_out: bool, tmp_path: Path
) -> None:
    source = tmp_path / "target"
    save_model(source, "qwen2", vocab_size=VOCAB)
    rewrite_config(source, architectures=["MiMoForCausalLM"], model_type="mimo")
    left_out = [r"re:model\.mtp_layers\..*"] if is_left_out else []
    write_quantised(source, stated(group={"weights": rows}, ignore=["lm_head", *left_out]))
    target = load(source)
    config = replace(target.config, num_native_heads=1)
    spec = native_spec(config, fingerprint=target.fingerprint, source="")
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.rand(s, generator=generator) for n, s in spec.tensor_shapes().items()}
    save_head(tmp_path / "head", spec, tensors)
    splice_export(export(tmp_path, "mimo"), source, tmp_path / "copy")
    copied = load(tmp_path / "copy")
    found = read_native_head(tmp_path / "copy", fingerprint=copied.fingerprint)
    assert all(torch.equal(found.tensors[name], t) for name, t in tensors.items())
    ignored = read_json(tmp_path / "copy" / "config.json")["quantization_config"]["ignore"]
    assert r"re:model\.layers\.2\..*" in ignored  # where vLLM files the module
    save_head(tmp_path / "copied_head", found.spec, found.tensors)
    sequences = [ids for ids in make_prompts() if len(ids) > 4]
    copy = subject(tmp_path / "copy", tmp_path / "copied_head")
    assert p2.check(copy, sequences, k=3).passed


def test_shards_without_mtp_weights_are_links_and_the_index_names_every_tensor(
    tmp_path: Path,
) -> None:
    save_model(tmp_path / "target", "deepseekv2", vocab_size=VOCAB, rms_norm_eps=1e-6)
    target = load(tmp_path / "target")
    config = replace(target.config, num_native_heads=1)
    spec = native_spec(config, fingerprint=target.fingerprint, source="")
    generator = torch.Generator().manual_seed(0)
    shapes = spec.tensor_shapes()
    save_head(
        tmp_path / "head", spec, {n: torch.rand(s, generator=generator) for n, s in shapes.items()}
    )
    place = export(tmp_path, "deepseekv2")
    copied = splice_export(place, tmp_path / "target", tmp_path / "copy")
    assert copied.linked == ("model-00001-of-00002.safetensors",)
    assert os.path.samefile(
        tmp_path / "copy" / copied.linked[0], tmp_path / "target" / "model.safetensors"
    )
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
    stored = {
        name: file.name
        for file in (tmp_path / "copy").glob("*.safetensors")
        for name in load_file(file)
    }
    assert index["weight_map"] == stored
    again = splice_export(export_again(tmp_path), tmp_path / "copy", tmp_path / "second")
    assert again.linked == copied.linked
    assert load(tmp_path / "second").config.num_native_heads == 1


def export_again(path: Path) -> Path:
    """The head of the copy, exported for the copy."""
    target = load(path / "copy")
    found = read_native_head(path / "copy", fingerprint=target.fingerprint)
    save_head(path / "again", found.spec, found.tensors)
    write_export(
        path / "again",
        path / "out2" / "deepseek",
        format="deepseek",
        target_dir=path / "copy",
        unvalidated=True,
    )
    return path / "out2" / "deepseek"


DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


@pytest.mark.parametrize("family", ["deepseekv2", "deepseekv3"])
def test_a_directory_says_what_transformers_reads_in_the_target(
    family: str, tmp_path: Path
) -> None:
    path = tmp_path / "target"
    save_deepseek(path, family, rope_parameters=DEEPSEEK_YARN)
    found = read_native_head(path, fingerprint=load(path).fingerprint)
    save_head(tmp_path / "head", found.spec, found.tensors)
    raw = json.loads((export(tmp_path, family) / "config.json").read_text())
    assert raw["architectures"] == ["DeepseekV3ForCausalLM"]
    target = json.loads((path / "config.json").read_text())
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "routed_scaling_factor",
        "norm_topk_prob",
    ):
        assert raw[key] == target[key], key
    router = ("softmax", "greedy") if family == "deepseekv2" else ("sigmoid", "noaux_tc")
    assert (raw["scoring_func"], raw["topk_method"]) == router
    for key, value in DEEPSEEK_YARN.items():
        assert raw["rope_parameters"][key] == value, key
    assert raw["rope_scaling"]["type"] == "yarn"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent": None, "experts": None}, r"latent=null: .*Nearest: export\.format=mimo"),
        ({"experts": None}, r"experts=null: .*Nearest: head=eagle3"),
        ({"recycle": "pre_norm"}, 'recycle="pre_norm"'),
        ({"projection_bias": True}, "projection_bias=true"),
        ({"norm_eps": 1e-5}, "norm_eps=1e-06"),
    ],
)
def test_a_head_that_the_layout_has_no_place_for_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = parse_config(published_v3(), generation={}, source="conf")
    spec = native_spec(config, fingerprint="", source="conf")
    layout = LAYOUTS["deepseek"]
    layout.refuse_uncarried(spec, drop_draft_vocab=False)
    with pytest.raises(ValueError, match=message):
        layout.refuse_uncarried(replace(spec, **changes), drop_draft_vocab=False)


def test_scaling_and_routing_that_deepseeks_keys_do_not_say_are_refused() -> None:
    config = parse_config(published_v3(), generation={}, source="conf")
    spec = native_spec(config, fingerprint="", source="conf")
    assert spec.latent is not None
    assert spec.experts is not None
    layout = LAYOUTS["deepseek"]
    for wrong, message in (
        (replace(spec, latent=replace(spec.latent, is_interleaved=False)), "is_interleaved=false"),
        (replace(spec, experts=replace(spec.experts, has_bias=False)), "no topk_method"),
        (replace(spec, latent=replace(spec.latent, scale=0.5)), r"rope|latent\.scale"),
    ):
        with pytest.raises(ValueError, match=message):
            layout.refuse_uncarried(wrong, drop_draft_vocab=False)


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    random_native(tmp_path, "mimo")
    place = export(tmp_path, "mimo")
    rewrite_config(tmp_path / "target", architectures=["Qwen2ForCausalLM"])
    with pytest.raises(ValueError, match=r"target_fingerprint|unexpected tensor"):
        splice_export(place, tmp_path / "target", tmp_path / "copy")


@pytest.mark.parametrize("damage", ["swapped", "bias", "missing"])
def test_damage_of_a_directory_is_named(damage: str, tmp_path: Path) -> None:
    random_native(tmp_path, "deepseekv3")
    place = export(tmp_path, "deepseekv3")
    tensors = load_file(place / "model.safetensors")
    name = PREFIX + "eh_proj.weight"
    if damage == "swapped":
        left, right = tensors[name].chunk(2, dim=1)
        tensors[name] = torch.cat((right, left), 1)
    elif damage == "bias":
        name = PREFIX + "mlp.gate.e_score_correction_bias"
        tensors[name] += 0.1
    else:
        name = PREFIX + "mlp.experts.7.down_proj.weight"
        del tensors[name]
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    message = {"swapped": "halves exchanged", "bias": "not what was written", "missing": "missing"}
    with pytest.raises(ValueError, match=f"{name.replace('.', '[.]')}.*{message[damage]}"):
        check_export(place, target_dir=tmp_path / "target")


def test_yarn_without_deepseeks_factors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "target"
    save_deepseek(path, rope_parameters=YARN_ROPE)
    spec = native_spec(load_config(path), fingerprint="", source="")
    with pytest.raises(ValueError, match=r"attention_factor=1\.2"):
        LAYOUTS["deepseek"].refuse_uncarried(spec, drop_draft_vocab=False)
