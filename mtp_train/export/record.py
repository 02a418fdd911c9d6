"""``export.json``: what an exported directory was made of, and the hash of every tensor in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from mtp_train.config import ExportFormat
from mtp_train.export.layouts import LAYOUTS, Layout
from mtp_train.export.layouts.base import TargetFacts
from mtp_train.run_dir import read_json, write_json_atomic
from mtp_train.serving.job import has_vllm_layout, vllm_layout
from runtime.head_spec import CONFIG_NAME, WEIGHTS_NAME, HeadSpec

EXPORT_NAME = "export.json"
RECORD_VERSION = 2


@dataclass(frozen=True)
class ExportRecord:
    """``head`` is the *native* head's contract; what an engine computes is ``served_spec`` of it.

    ``commands`` hold the words TARGET, HEAD, K and K+1 for the reader to fill in.
    """

    format: ExportFormat
    head: HeadSpec
    head_sha256: Mapping[str, str]  # of the native directory's files, by name
    num_target_layers: int
    dtype: str  # the target's, as in config.json
    target_name: str  # its directory as it was named; empty in older records
    quantization: str  # how its linears are stored; empty: plainly. The head's never are
    hf_overrides: Mapping[str, Any]  # what vLLM is told of it
    is_validated: bool  # a passing parity.json of exactly this head was there
    dropped_draft_vocab: bool
    files_sha256: Mapping[str, str]  # of the configuration and the weights, named as in parity.json
    tensors: Mapping[str, str]  # name -> sha256 of shape, dtype and values
    commands: Mapping[str, str]
    version: int = RECORD_VERSION

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.format].at(self.num_target_layers)

    @property
    def target_facts(self) -> TargetFacts:
        return TargetFacts(self.num_target_layers, self.dtype, self.target_name)

    def write(self, file: Path) -> None:
        write_json_atomic(file, asdict(self))

    @classmethod
    def read(cls, file: Path) -> ExportRecord:
        """Strict. Raises ``ValueError`` naming the file and the key."""
        raw = {"target_name": "", "quantization": ""} | _upgrade(read_json(file))
        if "hf_overrides" not in raw:  # older records: of unquantised targets
            is_served = has_vllm_layout(str(raw.get("format")))
            told = vllm_layout(raw["format"]).hf_overrides if is_served else {}
            raw["hf_overrides"] = dict(told)
        known = [field.name for field in fields(cls)]
        for name in known:
            if name not in raw:
                raise ValueError(f"{file}: {name} is missing")
        for name in raw:
            if name not in known:
                raise ValueError(f"{file}: {name} is unknown; allowed: {', '.join(known)}")
        if raw["version"] != RECORD_VERSION:
            raise ValueError(
                f"{file}: version={raw['version']!r}, this build reads up to {RECORD_VERSION}"
            )
        if raw["format"] not in LAYOUTS:
            raise ValueError(f"{file}: format={raw['format']!r}; supported: {', '.join(LAYOUTS)}")
        head = HeadSpec.from_json(json.dumps(raw["head"]), source=f"{file}: head")
        return cls(**raw | {"head": head})


def hash_tensor(tensor: torch.Tensor) -> str:
    """sha256 (hex) of dtype, shape and the little-endian bytes of the values."""
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _upgrade(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Version 1 knew one file of weights."""
    old = dict(raw)
    if old.get("version") != 1 or "config_sha256" not in old or "weights_sha256" not in old:
        return old
    hashes = {CONFIG_NAME: old.pop("config_sha256"), WEIGHTS_NAME: old.pop("weights_sha256")}
    return old | {"files_sha256": hashes, "version": RECORD_VERSION}
