"""MTP weights written into a copy of the target, which then holds them as its own.

The copy appears whole, by one rename; the source is read only. Files of weights that do not change
are hard links where the file system has them (else copies): do not edit a copy's files in place.
Shards that hold old MTP weights are written again without them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from runtime.files import STAGED_PREFIX, sync_path
from runtime.head_spec import CONFIG_NAME

INDEX_NAME = "model.safetensors.index.json"
_NOT_COPIED = (".safetensors", ".bin", ".pth", ".gguf", INDEX_NAME)


@dataclass(frozen=True)
class Splice:
    """``linked``: shards of the source as they are; ``rewritten``: those without old MTP weights;
    ``added``: the file of the new ones.
    """

    path: Path
    linked: tuple[str, ...]
    rewritten: tuple[str, ...]
    added: str


def splice_into_copy(
    source: Path,
    out_dir: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    replaces: str,
    config: Mapping[str, Any],
) -> Splice:
    """A copy of the Hugging Face directory ``source`` in ``out_dir``, with ``tensors`` (on the
    host) in the place of all tensors whose names begin with ``replaces``.

    ``config``: keys of ``config.json`` that are set. Raises ``ValueError`` when ``out_dir`` exists,
    or for a tensor that does not begin so.
    """
    if out_dir.exists():
        raise ValueError(f"{out_dir}: exists; a copy of the target is written to a new directory")
    for name in tensors:
        if not name.startswith(replaces):
            raise ValueError(f"{out_dir}: tensor {name} is none of {replaces}*")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f"{STAGED_PREFIX}{out_dir.name}-", dir=out_dir.parent))
    try:
        staged.chmod(0o755)
        splice = _write(source, staged, tensors, replaces=replaces, config=config)
        for file in staged.iterdir():
            sync_path(file)
        sync_path(staged)
        os.rename(staged, out_dir)
        sync_path(out_dir.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return Splice(out_dir, splice.linked, splice.rewritten, splice.added)


def _write(
    source: Path,
    staged: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    replaces: str,
    config: Mapping[str, Any],
) -> Splice:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_NOT_COPIED) and file.name != CONFIG_NAME:
            shutil.copyfile(file, staged / file.name)
    raw = json.loads((source / CONFIG_NAME).read_text())
    (staged / CONFIG_NAME).write_text(json.dumps(raw | dict(config), indent=2) + "\n")
    contents = {file: list_tensors(file) for file in sorted(source.glob("*.safetensors"))}
    listed = _listed(source)
    if listed is not None:  # other files are no part of the model
        contents = {file: sizes for file, sizes in contents.items() if file.name in listed}
    is_single = set(contents) == {source / "model.safetensors"}
    weight_map: dict[str, str] = {}
    total, linked, rewritten = 0, [], []
    for file, sizes in contents.items():
        kept = {name: size for name, size in sizes.items() if not name.startswith(replaces)}
        if not kept:
            continue
        name = "model-00001-of-00002.safetensors" if is_single else file.name
        if len(kept) == len(sizes):
            _link(file, staged / name)
            linked.append(name)
        else:
            with safe_open(file, framework="pt") as handle:
                rest = {key: handle.get_tensor(key) for key in kept}
            _save(rest, staged / name)
            rewritten.append(name)
        weight_map |= dict.fromkeys(kept, name)
        total += sum(kept.values())
    added = "model-00002-of-00002.safetensors" if is_single else "model-mtp.safetensors"
    while (staged / added).exists():
        added = added.replace("model-", "model-mtp-", 1)
    _save({name: tensor.contiguous() for name, tensor in tensors.items()}, staged / added)
    weight_map |= dict.fromkeys(tensors, added)
    total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (staged / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return Splice(staged, tuple(linked), tuple(rewritten), added)


def _listed(source: Path) -> set[str] | None:
    index = source / INDEX_NAME
    return set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None


def list_tensors(file: Path) -> dict[str, int]:
    """Bytes of every tensor of a safetensors file by name, from its header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors writes for its owner alone


def _link(file: Path, place: Path) -> None:
    try:
        os.link(file.resolve(), place)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(file, place)
