"""The target's log-sum-exp of a feature store's rows, kept beside the store.

A loss over part of the vocabulary needs it once per row. It is a property of states, ``lm_head``
and dtype, the same for every run over a store, and costs as much as the rest of a small head's
training: a sweep computes it in its first member.

Invariants: a file appears whole; its name is the digest of what its values depend on, so a reader
never meets foreign ones; values are bit for bit those that a run would compute itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from runtime.files import write_atomic

logger = logging.getLogger(__name__)

_FOLDER = "normalisers"
_METADATA_KEY = "key"


@dataclass(frozen=True)
class NormaliserKey:
    """What the values depend on."""

    features: str  # digest of the store's fingerprint, which names the target's weights
    dtype: str
    device: str
    row_chunk: int

    def digest(self) -> str:
        """sha256 of the canonical JSON, hex."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def load_normalisers(
    store: Path, key: NormaliserKey, sample_ids: Sequence[str]
) -> dict[int, torch.Tensor]:
    """fp32 ``[T]`` per sample whose values are kept, by its index in ``sample_ids`` (NaN where no
    loss needs one).
    """
    found: dict[str, torch.Tensor] = {}
    for file in sorted((store / _FOLDER).glob(f"{key.digest()}-*.safetensors")):
        found.update(load_file(file))
    known = {i: found[name] for i, name in enumerate(sample_ids) if name in found}
    if known:
        logger.info("normalisers: %d of %d samples from %s", len(known), len(sample_ids), store)
    return known


def save_normalisers(
    store: Path,
    key: NormaliserKey,
    sample_ids: Sequence[str],
    values: Mapping[int, torch.Tensor],
    *,
    rank: int = 0,
) -> None:
    """Keep what one rank knows; a warning where the store cannot be written to."""
    tensors = {sample_ids[index]: values_T.contiguous() for index, values_T in values.items()}
    try:
        _write(store, key, tensors, rank)
    except OSError as error:
        logger.warning("normalisers are not kept for other runs: %s", error)


def copy_normalisers(source: Path, out: Path, *, features: str, new_features: str) -> int:
    """Give a store whose logits are the same the files of ``source``; how many there were.

    ``features`` and ``new_features``: digests of the two stores' fingerprints.
    """
    copied = 0
    for file in sorted((source / _FOLDER).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            key = NormaliserKey(**json.loads(handle.metadata()[_METADATA_KEY]))
        if key.features != features:
            continue
        rank = int(file.stem.rpartition("-")[2])
        _write(out, replace(key, features=new_features), load_file(file), rank)
        copied += 1
    return copied


def _write(store: Path, key: NormaliserKey, tensors: dict[str, torch.Tensor], rank: int) -> None:
    file = store / _FOLDER / f"{key.digest()}-{rank}.safetensors"
    file.parent.mkdir(exist_ok=True)
    write_atomic(file, save(tensors, metadata={_METADATA_KEY: json.dumps(asdict(key))}))
