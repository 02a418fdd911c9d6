"""The layouts of EAGLE-3 and EAGLE-1: what is written, what is refused, what damage is called."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from mtp_train.config import Config, ExportConfig, ExportFormat, ValidateConfig
from mtp_train.distributed import SingleProcessGroup
from mtp_train.errors import StageRefusedError
from mtp_train.export import check_export, load_any_head, read_export, stage, write_export
from mtp_train.export.engines import servable_by
from mtp_train.export.layouts import LAYOUTS, eagle3, find_layout
from mtp_train.run_dir import read_json
from mtp_train.serving.job import ServingError, vllm_layout
from mtp_train.validate import engine_rung
from runtime.head_spec import (
    EAGLE_FIELDS,
    DraftVocab,
    HeadSpec,
    hash_vocab_ids,
    load_head,
    save_head,
)
from runtime.models.loader import Target, load_target
from tests.unit.export.tampers import Tensors, void, with_config, with_tensors
from tests.unit.export.test_export import make_config, shapes_of
from tests.unit.runtime.engine_fixtures import (
    EAGLE3,
    MEDUSA,
    head_spec,
    random_head_tensors,
)
from tests.unit.runtime.model_fixtures import LLAMA3_ROPE, YARN_ROPE, save_model

CPU = torch.device("cpu")
IDS = (1, 4, 5, 9)
THREE: dict[str, Any] = {**EAGLE3, "layer_ids": (1, 3)}
ONE: dict[str, Any] = {"kind": "eagle", **EAGLE_FIELDS}


def make_target(path: Path, *, num_layers: int = 4, **overrides: Any) -> Target:
    save_model(path, "llama", vocab_size=11, num_hidden_layers=num_layers, **overrides)
    return load_target(str(path), dtype=torch.float32, device=CPU)


def make_head(
    path: Path, fields: dict[str, Any], *, ids: tuple[int, ...] = (), num_layers: int = 4
) -> HeadSpec:
    """``target/`` and ``head/`` below ``path``."""
    target = make_target(path / "target", num_layers=num_layers)
    return put_head(path / "head", target, fields, ids=ids)


def put_head(
    path: Path, target: Target, fields: dict[str, Any], *, ids: tuple[int, ...] = ()
) -> HeadSpec:
    ids_W = torch.tensor(ids)
    vocab = DraftVocab(len(ids), coverage=0.5, ids_sha256=hash_vocab_ids(ids_W)) if ids else None
    values = {"rope": target.config.rope, "draft_vocab": vocab, **fields}
    spec = head_spec(target, **values)
    tensors = random_head_tensors(spec) | ({"draft_vocab_ids": ids_W} if ids else {})
    save_head(path, spec, tensors)
    return spec


def export(path: Path, format: ExportFormat, **arguments: Any) -> Path:
    out = path / "out" / format
    write_export(
        path / "head",
        out,
        format=format,
        target_dir=path / "target",
        unvalidated=True,
        **arguments,
    )
    return out


def stage_config(path: Path, format: ExportFormat) -> Config:
    config = make_config(path)
    settings = ExportConfig(format=format, unvalidated=True)
    return dataclasses.replace(config, export=settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head with a draft vocabulary, exported."""
    path = tmp_path_factory.mktemp("made")
    make_head(path, THREE, ids=IDS)
    export(path, "eagle3")
    return path


def test_names_and_offsets_are_those_of_the_layout(made: Path) -> None:
    spec, native = load_head(made / "head")
    written = load_file(made / "out" / "eagle3" / "model.safetensors")
    assert shapes_of(written) == LAYOUTS["eagle3"].tensor_shapes(spec)
    assert written["d2t"].tolist() == [1, 3, 3, 6]
    assert written["d2t"].dtype == torch.int64
    assert written["t2d"].nonzero()[:, 0].tolist() == list(IDS)
    assert written["t2d"].dtype == torch.bool
    kept = native.keys() - {"draft_vocab_ids"}
    assert all(torch.equal(written[name], native[name]) for name in kept)
    target = load_file(made / "target" / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], target["model.embed_tokens.weight"])
    assert written.keys() == kept | {"embed_tokens.weight", "d2t", "t2d"}


def test_layer_ids_are_written_as_either_engine_counts_or_not_at_all(
    made: Path, tmp_path: Path
) -> None:
    config = read_json(made / "out" / "eagle3" / "config.json")
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 2]}
    make_head(tmp_path, {**THREE, "layer_ids": (2, 3, 4)}, num_layers=7)
    config = read_json(export(tmp_path, "eagle3") / "config.json")
    assert not any("layer_ids" in key or key == "eagle_config" for key in config)
    assert config["num_aux_hidden_states"] == 3


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"fusion_norm": "none"}, {"fc_norm": False, "norm_before_fc": False}),
        ({"fusion_norm": "each"}, {"fc_norm": True, "norm_before_fc": False}),
        ({"fusion_norm": "joined"}, {"fc_norm": False, "norm_before_fc": True}),
        ({"recycle": "post_norm"}, {"norm_output": True}),
        ({}, {"norm_output": False, "norm_before_residual": False, "draft_vocab_size": 11}),
    ],
)
def test_the_arithmetic_is_said_in_the_configuration(
    changes: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    make_head(tmp_path, THREE | changes)
    out = export(tmp_path, "eagle3")
    config = read_json(out / "config.json")
    assert {key: config[key] for key in keys} == keys
    assert not {"d2t", "t2d"} & load_file(out / "model.safetensors").keys()


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, YARN_ROPE])
def test_another_reader_finds_sizes_and_rope(rope: dict[str, Any], tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", rope_parameters=rope)
    put_head(tmp_path / "head", target, THREE)
    out = export(tmp_path, "eagle3")
    config, wanted = AutoConfig.from_pretrained(out), AutoConfig.from_pretrained(target.path)
    assert config.rope_parameters == wanted.rope_parameters
    raw = read_json(out / "config.json")
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == rope["rope_theta"]
    assert raw["rope_scaling"]["rope_type"] == rope["rope_type"]
    for name in ("hidden_size", "head_dim", "max_position_embeddings", "rms_norm_eps", "dtype"):
        assert getattr(config, name) == getattr(wanted, name), name
    assert (config.model_type, config.num_hidden_layers) == ("llama", 1)
    assert config.tie_word_embeddings is False


@pytest.mark.parametrize("ids", [(), IDS])
def test_an_eagle3_head_comes_back_as_it_was(ids: tuple[int, ...], tmp_path: Path) -> None:
    spec = make_head(tmp_path, THREE, ids=ids)
    native = load_head(tmp_path / "head")[1]
    read_spec, tensors = read_export(export(tmp_path, "eagle3"))
    assert read_spec == spec
    assert tensors.keys() == native.keys()
    assert all(torch.equal(tensors[name], native[name]) for name in native)


def test_a_draft_vocabulary_of_every_token_is_none(tmp_path: Path) -> None:
    spec = make_head(tmp_path, THREE, ids=tuple(range(11)))
    out = export(tmp_path, "eagle3")
    assert "d2t" not in load_file(out / "model.safetensors")
    assert read_export(out)[0] == dataclasses.replace(spec, draft_vocab=None)
    assert "measured again" not in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("format", "fields", "ids"),
    [
        ("eagle3", THREE, IDS),
        ("eagle3", {**THREE, "fusion_norm": "joined", "recycle": "post_norm"}, ()),
        ("eagle3", THREE, tuple(range(11))),
        ("speculators", {**EAGLE3, "residual": "normed"}, IDS),
        ("eagle", ONE, ()),
        ("eagle_sglang", ONE, ()),
        ("eagle_sglang", {**ONE, "projection_bias": True}, ()),
    ],
)
def test_the_stage_reads_it_back(
    format: ExportFormat, fields: dict[str, Any], ids: tuple[int, ...], tmp_path: Path
) -> None:
    make_head(tmp_path, fields, ids=ids)
    config = stage_config(tmp_path, format)
    outcome = stage.run(config, group=SingleProcessGroup(CPU))
    assert outcome.read_back is not None
    assert max(outcome.read_back.native_hidden, outcome.read_back.native_logits) < 1e-4
    text = stage.describe(outcome, config)
    assert ("vLLM:" in text) == (format != "eagle_sglang")
    assert ("SGLang (not run):" in text) == (format in ("eagle3", "eagle_sglang"))


def test_a_writer_of_ids_in_the_place_of_offsets_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_head(tmp_path, THREE, ids=IDS)
    monkeypatch.setattr(eagle3, "to_offsets", lambda ids_W: ids_W)
    with pytest.raises((ValueError, StageRefusedError), match="d2t"):
        stage.run(stage_config(tmp_path, "eagle3"), group=SingleProcessGroup(CPU))
    assert not (tmp_path / "runs" / "x" / "export" / "eagle3").exists()


def test_eagle_has_a_bias_of_fc_for_sglang_only(tmp_path: Path) -> None:
    spec = make_head(tmp_path, ONE)
    native = load_head(tmp_path / "head")[1]
    for_vllm, for_sglang = export(tmp_path, "eagle"), export(tmp_path, "eagle_sglang")
    theirs = load_file(for_vllm / "model.safetensors")
    assert shapes_of(theirs) == LAYOUTS["eagle"].tensor_shapes(spec)
    assert not {"fc.bias", "lm_head.weight", "norm.weight"} & theirs.keys()
    assert "layers.0.input_layernorm.weight" not in theirs
    assert torch.equal(theirs["fc.weight"], native["eh_proj.weight"])
    others = load_file(for_sglang / "model.safetensors")
    assert not others.pop("fc.bias").any()
    assert others.keys() == theirs.keys()
    configs = [read_json(place / "config.json") for place in (for_vllm, for_sglang)]
    assert [config["architectures"] for config in configs] == [
        ["LlamaForCausalLM"],
        ["LlamaForCausalLMEagle"],
    ]
    assert all("bias" not in config for config in configs)
    commands = [read_json(place / "export.json")["commands"] for place in (for_vllm, for_sglang)]
    assert [list(one) for one in commands] == [["vllm"], ["sglang"]]
    assert '"method": "eagle"' in commands[0]["vllm"]
    assert "--hf-overrides" not in commands[0]["vllm"]
    assert "--speculative-algorithm EAGLE " in commands[1]["sglang"]


def test_eagle_with_a_bias_goes_to_sglang_as_it_is(tmp_path: Path) -> None:
    make_head(tmp_path, {**ONE, "projection_bias": True})
    with pytest.raises(ValueError, match=r"projection_bias=true: .*export\.format=eagle_sglang"):
        export(tmp_path, "eagle")
    native = load_head(tmp_path / "head")[1]
    written = load_file(export(tmp_path, "eagle_sglang") / "model.safetensors")
    assert torch.equal(written["fc.bias"], native["eh_proj.bias"])
    assert written["fc.bias"].any()


@pytest.mark.parametrize(
    ("format", "fields", "message"),
    [
        ("eagle3", {**THREE, "residual": "normed"}, 'residual="normed": .*norm_before_residual'),
        ("eagle3", EAGLE3, r"layer_ids=\[1\]: .* two or more head\.layer_ids"),
        ("eagle3", {}, r"kind=mtp: .*export\.format=mimo"),
        ("eagle3", ONE, r"kind=eagle: .*export\.format=eagle "),
        ("eagle3", MEDUSA, r"kind=medusa: .*export\.format=medusa"),
        ("eagle", THREE, r"kind=eagle3: .*export\.format=eagle3"),
        ("eagle_sglang", {}, r"kind=mtp: .*export\.format=mimo"),
        ("mimo", ONE, r"kind=eagle: .*export\.format=eagle "),
        ("mimo", THREE, r"kind=eagle3: .*export\.format=eagle3"),
        ("eagle", {**ONE, "norm_form": "1+w"}, "norm_form"),
    ],
)
def test_what_a_layout_cannot_carry_is_refused_with_what_is_nearest(
    format: ExportFormat, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_head(tmp_path, fields)
    with pytest.raises(ValueError, match=message):
        export(tmp_path, format)
    assert not (tmp_path / "out").exists()


def test_eagle_leaves_a_draft_vocabulary_out_when_told(tmp_path: Path) -> None:
    make_head(tmp_path, ONE, ids=IDS)
    with pytest.raises(ValueError, match=r"draft_vocab\.size=4: .*export\.draft_vocab=drop"):
        export(tmp_path, "eagle")
    out = export(tmp_path, "eagle", draft_vocab="drop")
    assert read_export(out)[0].draft_vocab is None
    assert read_json(out / "export.json")["dropped_draft_vocab"]


def test_engines_follow_the_layouts(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    assert servable_by(head_spec(target, **THREE)).engines == ("vLLM", "SGLang")
    assert servable_by(head_spec(target, **ONE)).engines == ("vLLM", "SGLang")
    biased = servable_by(head_spec(target, **ONE, projection_bias=True))
    assert (biased.engines, biased.why) == (("SGLang",), "exported in the eagle_sglang layout")
    assert servable_by(head_spec(target, **MEDUSA)).engines == ("vLLM",)
    normed = servable_by(head_spec(target, **{**THREE, "residual": "normed"}))
    assert (normed.engines, normed.why) == (("vLLM",), "exported in the speculators layout")


def test_speculators_files_say_what_the_library_reads(tmp_path: Path) -> None:
    spec = make_head(tmp_path, {**THREE, "residual": "normed", "fusion_norm": "joined"}, ids=IDS)
    out = export(tmp_path, "speculators")
    written = load_file(out / "model.safetensors")
    assert shapes_of(written) == LAYOUTS["eagle3"].tensor_shapes(spec)
    config = read_json(out / "config.json")
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 2
    assert (config["norm_before_residual"], config["norm_before_fc"]) == (True, True)
    assert (config["fc_norm"], config["norm_output"], config["draft_vocab_size"]) == (
        False,
        False,
        4,
    )
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "target")
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert proposal["proposal_type"] == config["speculators_config"]["default_proposal_method"]
    assert read_export(out)[0] == spec
    check_export(out, target_dir=tmp_path / "target")


@pytest.mark.parametrize(
    ("format", "part"), [("eagle3", "eagle-7"), ("eagle", "my-eagle3"), ("eagle", "dflash")]
)
def test_a_path_of_another_method_is_refused(format: ExportFormat, part: str) -> None:
    layout = find_layout(format)
    with pytest.raises(ValueError, match=part.removeprefix("my-")[:6]):
        layout.refuse_path(Path("/runs") / part / "export" / format)
    layout.refuse_path(Path("/runs/mine/export") / format)


def test_p6_asks_for_the_format_of_the_directory_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_head(tmp_path, THREE)
    out, config = export(tmp_path, "eagle3"), make_config(tmp_path)
    assert config.export.format == "mimo"
    config = dataclasses.replace(config, validate=ValidateConfig(head=str(out), k=2))
    asked: list[str] = []

    def open_engine(config: Config) -> None:
        asked.append(vllm_layout(config.export.format).method)
        raise ServingError("reach", "no engine here")

    monkeypatch.setattr(engine_rung, "open_engine", open_engine)
    with pytest.raises(ServingError):
        engine_rung.climb(config, device=CPU)
    assert asked == ["eagle3"]


def ids_for_offsets(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def ids_and_mask(tensors: Tensors) -> None:
    """Ids that stay in the vocabulary, with a mask to match them."""
    ids_W = torch.tensor([1, 4, 5, 6])
    tensors["d2t"] = ids_W - torch.arange(4)
    tensors["t2d"] = eagle3.to_mask(ids_W, vocab_size=11)


def swap_queries(tensors: Tensors) -> None:
    left, right = tensors["layers.0.self_attn.q_proj.weight"].chunk(2, dim=1)
    tensors["layers.0.self_attn.q_proj.weight"] = torch.cat((right, left), dim=1)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "ids": (with_tensors(ids_for_offsets), "tensor d2t holds ids, not offsets"),
    "outside": (with_tensors(lambda t: void(t["d2t"].add_(8))), "tensor t2d does not mark"),
    "other_ids": (with_tensors(ids_and_mask), "tensor d2t (int64) is not what was written"),
    "mask": (with_tensors(lambda t: void(t["t2d"].zero_())), "tensor t2d does not mark"),
    "no_mask": (with_tensors(lambda t: void(t.pop("t2d"))), "tensor t2d [11] is missing"),
    "no_lm_head": (with_tensors(lambda t: void(t.pop("lm_head.weight"))), "lm_head.weight"),
    "swapped": (with_tensors(swap_queries), "column halves exchanged: the embedding comes first"),
    "norm": (
        with_tensors(lambda t: void(t.pop("layers.0.hidden_norm.weight"))),
        "tensor layers.0.hidden_norm.weight",
    ),
    "embedding": (
        with_tensors(lambda t: void(t["embed_tokens.weight"].mul_(2))),
        "embed_tokens.weight",
    ),
    "residual": (
        with_config(lambda c: c.update(norm_before_residual=True)),
        "before_residual=true",
    ),
    "size": (with_config(lambda c: void(c.pop("draft_vocab_size"))), "draft_vocab_size is missing"),
    "layers": (
        with_config(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 2])),
        "eagle_aux_hidden_state_layer_ids=[0, 2], expected [1, 3]",
    ),
    "theta": (with_config(lambda c: c.update(rope_theta=1.0)), "rope_theta=1.0"),
}


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_damage_is_refused_by_name(name: str, made: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    shutil.copytree(made / "out" / "eagle3", directory)
    check_export(directory, target_dir=made / "target")
    damage, message = DAMAGES[name]
    damage(directory)
    with pytest.raises(ValueError, match=r".") as caught:
        check_export(directory, target_dir=made / "target")
    assert message in str(caught.value)
    with pytest.raises(ValueError, match=r"."):
        load_any_head(directory)
