"""Heads of others come in bit-equal, or are refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.config import Config, ExportFormat, ForeignConfig, HeadConfig, HeadNorms
from mtp_train.export import read_export, write_export
from mtp_train.foreign.importing import native_directory, with_native_heads
from mtp_train.heads.init import make_head_spec, read_draft_list, read_initial_head
from mtp_train.run_dir import read_json
from runtime.head_spec import (
    DraftVocab,
    HeadSpec,
    hash_vocab_ids,
    load_head,
    load_head_spec,
)
from runtime.models.config import load_config
from tests.unit.export.test_eagle_layouts import IDS, make_target, put_head
from tests.unit.export.test_export import make_config
from tests.unit.foreign.heads import (
    KINDS,
    NARROW,
    NUM_LAYERS,
    bring_in,
    change_config,
    change_tensors,
    forget_record,
    make_export,
    make_medusa,
    put,
    rename,
)

# Latent attention and experts are read with the record alone (tests/unit/native).
FORMATS = tuple(name for name in get_args(ExportFormat) if name != "deepseek")


def same_weights(found: Any, wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype
        for name in wanted
    )


def without_coverage(spec: HeadSpec) -> HeadSpec:
    """How much of a training set a list covers is in no format."""
    if spec.draft_vocab is None:
        return spec
    return dataclasses.replace(
        spec, draft_vocab=dataclasses.replace(spec.draft_vocab, coverage=0.0)
    )


def test_every_format_that_is_written_has_a_case() -> None:
    assert set(KINDS) == set(FORMATS)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_written_comes_back_bit_equal_without_its_record(
    format: ExportFormat, tmp_path: Path
) -> None:
    target = make_target(tmp_path / "target", num_layers=NUM_LAYERS)
    fields, ids = KINDS[format]
    put_head(tmp_path / "head", target, fields, ids=ids)
    out = tmp_path / "out" / format
    write_export(
        tmp_path / "head", out, format=format, target_dir=tmp_path / "target", unvalidated=True
    )
    spec, tensors = read_export(out)
    forget_record(out)
    head = bring_in(tmp_path, out)
    assert head.spec == without_coverage(spec)
    assert same_weights(head.tensors, tensors)
    native_spec, native = load_head(tmp_path / "head")
    assert without_coverage(native_spec) == head.spec
    assert same_weights(head.tensors, native)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_biases_of_the_mimo_layout_come_back_where_they_are_some(
    family: str, tmp_path: Path
) -> None:
    from tests.unit.runtime.engine_fixtures import tiny_target

    target = tiny_target(tmp_path / "target", family=family)
    parts = target.config.layer_parts
    put_head(tmp_path / "head", target, {"layer_parts": parts, "concat": "hidden_embedding"})
    out = tmp_path / "out" / "mimo"
    write_export(
        tmp_path / "head", out, format="mimo", target_dir=tmp_path / "target", unvalidated=True
    )
    forget_record(out)
    head = bring_in(tmp_path, out)
    assert head.spec.layer_parts == parts
    assert same_weights(head.tensors, load_head(tmp_path / "head")[1])


def test_the_names_of_eagles_repository_are_the_same_head(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    rename(out, ("layers.0.", "midlayer."))
    change_tensors(out, lambda t: t.pop("embed_tokens.weight"))
    change_config(out, lambda c: c.pop("num_aux_hidden_states"))
    head = bring_in(tmp_path, out)
    assert head.spec.layer_ids == (2, 3, 4)
    assert same_weights(head.tensors, load_head(tmp_path / "head")[1])


def test_the_speculators_eagle_head_is_an_eagle_head(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle_sglang")
    rename(out, ("fc.", "fusion_fc."), ("layers.0.", "transformer."))
    config = read_json(out / "config.json")
    block = {key: value for key, value in config.items() if key != "architectures"}
    spec = {"speculators_model_type": "eagle", "transformer_layer_config": block}
    change_config(out, lambda c: (c.clear(), c.update(spec)))
    head = bring_in(tmp_path, out)
    assert head.inspection.format is not None
    assert head.inspection.format.key == "speculators_eagle"
    assert same_weights(head.tensors, load_head(tmp_path / "head")[1])


def test_deepseeks_names_put_the_embedding_first(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", num_layers=NUM_LAYERS)
    put_head(tmp_path / "head", target, {"concat": "embedding_hidden"})
    native = load_file(tmp_path / "head" / "model.safetensors")
    prefix = f"model.layers.{NUM_LAYERS}."
    tensors = {
        prefix + name.replace("layers.0.", "").replace("norm.weight", "shared_head.norm.weight")
        if name == "norm.weight"
        else prefix + name.replace("layers.0.", ""): tensor
        for name, tensor in native.items()
    }
    config = read_json(tmp_path / "target" / "config.json")
    config["num_nextn_predict_layers"] = 1
    out = put(tmp_path / "deepseek", config, tensors)
    head = bring_in(tmp_path, out)
    assert head.spec.concat == "embedding_hidden"
    assert head.spec.first_embedding_mask
    assert same_weights(head.tensors, native)
    chosen = ForeignConfig(first_embedding_mask=False)
    assert not bring_in(tmp_path, out, chosen).spec.first_embedding_mask


def test_the_order_of_mimo_names_depends_on_their_prefix(tmp_path: Path) -> None:
    out = make_export(tmp_path, "mimo")
    assert bring_in(tmp_path, out).spec.concat == "hidden_embedding"
    rename(out, ("model.mtp_layers.0.", "mtp_layers.0."), ("model.embed_tokens", "embed_tokens"))
    change_tensors(out, lambda t: [t.pop(f"mtp_layers.0.self_attn.{p}_proj.bias") for p in "qkv"])
    block = read_json(out / "config.json")
    spec = {"speculators_model_type": "mtp", "transformer_layer_config": block}
    change_config(out, lambda c: (c.clear(), c.update(spec)))
    assert bring_in(tmp_path, out).spec.concat == "embedding_hidden"
    chosen = ForeignConfig(concat="hidden_embedding")
    assert bring_in(tmp_path, out, chosen).spec.concat == "hidden_embedding"


def test_medusa_keeps_its_lm_heads_unless_they_are_left_out(tmp_path: Path) -> None:
    out = make_medusa(tmp_path)
    wanted = load_head(tmp_path / "head")
    head = bring_in(tmp_path, out)
    assert head.spec == wanted[0]
    assert same_weights(head.tensors, wanted[1])
    own = {f"{h}.1.weight": torch.rand(11, 32) for h in range(3)}
    change_tensors(out, lambda t: t.update(own))
    head = bring_in(tmp_path, out)
    assert head.spec.lm_head == "own"
    assert torch.equal(head.tensors["lm_heads.1.weight"], own["1.1.weight"])
    chosen = ForeignConfig(vocabulary="target")
    assert same_weights(bring_in(tmp_path, out, chosen).tensors, wanted[1])
    change_tensors(out, lambda t: [t.pop(f"{h}.1.weight") for h in (0, 2)])
    with pytest.raises(ValueError, match=r"tensor 1\.1\.weight differs from the target's lm_head"):
        bring_in(tmp_path, out)


def test_a_list_of_ids_in_the_place_of_offsets_needs_to_be_said(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    change_tensors(out, lambda t: t.update(d2t=torch.tensor(IDS)))
    head = bring_in(tmp_path, out)  # t2d says which it is
    assert head.tensors["draft_vocab_ids"].tolist() == list(IDS)
    change_tensors(out, lambda t: (t.pop("t2d"), t.update(d2t=torch.tensor([0, 1, 3, 6]))))
    with pytest.raises(ValueError, match=r"d2t could hold offsets or ids.*foreign\.draft_ids"):
        bring_in(tmp_path, out)
    for choice, ids in (("offset", [0, 2, 5, 9]), ("absolute", [0, 1, 3, 6])):
        chosen = bring_in(tmp_path, out, ForeignConfig(draft_ids=choice))  # type: ignore[arg-type]
        assert chosen.tensors["draft_vocab_ids"].tolist() == ids


def test_what_the_files_leave_open_is_asked_for(tmp_path: Path) -> None:
    out = make_export(tmp_path, "speculators")
    change_config(out, lambda c: c.pop("norm_before_residual"))
    with pytest.raises(ValueError, match=r"foreign\.norm_before_residual=true\|false"):
        bring_in(tmp_path, out)
    for normed, residual in ((True, "normed"), (False, "standard")):
        chosen = ForeignConfig(norm_before_residual=normed)
        assert bring_in(tmp_path, out, chosen).spec.residual == residual
    change_config(out, lambda c: c.pop("eagle_aux_hidden_state_layer_ids"))
    with pytest.raises(ValueError, match=r"2 residual streams fc reads; say foreign\.layer_ids"):
        bring_in(tmp_path, out, ForeignConfig(norm_before_residual=True))
    chosen = ForeignConfig(norm_before_residual=True, layer_ids=(1, 3))
    assert bring_in(tmp_path, out, chosen).spec.layer_ids == (1, 3)


def test_layer_ids_that_engines_read_differently_are_asked_for(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3", layer_ids=(1, 3))
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3]}
    change_config(out, lambda c: c.update(eagle_config=nested))
    with pytest.raises(ValueError, match=r"\[1, 3\] or \[2, 4\]; say foreign\.layer_ids"):
        bring_in(tmp_path, out)
    change_config(out, lambda c: c.pop("eagle_aux_hidden_state_layer_ids"))
    assert bring_in(tmp_path, out).spec.layer_ids == (2, 4)


def test_an_embedding_of_its_own_stays_unless_left_out(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    change_tensors(out, lambda t: t["embed_tokens.weight"].mul_(2))
    native = load_head(tmp_path / "head")[1]
    head = bring_in(tmp_path, out)
    assert head.spec.embedding == "own"
    own = load_file(out / "model.safetensors")["embed_tokens.weight"]
    assert same_weights(head.tensors, native | {"embed_tokens.weight": own})
    left_out = bring_in(tmp_path, out, ForeignConfig(vocabulary="target"))
    assert left_out.spec.embedding == "target"
    assert same_weights(left_out.tensors, native)


@pytest.mark.parametrize("format", ["eagle", "mimo"])
def test_other_heads_have_no_embedding_of_their_own(format: ExportFormat, tmp_path: Path) -> None:
    out = make_export(tmp_path, format)
    name = "embed_tokens.weight" if format == "eagle" else "model.embed_tokens.weight"
    change_tensors(out, lambda t: t[name].mul_(2))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight differs.*foreign\.vocabulary"):
        bring_in(tmp_path, out)


def test_a_head_keeps_its_rope_unless_told_to_take_the_targets(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle")
    change_config(
        out,
        lambda c: (c.update(rope_theta=5e5), c["rope_parameters"].update(rope_theta=5e5)),
    )
    assert bring_in(tmp_path, out).spec.rope.theta == 5e5
    assert bring_in(tmp_path, out, ForeignConfig(rope="target")).spec.rope.theta == 1e4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"norm\.weight: missing"),
        (lambda t: t.pop("layers.0.mlp.up_proj.weight"), r"layers\.0\.mlp\.up_proj\.weight"),
        (lambda t: t.update(extra=torch.ones(2)), r"extra: \[2\]; expected no tensor"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"].t().contiguous()}),
            r"fc\.weight: .*it is transposed",
        ),
        (lambda t: t["lm_head.weight"].fill_(torch.nan), r"lm_head\.weight has 128 values"),
        (lambda t: t["d2t"].add_(100), r"d2t: does not name the tokens that t2d marks"),
    ],
)
def test_faults_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    change_tensors(out, change)
    with pytest.raises(ValueError, match=message):
        bring_in(tmp_path, out)


@pytest.mark.parametrize("fusion", ["none", "each", "joined"])
@pytest.mark.parametrize("format", ["eagle3", "speculators"])
def test_a_head_narrower_than_its_target_comes_in_and_goes_out(
    format: ExportFormat, fusion: str, tmp_path: Path
) -> None:
    out = make_export(tmp_path, format, **NARROW, fusion_norm=fusion)
    assert read_json(out / "config.json")["target_hidden_size"] == 32
    head = bring_in(tmp_path, out)
    spec, tensors = load_head(tmp_path / "head")
    assert head.spec == without_coverage(spec)
    assert same_weights(head.tensors, tensors)
    assert tensors["embed_tokens.weight"].shape == (11, 24)


def test_a_narrow_head_without_an_embedding_is_refused(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3", **NARROW)
    change_tensors(out, lambda t: t.pop("embed_tokens.weight"))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: missing"):
        bring_in(tmp_path, out)


def test_a_head_wider_than_its_target_is_refused_with_the_reason(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    change_config(out, lambda c: c.update(target_hidden_size=16))
    change_tensors(out, lambda t: t.update({"fc.weight": torch.randn(32, 3 * 16)}))
    narrower = tmp_path / "narrower"
    narrower.mkdir()
    make_target(narrower / "target", num_layers=NUM_LAYERS, hidden_size=16)
    with pytest.raises(ValueError, match="is 32 wide and reads states of 16"):
        bring_in(narrower, out)


def test_a_head_of_another_shape_of_target_is_refused(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    wide = tmp_path / "wide"
    wide.mkdir()
    make_target(wide / "target", num_layers=NUM_LAYERS, hidden_size=64)
    with pytest.raises(ValueError, match="hidden_size: 32; expected 64, the target's"):
        bring_in(wide, out)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    torch.save({"fc.weight": torch.ones(1)}, out / "pytorch_model.bin")
    (out / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin.*weights_only=True"):
        bring_in(tmp_path, out)


def test_an_imported_head_is_made_once_and_leaves_the_directory_alone(tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    before = sorted(file.name for file in out.iterdir())
    arguments: dict[str, Any] = {
        "target_dir": tmp_path / "target",
        "cache_dir": tmp_path / "cache",
        "into": tmp_path / "imported",
    }
    (tmp_path / "cache").mkdir(exist_ok=True)
    place = native_directory(out, ForeignConfig(), **arguments)
    assert sorted(file.name for file in out.iterdir()) == before
    assert same_weights(load_head(place)[1], load_head(tmp_path / "head")[1])
    stamp = (place / "model.safetensors").stat().st_mtime_ns
    assert native_directory(out, ForeignConfig(), **arguments) == place
    assert (place / "model.safetensors").stat().st_mtime_ns == stamp
    other = native_directory(out, ForeignConfig(rope="target"), **arguments)
    assert other != place
    assert native_directory(place, ForeignConfig(), **arguments) == place


@pytest.mark.parametrize("changes", [{}, NARROW], ids=["as wide", "narrow"])
def test_training_goes_on_from_it_with_its_own_list_and_sizes(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    out = make_export(tmp_path, "eagle3", **changes)
    config = make_config(tmp_path)
    fields = HeadConfig(
        kind="eagle3",
        init=str(out),
        draft_vocab_size=4,
        recycle="pre_norm",
        first_embedding_mask=False,
        norms=HeadNorms(input=False),
    )
    config = dataclasses.replace(config, head=fields)
    native = with_native_heads(config)
    assert native.validate.head == config.validate.head  # a native one
    path = Path(native.head.init)
    ids_W = read_draft_list(path, size=4)
    assert ids_W is not None
    assert ids_W.tolist() == list(IDS)
    vocab = DraftVocab(4, coverage=0.25, ids_sha256=hash_vocab_ids(ids_W))
    target = load_config(tmp_path / "target")
    made = {"fingerprint": "f", "draft_vocab": vocab, "like": load_head_spec(path)}
    spec = make_head_spec(native.head, target, **made)
    initial = read_initial_head(path, spec)
    wanted = load_head(tmp_path / "head")[1]
    assert all(torch.equal(initial[name], wanted[name]) for name in wanted)
    assert spec.input_size == 3 * target.hidden_size
    with pytest.raises(ValueError, match=r"drafts from 4 tokens; set head\.draft_vocab_size=4"):
        read_draft_list(path, size=0)
    other = dataclasses.replace(target, hidden_size=48)
    with pytest.raises(ValueError, match="reads states 32 wide, the target's are 48"):
        make_head_spec(native.head, other, **made)


def test_an_export_of_ours_can_be_trained_on(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", num_layers=NUM_LAYERS)
    put_head(tmp_path / "head", target, {})
    out = tmp_path / "out" / "mimo"
    write_export(
        tmp_path / "head", out, format="mimo", target_dir=tmp_path / "target", unvalidated=True
    )
    config: Config = make_config(tmp_path)
    config = dataclasses.replace(
        config,
        head=dataclasses.replace(config.head, init=str(out)),
        validate=dataclasses.replace(config.validate, head=str(out)),
    )
    native = with_native_heads(config)
    assert native.validate.head == str(out)
    assert load_head(Path(native.head.init))[0].concat == "hidden_embedding"
