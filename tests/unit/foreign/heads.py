"""Tiny heads in the formats of others, each for the same tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mtp_train.config import ExportFormat, ForeignConfig
from mtp_train.export import write_export
from mtp_train.foreign.importing import ImportedHead, read_foreign
from mtp_train.foreign.inspection import Inspection, inspect_head
from mtp_train.foreign.sizes import read_target
from runtime.head_spec import EAGLE_FIELDS
from tests.unit.export.test_eagle_layouts import IDS, THREE, make_target, put_head
from tests.unit.runtime.engine_fixtures import MEDUSA

Tensors = dict[str, torch.Tensor]
AUTO = ForeignConfig()
NUM_LAYERS = 7  # of the target: its default layer ids are 2, 3 and 4
DEFAULT_LAYERS: dict[str, Any] = {**THREE, "layer_ids": (2, 3, 4), "fusion_norm": "none"}
NARROW: dict[str, Any] = {  # than the target's 32
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 12,
    "target_hidden_size": 32,
    "embedding": "own",
}
KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "mimo": ({"concat": "hidden_embedding"}, ()),
    "medusa": ({**MEDUSA, "lm_head": "own"}, ()),
    "eagle": ({"kind": "eagle", **EAGLE_FIELDS}, ()),
    "eagle_sglang": ({"kind": "eagle", **EAGLE_FIELDS, "projection_bias": True}, ()),
    "eagle3": (DEFAULT_LAYERS, IDS),
    "speculators": ({**THREE, "residual": "normed", "recycle": "post_norm"}, IDS),
}


def make_export(path: Path, format: ExportFormat, **changes: Any) -> Path:
    """``target/``, ``head/`` and an export below ``path`` that looks as if others had written
    it.
    """
    target = make_target(path / "target", num_layers=NUM_LAYERS)
    fields, ids = KINDS[format]
    put_head(path / "head", target, {**fields, **changes}, ids=ids)
    out = path / "out" / format
    write_export(path / "head", out, format=format, target_dir=path / "target", unvalidated=True)
    forget_record(out)
    return out


def forget_record(directory: Path) -> None:
    (directory / "export.json").unlink()


def make_medusa(path: Path) -> Path:
    """In the names of Medusa's repository, without an ``lm_head``."""
    target = make_target(path / "target", num_layers=NUM_LAYERS)
    put_head(path / "head", target, MEDUSA)
    native = load_file(path / "head" / "model.safetensors")
    renamed = {
        name.replace("blocks.", "").replace(".layers.0.", ".0.linear."): tensor
        for name, tensor in native.items()
    }
    return put(path / "medusa", {"medusa_num_heads": 3, "medusa_num_layers": 1}, renamed)


def put(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


def change_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def rename(directory: Path, *pairs: tuple[str, str]) -> None:
    """Every prefix by another."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            for before, after in pairs:
                if name.startswith(before):
                    tensors[after + name.removeprefix(before)] = tensors.pop(name)
                    break

    change_tensors(directory, change)


def look(
    directory: Path, choices: ForeignConfig = AUTO, *, target_dir: Path | None = None
) -> Inspection:
    if target_dir is None:
        return inspect_head(directory, choices)
    return inspect_head(
        directory,
        choices,
        target=read_target(target_dir),
        cache_dir=target_dir.parent / "cache",
    )


def bring_in(path: Path, directory: Path, choices: ForeignConfig = AUTO) -> ImportedHead:
    (path / "cache").mkdir(exist_ok=True)
    return read_foreign(directory, choices, target_dir=path / "target", cache_dir=path / "cache")


def codes(inspection: Inspection) -> set[str]:
    return {finding.code for finding in inspection.findings}


def outcomes(inspection: Inspection) -> dict[str, str]:
    return {verdict.engine: verdict.outcome for verdict in inspection.engines}


def why(inspection: Inspection, engine: str) -> str:
    return "\n".join(
        line for verdict in inspection.engines if verdict.engine == engine for line in verdict.why
    )
