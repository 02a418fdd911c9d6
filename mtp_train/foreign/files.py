"""The files of a head directory: ``config.json`` and the headers of its safetensors.

No tensor is read to look at a directory but the few that a question is about
(:meth:`HeadFiles.read`), and no pickle ever: it can run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mtp_train.export.reader import is_export
from mtp_train.export.weights import INDEX_NAME
from runtime.files import sha256_file
from runtime.head_spec import CONFIG_NAME

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class TensorHeader:
    """``dtype`` as safetensors spells it: ``BF16``, ``F32``, ``I64``, ``BOOL``, ``F8_E4M3`` …"""

    shape: tuple[int, ...]
    dtype: str
    file: str


@dataclass(frozen=True)
class HeadFiles:
    """A directory as it lies there. ``missing_files``: named by the index and not there."""

    directory: Path
    config: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]
    weight_files: tuple[str, ...]
    pickles: tuple[str, ...] = ()
    missing_files: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()  # tensors that several files hold

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: header.shape for name, header in self.headers.items()}

    @property
    def has_record(self) -> bool:
        """Whether `mtp export` wrote it."""
        return is_export(self.directory)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the host."""
        with safe_open(self.directory / self.headers[name].file, framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor

    def sha256(self) -> dict[str, str]:
        """Hashes (hex) of everything that a head is read from, by file name."""
        names = (CONFIG_NAME, *self.weight_files)
        return {name: sha256_file(self.directory / name) for name in names}


def open_files(directory: Path) -> HeadFiles:
    """Raises ``ValueError`` naming the file for a directory without ``config.json``, and for
    damaged JSON and safetensors.
    """
    if not directory.is_dir():
        raise ValueError(f"head={directory}: no such directory")
    if not (directory / CONFIG_NAME).is_file():
        raise ValueError(
            f"head={directory}: {CONFIG_NAME} is missing; expected a head's directory, with "
            f"{CONFIG_NAME} and safetensors"
        )
    config = _read_object(directory / CONFIG_NAME)
    names, missing = _weight_files(directory)
    headers: dict[str, TensorHeader] = {}
    repeated: list[str] = []
    for name in names:
        for tensor, header in _read_headers(directory / name).items():
            if tensor in headers:
                repeated.append(tensor)
            headers[tensor] = header
    pickles = sorted({file.name for pattern in _PICKLES for file in directory.glob(pattern)})
    return HeadFiles(
        directory, config, headers, names, tuple(pickles), missing, tuple(sorted(set(repeated)))
    )


def _weight_files(directory: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those of the index where there is one, else every safetensors file; and what is missing."""
    index = directory / INDEX_NAME
    if not index.is_file():
        return tuple(sorted(file.name for file in directory.glob("*.safetensors"))), ()
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ValueError(f"{index}: weight_map is missing or not an object of file names")
    named = sorted(set(weight_map.values()))
    for name in named:
        if Path(name).name != name:
            raise ValueError(f"{index}: weight_map names {name!r}; expected files beside it")
    there = tuple(name for name in named if (directory / name).is_file())
    return there, tuple(name for name in named if name not in there)


def _read_headers(file: Path) -> dict[str, TensorHeader]:
    try:
        with safe_open(file, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {
                name: TensorHeader(tuple(part.get_shape()), part.get_dtype(), file.name)
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged safetensors file ({error})") from error


def _read_object(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: expected an object, got {type(raw).__name__}")
    return raw
