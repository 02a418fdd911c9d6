"""The layout of Medusa heads: what is written, what is refused, what damage is called."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.distributed import SingleProcessGroup
from mtp_train.export import check_export, load_any_head, read_export, stage
from mtp_train.export.layouts import LAYOUTS, find_layout
from mtp_train.run_dir import read_json
from runtime.head_spec import load_head
from tests.unit.export.tampers import Tensors, void, with_config, with_tensors
from tests.unit.export.test_eagle_layouts import IDS, export, make_head, stage_config
from tests.unit.export.test_export import shapes_of
from tests.unit.runtime.engine_fixtures import MEDUSA

CPU = torch.device("cpu")
OWN: dict[str, Any] = MEDUSA | {"lm_head": "own"}
HEADS: dict[str, dict[str, Any]] = {
    "target's lm_head": MEDUSA,
    "own lm_heads": OWN,
    "no bias": OWN | {"projection_bias": False},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_comes_back_as_it_was_and_the_stage_reads_it(name: str, tmp_path: Path) -> None:
    spec = make_head(tmp_path, HEADS[name])
    native = load_head(tmp_path / "head")[1]
    read_spec, tensors = read_export(export(tmp_path, "medusa"))
    assert read_spec == spec
    assert tensors.keys() == native.keys()
    assert all(torch.equal(tensors[key], native[key]) for key in native)
    outcome = stage.run(stage_config(tmp_path, "medusa"), group=SingleProcessGroup(CPU))
    assert outcome.read_back is not None
    assert max(outcome.read_back.native_hidden, outcome.read_back.native_logits) < 1e-4


def test_names_are_those_of_vllm_with_a_copy_of_the_lm_head_it_reads(tmp_path: Path) -> None:
    spec = make_head(tmp_path, MEDUSA)
    out = export(tmp_path, "medusa")
    written = load_file(out / "model.safetensors")
    assert shapes_of(written) == LAYOUTS["medusa"].tensor_shapes(spec)
    assert written.keys() == {
        *(f"blocks.{k}.layers.0.{part}" for k in range(3) for part in ("weight", "bias")),
        "lm_head.weight",
    }
    target = load_file(tmp_path / "target" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], target["lm_head.weight"])
    config = read_json(out / "config.json")
    assert {key: config[key] for key in ("model_type", "num_heads", "num_hidden_layers")} == {
        "model_type": "medusa",
        "num_heads": 3,
        "num_hidden_layers": 1,
    }
    assert (config["medusa_fc_bias"], config["original_lm_head"]) == (True, True)
    assert config["truncated_vocab_size"] == config["vocab_size"] == 11
    # vLLM reads the last of these as num_heads
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    commands = read_json(out / "export.json")["commands"]
    assert list(commands) == ["vllm"]
    assert '"method": "medusa"' in commands["vllm"]
    assert "must not be above 3" in (out / "README.md").read_text()


def test_own_lm_heads_are_one_per_block_and_nothing_is_copied(tmp_path: Path) -> None:
    make_head(tmp_path, OWN)
    out = export(tmp_path, "medusa")
    written = load_file(out / "model.safetensors")
    assert {name for name in written if "lm_head" in name} == {
        f"lm_heads.{k}.weight" for k in range(3)
    }
    assert read_json(out / "config.json")["original_lm_head"] is False


def test_a_list_is_left_out_when_told(tmp_path: Path) -> None:
    make_head(tmp_path, MEDUSA, ids=IDS)
    out = export(tmp_path, "medusa", draft_vocab="drop")
    assert read_export(out)[0].draft_vocab is None
    assert read_json(out / "export.json")["dropped_draft_vocab"]


@pytest.mark.parametrize(
    ("fields", "ids", "message"),
    [
        (MEDUSA, IDS, r"draft_vocab\.size=4: .*export\.draft_vocab=drop"),
        (OWN, IDS, r"draft_vocab\.size=4: its own lm_heads"),
        ({}, (), r"kind=mtp: .*export\.format=mimo"),
    ],
)
def test_what_it_cannot_carry_is_refused_with_what_is_nearest(
    fields: dict[str, Any], ids: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    make_head(tmp_path, fields, ids=ids)
    with pytest.raises(ValueError, match=message):
        export(tmp_path, "medusa")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["eagle-7", "my-eagle3", "dflash", "dspark"])
def test_a_path_of_another_method_is_refused(part: str) -> None:
    layout = find_layout("medusa")
    with pytest.raises(ValueError, match="for a head of another kind"):
        layout.refuse_path(Path("/runs") / part / "export" / "medusa")
    layout.refuse_path(Path("/runs/mine/export/medusa"))


def swap_blocks(tensors: Tensors) -> None:
    first, second = (f"blocks.{k}.layers.0.weight" for k in (0, 1))
    tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no_bias": (with_tensors(lambda t: void(t.pop("blocks.1.layers.0.bias"))), "blocks.1.layers.0"),
    "swapped": (with_tensors(swap_blocks), "tensor blocks.0.layers.0.weight"),
    "no_lm_head": (with_tensors(lambda t: void(t.pop("lm_head.weight"))), "tensor lm_head.weight"),
    "other_lm_head": (with_tensors(lambda t: void(t["lm_head.weight"].mul_(2))), "lm_head.weight"),
    "ids": (with_tensors(lambda t: t.update(token_map=torch.arange(4))), "unexpected tensor token"),
    "bias": (with_config(lambda c: c.update(medusa_fc_bias=False)), "medusa_fc_bias=false"),
    "own": (with_config(lambda c: c.update(original_lm_head=False)), "original_lm_head=false"),
    "heads": (with_config(lambda c: c.update(num_heads=2)), "num_heads=2, expected 3"),
    "sizes": (with_config(lambda c: void(c.pop("truncated_vocab_size"))), "truncated_vocab_size"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made")
    make_head(path, MEDUSA)
    export(path, "medusa")
    return path


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_damage_is_refused_by_name(name: str, made: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    shutil.copytree(made / "out" / "medusa", directory)
    check_export(directory, target_dir=made / "target")
    damage, message = DAMAGES[name]
    damage(directory)
    with pytest.raises(ValueError, match=r".") as caught:
        check_export(directory, target_dir=made / "target")
    assert message in str(caught.value)
    with pytest.raises(ValueError, match=r"."):
        load_any_head(directory)
