"""The weights of an exported directory: one safetensors file, or shards and their index.

Engines read every safetensors file that lies in a directory, so none may lie there that the index
does not name. Names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from mtp_train.run_dir import read_json, write_json_atomic
from runtime.files import sha256_file, sync_path
from runtime.head_spec import CONFIG_NAME, WEIGHTS_NAME, read_tensors

INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
_PATTERN = WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors")


def write_weights(
    directory: Path, tensors: Mapping[str, torch.Tensor], *, max_file_bytes: int = 0
) -> None:
    """Write host tensors into an empty directory; ``max_file_bytes`` of one file's tensors, 0 for
    a single file. A tensor that is larger gets a file of its own.
    """
    held = dict(tensors)
    total = sum(t.numel() * t.element_size() for t in held.values())
    if not max_file_bytes or total <= max_file_bytes:
        _write_file(directory / WEIGHTS_NAME, held)
        return
    split = split_torch_state_dict_into_shards(
        held, filename_pattern=_PATTERN, max_shard_size=max_file_bytes
    )
    for file_name, names in split.filename_to_tensors.items():
        _write_file(directory / file_name, {name: held[name] for name in names})
    if split.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": split.tensor_to_filename}
        write_json_atomic(directory / INDEX_NAME, index)


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, on the host. Raises ``ValueError`` naming the file, the index's entry or the
    tensor: for what is missing, damaged, in another file than the index says, or not in it at all.
    """
    found = sorted(file.name for file in directory.glob("*.safetensors"))
    if not (directory / INDEX_NAME).is_file():
        if found and found != [WEIGHTS_NAME]:
            other = next(name for name in found if name != WEIGHTS_NAME)
            raise ValueError(
                f"export={directory}: {other} is not {WEIGHTS_NAME}, and there is no {INDEX_NAME}; "
                "engines load every safetensors file in a directory"
            )
        if not found:
            raise ValueError(f"export={directory}: {WEIGHTS_NAME} is missing")
        return read_tensors(directory / WEIGHTS_NAME)
    named = _read_index(directory / INDEX_NAME)
    for name in found:
        if name not in named:
            raise ValueError(
                f"export={directory}: {name} is not in {INDEX_NAME}; engines load every "
                "safetensors file in a directory"
            )
    tensors: dict[str, torch.Tensor] = {}
    for file_name, wanted in named.items():
        if file_name not in found:
            raise ValueError(f"export={directory}: {file_name} of {INDEX_NAME} is missing")
        held = read_tensors(directory / file_name)
        for tensor_name in sorted(held.keys() ^ wanted):
            place = "lacks" if tensor_name in wanted else "holds"
            raise ValueError(
                f"{directory / file_name}: {place} tensor {tensor_name}, against {INDEX_NAME}"
            )
        tensors |= held
    return tensors


def weight_files(directory: Path) -> list[str]:
    """Names of the files that hold the weights, and of the index if there is one."""
    if not (directory / INDEX_NAME).is_file():
        return [WEIGHTS_NAME]
    return [INDEX_NAME, *sorted(_read_index(directory / INDEX_NAME))]


def hash_files(directory: Path) -> dict[str, str]:
    """sha256 (hex) of the configuration and the weights of a directory, by name."""
    return {name: sha256_file(directory / name) for name in (CONFIG_NAME, *weight_files(directory))}


def _read_index(file: Path) -> dict[str, set[str]]:
    """Tensor names by file."""
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{file}: weight_map is missing; expected tensor names and files")
    named: dict[str, set[str]] = defaultdict(set)
    for tensor_name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ValueError(
                f"{file}: weight_map.{tensor_name}={file_name!r}: must be a file of this directory"
            )
        named[file_name].add(tensor_name)
    return dict(named)


def _write_file(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    # One entry only: safetensors writes several in random order, and equal heads must hash equal.
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors writes for its owner alone
    sync_path(file)
