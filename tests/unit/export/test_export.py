"""The MiMo export: what is written, what is refused, and that every damage is named."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from data_prep.config import DataConfig
from mtp_train.config import Config, ExportConfig, RunConfig, TargetConfig, ValidateConfig
from mtp_train.distributed import SingleProcessGroup
from mtp_train.errors import StageRefusedError
from mtp_train.export import (
    check_export,
    load_any_head,
    read_export,
    refresh_readme,
    stage,
    write_export,
)
from mtp_train.export.layouts import LAYOUTS, base, mimo
from mtp_train.export.weights import hash_files, read_weights, write_weights
from mtp_train.run_dir import read_json, write_json_atomic
from mtp_train.stages import run_export, run_validate
from mtp_train.validate.subject import Subject
from runtime.head_spec import DraftVocab, NormPlacement, hash_vocab_ids, load_head, save_head
from runtime.layer_parts import LayerParts
from runtime.models.loader import load_target
from tests.unit.export.tampers import TAMPERS
from tests.unit.runtime.engine_fixtures import (
    EAGLE3,
    MEDUSA,
    head_spec,
    random_head_tensors,
    tiny_target,
)
from tests.unit.runtime.model_fixtures import LLAMA3_ROPE, YARN_ROPE, save_llama, save_model
from tests.unit.validate.subjects import RUNTIME

CPU = torch.device("cpu")
LAYER = "model.mtp_layers.0."


def make_head(path: Path, *, validated: bool = True, family: str = "llama", **spec: Any) -> None:
    """``target/`` and ``head/`` below ``path``; the head passes validation when asked to."""
    target = tiny_target(path / "target", family=family)
    head = head_spec(target, **spec)
    save_head(path / "head", head, random_head_tensors(head))
    if validated:
        pass_validation(path / "head")


def pass_validation(head: Path) -> None:
    rung = {"passed": True, "figures": {}, "bounds": {}, "note": "3 sequences", "seconds": 1.0}
    content = {
        "passed": True,
        "head_sha256": hash_files(head),
        "rungs": {"P2": rung},
        "acceptance": [],
        "speed": [
            {"batch_size": 1, "k": 1, "speedup": 1.1},
            {"batch_size": 1, "k": 2, "speedup": 1.2},
        ],
    }
    write_json_atomic(head / "parity.json", content)


def export(path: Path, **arguments: Any) -> Path:
    write_export(
        path / "head",
        path / "out" / "mimo",
        format="mimo",
        target_dir=path / "target",
        **arguments,
    )
    return path / "out" / "mimo"


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def make_config(path: Path, **settings: Any) -> Config:
    return Config(
        run=RunConfig("x", root=str(path / "runs")),
        target=TargetConfig(str(path / "target"), dtype="float32", device="cpu"),
        data=DataConfig(),
        runtime=RUNTIME,
        validate=ValidateConfig(head=str(path / "head"), k=2),
        export=ExportConfig(**settings),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made")
    make_head(path)
    export(path)
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """An export that a test may damage; target and head are shared."""
    for name in ("target", "head"):
        (tmp_path / name).symlink_to(made / name)
    shutil.copytree(made / "out", tmp_path / "out")
    return tmp_path


def test_tensors_are_those_of_the_layout_and_the_projection_is_hidden_first(made: Path) -> None:
    spec, native = load_head(made / "head")
    written = load_file(made / "out" / "mimo" / "model.safetensors")
    assert shapes_of(written) == LAYOUTS["mimo"].tensor_shapes(spec)
    width = spec.hidden_size
    projection = written[LAYER + "input_proj.weight"]
    assert torch.equal(projection[:, :width], native["eh_proj.weight"][:, width:])
    assert torch.equal(projection[:, width:], native["eh_proj.weight"][:, :width])
    for ours, theirs in (
        ("token_layernorm", "enorm"),
        ("hidden_layernorm", "hnorm"),
        ("final_layernorm", "norm"),
        ("self_attn.q_proj", "layers.0.self_attn.q_proj"),
        ("input_layernorm", "layers.0.input_layernorm"),
    ):
        assert torch.equal(written[f"{LAYER}{ours}.weight"], native[f"{theirs}.weight"])
    biases = [name for name in written if name.endswith(".bias")]
    assert len(biases) == 3
    assert not any(written[name].any() for name in biases)
    target = load_file(made / "target" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(written[name], target[name])


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn"])
def test_another_reader_finds_the_targets_sizes_and_rope(kind: str, tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 7e4}
    rope = {"default": plain, "llama3": LLAMA3_ROPE, "yarn": YARN_ROPE}[kind]
    save_llama(tmp_path / "target", vocab_size=11, rope_parameters=rope)
    target = load_target(tmp_path / "target", dtype=torch.float32, device=CPU)
    spec = head_spec(target, rope=target.config.rope)
    save_head(tmp_path / "head", spec, random_head_tensors(spec))
    out = export(tmp_path, unvalidated=True)
    config = AutoConfig.from_pretrained(out)
    wanted = AutoConfig.from_pretrained(tmp_path / "target")
    assert config.rope_parameters == wanted.rope_parameters
    raw = read_json(out / "config.json")
    assert raw["rope_theta"] == rope["rope_theta"]
    assert ("rope_scaling" in raw) == (kind != "default")
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "dtype",
    ):
        assert getattr(config, name) == getattr(wanted, name), name
    assert (config.architectures, config.model_type) == (["MiMoForCausalLM"], "qwen2")
    assert (config.num_nextn_predict_layers, config.tie_word_embeddings) == (1, False)


def test_reading_back_gives_the_native_head_hidden_first(made: Path) -> None:
    spec, native = load_head(made / "head")
    read_spec, tensors = read_export(made / "out" / "mimo")
    assert read_spec == dataclasses.replace(spec, concat="hidden_embedding")
    native["eh_proj.weight"] = base.swap_halves(native["eh_proj.weight"])
    assert tensors.keys() == native.keys()
    assert all(torch.equal(tensors[name], native[name]) for name in native)


def test_a_shorter_length_is_what_engines_read_and_a_longer_one_is_refused(made: Path) -> None:
    target_len = load_head(made / "head")[0].max_position_embeddings
    directory = made / "short" / "mimo"
    write_export(
        made / "head",
        directory,
        format="mimo",
        target_dir=made / "target",
        unvalidated=True,
        max_length=target_len // 2,
    )
    assert read_json(directory / "config.json")["max_position_embeddings"] == target_len // 2
    check_export(directory, target_dir=made / "target")
    assert read_export(directory)[0].max_position_embeddings == target_len // 2
    with pytest.raises(ValueError, match=r"export\.max_length=.*positions"):
        write_export(
            made / "head",
            directory,
            format="mimo",
            target_dir=made / "target",
            unvalidated=True,
            max_length=target_len + 1,
        )


def test_a_qwen2_head_keeps_its_biases(tmp_path: Path) -> None:
    make_head(tmp_path, family="qwen2")
    out = export(tmp_path)
    spec, native = load_head(tmp_path / "head")
    assert spec.layer_parts == LayerParts(qkv_bias=True)
    written = load_file(out / "model.safetensors")
    assert shapes_of(written) == LAYOUTS["mimo"].tensor_shapes(spec)
    for name in ("q_proj", "k_proj", "v_proj"):
        bias = native[f"layers.0.self_attn.{name}.bias"]
        assert bias.any()
        assert torch.equal(written[f"{LAYER}self_attn.{name}.bias"], bias)
    check_export(out, target_dir=tmp_path / "target")
    read_spec, tensors = read_export(out)
    assert read_spec == dataclasses.replace(spec, concat="hidden_embedding")
    assert tensors.keys() == native.keys()


@pytest.mark.parametrize(("family", "head_dim"), [("qwen2", None), ("qwen3", 8)])
def test_the_stage_reads_heads_for_other_families_back(
    family: str, head_dim: int | None, tmp_path: Path
) -> None:
    """Of Qwen3 a head with plain layers, in which the biases are zeros."""
    changes = {} if head_dim is None else {"head_dim": head_dim}
    save_model(tmp_path / "target", family, vocab_size=11, **changes)
    target = load_target(tmp_path / "target", dtype=torch.float32, device=CPU)
    parts = target.config.layer_parts if family == "qwen2" else LayerParts()
    spec = head_spec(target, layer_parts=parts)
    save_head(tmp_path / "head", spec, random_head_tensors(spec))
    outcome = stage.run(make_config(tmp_path, unvalidated=True), group=SingleProcessGroup(CPU))
    assert outcome.read_back is not None
    assert max(outcome.read_back.native_hidden, outcome.read_back.native_logits) < 1e-4


def test_a_hidden_first_head_is_not_permuted(tmp_path: Path) -> None:
    make_head(tmp_path, concat="hidden_embedding")
    out = export(tmp_path)
    written = load_file(out / "model.safetensors")
    native = load_head(tmp_path / "head")[1]
    assert torch.equal(written[LAYER + "input_proj.weight"], native["eh_proj.weight"])


def test_a_tied_target_ships_its_embedding_twice(tmp_path: Path) -> None:
    save_llama(tmp_path / "target", vocab_size=11, tie_word_embeddings=True)
    target = load_target(tmp_path / "target", dtype=torch.float32, device=CPU)
    spec = head_spec(target)
    save_head(tmp_path / "head", spec, random_head_tensors(spec))
    out = export(tmp_path, unvalidated=True)
    written = load_file(out / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    assert read_json(out / "config.json")["tie_word_embeddings"] is False


@pytest.mark.parametrize("name", sorted(TAMPERS))
def test_damage_is_refused_by_name(name: str, copy: Path) -> None:
    directory = copy / "out" / "mimo"
    check_export(directory, target_dir=copy / "target")
    TAMPERS[name].apply(directory)
    with pytest.raises(ValueError, match=r".") as caught:
        check_export(directory, target_dir=copy / "target")
    assert TAMPERS[name].named in str(caught.value)
    with pytest.raises(ValueError, match=r"."):
        load_any_head(directory)


def test_weights_beyond_the_limit_are_split_and_read_back_the_same(made: Path) -> None:
    whole = load_any_head(made / "out" / "mimo")[1]
    out = made / "sharded"
    write_export(
        made / "head",
        out,
        format="mimo",
        target_dir=made / "target",
        unvalidated=True,
        max_file_bytes=40_000,
    )
    index = read_json(out / "model.safetensors.index.json")
    files = set(index["weight_map"].values())
    assert len(files) > 1
    assert {file.name for file in out.glob("*.safetensors")} == files
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for name in files for tensor in load_file(out / name).values()
    )
    check_export(out, target_dir=made / "target")
    tensors = load_any_head(out)[1]
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    assert hash_files(out).keys() == {"config.json", "model.safetensors.index.json", *files}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("lose", r"of model\.safetensors\.index\.json is missing"),
        ("add", r"extra\.safetensors is not in"),
        ("rename", "(lacks|holds) tensor a"),
        ("escape", "must be a file of this directory"),
        ("empty", "weight_map is missing"),
    ],
)
def test_damaged_shards_are_named(damage: str, message: str, tmp_path: Path) -> None:
    tensors = {name: torch.full((100,), value) for name, value in (("a", 1.0), ("b", 2.0))}
    write_weights(tmp_path, tensors, max_file_bytes=500)
    index_file = tmp_path / "model.safetensors.index.json"
    index = read_json(index_file)
    first, second = (tmp_path / index["weight_map"][name] for name in ("a", "b"))
    assert first != second
    if damage == "lose":
        second.unlink()
    if damage == "add":
        shutil.copy(first, tmp_path / "extra.safetensors")
    if damage == "rename":
        shutil.copy(first, second)
    if damage == "escape":
        index["weight_map"]["a"] = "../a.safetensors"
    if damage == "empty":
        index["weight_map"] = {}
    write_json_atomic(index_file, index)
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path)


def test_a_second_file_of_weights_without_an_index_is_refused(copy: Path) -> None:
    directory = copy / "out" / "mimo"
    shutil.copy(directory / "model.safetensors", directory / "consolidated.safetensors")
    with pytest.raises(ValueError, match=r"consolidated\.safetensors"):
        check_export(directory, target_dir=copy / "target")


def test_a_record_of_the_first_version_is_read(copy: Path) -> None:
    directory = copy / "out" / "mimo"
    record = read_json(directory / "export.json")
    hashes = record.pop("files_sha256")
    record |= {
        "version": 1,
        "config_sha256": hashes["config.json"],
        "weights_sha256": hashes["model.safetensors"],
    }
    write_json_atomic(directory / "export.json", record)
    check_export(directory, target_dir=copy / "target")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "export.json"])
def test_a_missing_file_is_named(name: str, copy: Path) -> None:
    directory = copy / "out" / "mimo"
    (directory / name).unlink()
    with pytest.raises(ValueError, match=name):
        check_export(directory, target_dir=copy / "target")
    with pytest.raises(ValueError, match=name):
        load_any_head(directory)


def test_an_export_rewritten_as_a_whole_is_still_held_against_the_target(copy: Path) -> None:
    """Record and configuration agree with each other, but not with the target."""
    directory = copy / "out" / "mimo"
    record = read_json(directory / "export.json")
    record["head"]["rope"]["theta"] *= 2
    theta = record["head"]["rope"]["theta"]
    config = read_json(directory / "config.json")
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = theta
    write_json_atomic(directory / "config.json", config)
    record["files_sha256"] = hash_files(directory)
    write_json_atomic(directory / "export.json", record)
    read_export(directory)
    with pytest.raises(ValueError, match="rope_theta"):
        check_export(directory, target_dir=copy / "target")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("extra", 1, "extra is unknown"),
        ("version", 3, "version=3"),
        ("format", "onnx", "format='onnx'"),
        ("format", "eagle3", "head kind=mtp: the eagle3 layout"),
        ("num_target_layers", 3, "num_hidden_layers=2, expected 3"),
    ],
)
def test_a_damaged_record_is_named(key: str, value: Any, message: str, copy: Path) -> None:
    file = copy / "out" / "mimo" / "export.json"
    write_json_atomic(file, read_json(file) | {key: value})
    with pytest.raises(ValueError, match=message):
        check_export(file.parent, target_dir=copy / "target")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (MEDUSA, r"head kind=medusa: .*export\.format=medusa \(vLLM\) is the layout"),
        (EAGLE3, "head kind=eagle3: .* no place for residual streams"),
        ({"recycle": "pre_norm"}, 'recycle="pre_norm"'),
        ({"first_embedding_mask": False}, "first_embedding_mask=false"),
        ({"norm_form": "1+w"}, "norm_form"),
        ({"position_offset": 1}, "position_offset=1"),
        ({"recycle": "pre_norm", "logits_from": "pre_norm"}, "logits_from"),
        ({"projection_bias": True}, "projection_bias=true"),
        ({"norms": NormPlacement(hnorm=False)}, r"norms\.hnorm=false"),
        ({"norms": NormPlacement(input=False)}, r"norms\.input=false"),
        ({"head_dim": 4}, "head_dim=4"),
        ({"layer_parts": LayerParts(qk_norm=True)}, "layer_parts: qk_norm: .*head.decoder=llama"),
        (
            {"layer_parts": LayerParts(qkv_bias=True, out_bias=True, mlp_bias=True)},
            "layer_parts: out_bias, mlp_bias: ",
        ),
    ],
)
def test_what_the_layout_cannot_carry_is_refused(
    spec: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_head(tmp_path, **spec)
    with pytest.raises(ValueError, match=message):
        export(tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("norm_eps", 1e-3, "rms_norm_eps=0.001"),
        ("max_position_embeddings", 64, "max_position_embeddings=64"),
        ("target_fingerprint", "0" * 64, "target_fingerprint=000000000000"),
    ],
)
def test_a_head_of_another_target_is_refused(
    field: str, value: Any, message: str, tmp_path: Path
) -> None:
    make_head(tmp_path, **{field: value})
    with pytest.raises(ValueError, match=message):
        export(tmp_path)


@pytest.mark.parametrize("part", ["eagle-7", "EAGLE3", "my-dflash", "dspark"])
def test_a_path_that_vllm_would_misread_is_refused(part: str, made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another kind"):
        write_export(
            made / "head", tmp_path / part / "mimo", format="mimo", target_dir=made / "target"
        )


def test_only_a_head_whose_own_validation_passed_is_exported(tmp_path: Path) -> None:
    make_head(tmp_path, validated=False)
    with pytest.raises(ValueError, match=r"no parity\.json"):
        export(tmp_path)
    pass_validation(tmp_path / "head")
    parity = read_json(tmp_path / "head" / "parity.json")
    write_json_atomic(
        tmp_path / "head" / "parity.json",
        parity | {"passed": False, "rungs": {"P3": parity["rungs"]["P2"] | {"passed": False}}},
    )
    with pytest.raises(ValueError, match=r"failed \(P3\)"):
        export(tmp_path)
    pass_validation(tmp_path / "head")
    spec, tensors = load_head(tmp_path / "head")
    save_head(tmp_path / "head", spec, {n: t * 1.5 for n, t in tensors.items()})
    with pytest.raises(ValueError, match="other weights"):
        export(tmp_path)
    out = export(tmp_path, unvalidated=True)
    assert not (out / "parity.json").exists()
    assert "without validation" in (out / "README.md").read_text()
    assert read_json(out / "export.json")["is_validated"] is False


def test_an_export_is_not_exported_again(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="export the native head"):
        write_export(
            made / "out" / "mimo", tmp_path / "a", format="mimo", target_dir=made / "target"
        )


def test_a_draft_vocabulary_is_refused_or_left_out_with_a_warning(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    ids = torch.tensor([1, 4, 5])
    vocab = DraftVocab(size=3, coverage=0.5, ids_sha256=hash_vocab_ids(ids))
    spec = head_spec(target, draft_vocab=vocab)
    save_head(tmp_path / "head", spec, random_head_tensors(spec) | {"draft_vocab_ids": ids})
    pass_validation(tmp_path / "head")
    with pytest.raises(ValueError, match=r"draft_vocab\.size=3.*export\.draft_vocab=drop"):
        export(tmp_path)
    out = export(tmp_path, draft_vocab="drop")
    assert read_export(out)[0].draft_vocab is None
    assert "measured again" in (out / "README.md").read_text()
    write_json_atomic(out / "parity.json", {"head_sha256": hash_files(out), "rungs": {}})
    refresh_readme(out)
    assert "measured again" not in (out / "README.md").read_text()


def test_nothing_is_left_when_verification_refuses(tmp_path: Path) -> None:
    make_head(tmp_path)
    out = export(tmp_path)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def refuse(staged: Path) -> None:
        assert staged.parent == out.parent
        assert (staged / "README.md").is_file()
        raise StageRefusedError("no")

    with pytest.raises(StageRefusedError):
        export(tmp_path, verify=refuse)
    assert [place.name for place in out.parent.iterdir()] == ["mimo"]
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_the_readme_holds_ready_commands_and_says_what_was_run(made: Path, copy: Path) -> None:
    directory = copy / "out" / "mimo"
    text = (directory / "README.md").read_text()
    speculative = '{"method": "mtp", "model": "HEAD", "num_speculative_tokens": 2}'
    assert f"--speculative-config '{speculative}'" in text
    assert "--hf-overrides '{\"num_nextn_predict_layers\": 1}'" in text
    assert "--speculative-draft-model-path HEAD" in text
    assert "--speculative-num-draft-tokens 3" in text
    assert "vLLM (not run with this head)" in text
    parity = read_json(directory / "parity.json")
    parity["rungs"]["P6"] = {"passed": True, "note": "vLLM 0.32, K=3: equal counts"}
    write_json_atomic(directory / "parity.json", parity)
    refresh_readme(directory)
    assert "vLLM (P6 passed: vLLM 0.32, K=3: equal counts)" in (directory / "README.md").read_text()


def test_the_stage_reads_back_and_is_not_repeated(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_head(tmp_path)
    config = make_config(tmp_path)
    assert run_export(config) == 0
    printed = capsys.readouterr().out
    assert "P2 passed" in printed
    assert '"num_speculative_tokens": 2' in printed, "not the K that P5 found fastest"
    out = tmp_path / "runs" / "x" / "export" / "mimo"
    written = (out / "model.safetensors").stat().st_mtime_ns
    assert run_export(config) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (out / "model.safetensors").stat().st_mtime_ns == written

    TAMPERS["eps"].apply(out)
    assert run_export(config) == 0  # written again
    check_export(out, target_dir=tmp_path / "target")

    spec, tensors = load_head(tmp_path / "head")
    save_head(tmp_path / "head", spec, {n: t * 1.5 for n, t in tensors.items()})
    pass_validation(tmp_path / "head")
    assert run_export(config) == 0  # another head replaces it
    assert read_json(out / "export.json")["head_sha256"] == hash_files(tmp_path / "head")


def test_a_writer_that_forgets_the_order_is_caught_by_reading_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_head(tmp_path)
    monkeypatch.setattr(mimo, "swap_halves", lambda weight: weight)
    with pytest.raises(StageRefusedError, match="differ from the native head"):
        stage.run(make_config(tmp_path), group=SingleProcessGroup(CPU))
    assert not (tmp_path / "runs" / "x" / "export" / "mimo").exists()


def test_the_check_is_a_command_of_its_own(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copy / "out" / "mimo"
    config = make_config(copy, check=str(directory))
    assert run_export(config) == 0
    assert "unchanged" in capsys.readouterr().out
    TAMPERS["nan"].apply(directory)
    with pytest.raises(ValueError, match=r"mlp\.down_proj\.weight"):
        run_export(config)


def test_the_ladder_takes_an_exported_head(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtp_train.validate import ladder
    from mtp_train.validate.ladder import PromptSet
    from tests.unit.validate.subjects import make_prompts

    def prompt_sets(config: Config, subject: Subject) -> list[PromptSet]:
        return [PromptSet("random", tuple(tuple(p) for p in make_prompts()))]

    monkeypatch.setattr(ladder, "load_prompt_sets", prompt_sets)
    directory = copy / "out" / "mimo"
    config = make_config(copy)
    validate = ValidateConfig(head=str(directory), k=2, max_tokens=20, rungs=("P2", "P3"))
    assert run_validate(dataclasses.replace(config, validate=validate)) == 0
    parity = read_json(directory / "parity.json")
    assert parity["head_sha256"] == hash_files(directory)
    assert parity["passed"]
    assert "on this directory" in (directory / "README.md").read_text()
    check_export(directory, target_dir=copy / "target")
