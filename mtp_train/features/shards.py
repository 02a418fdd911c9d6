"""One shard: an immutable safetensors file that describes itself.

Tensors, rows of all samples concatenated in the order of ``sample_ids``: ``hidden`` ``[N, D]``
(codec dtype), ``scale`` ``[N]`` fp32 (``fp8_e4m3`` only), ``input_ids`` ``[N]`` int32,
``loss_mask`` ``[N]`` bool; with ``layer_ids`` also ``layers`` ``[N, E]`` and ``layers_scale``
``[N, E / D]``. The metadata repeats the manifest's record, so that a shard whose
record was lost can be adopted. The file is named after the hash of its content. Shape legend:
N rows of the shard, T rows of one sample, D model width, E = len(layer_ids) * D.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from mtp_train.config import Codec
from mtp_train.features.codecs import (
    STORED_DTYPES,
    EncodedRows,
    decode,
    decode_layers,
    encode,
    encode_layers,
    has_scale,
)
from mtp_train.features.manifest import (
    FeatureStoreError,
    Fingerprint,
    P0Figures,
    QuarantinedSample,
    ShardRecord,
    hash_loss_mask,
    record_from_json,
)
from runtime.files import sha256_file, write_atomic

logger = logging.getLogger(__name__)

METADATA_KEY = "mtp_shard"  # one key: safetensors does not keep the order of several
_NAME_HEX = 32
_REPAIR = (
    "delete the file and run `mtp precompute` again, which computes its samples anew and keeps "
    "all other shards"
)


@dataclass(frozen=True)
class FeatureSample:
    """One sample: ``input_ids`` int64 ``[T]``, ``loss_mask`` bool ``[T]``, ``hidden`` float
    ``[T, D]``, ``layers`` float ``[T, E]`` where residual streams are stored (and read).
    """

    sample_id: str
    input_ids: torch.Tensor = field(repr=False)
    loss_mask: torch.Tensor = field(repr=False)
    hidden: torch.Tensor = field(repr=False)
    layers: torch.Tensor | None = field(default=None, repr=False)


def write_shard(
    path: Path,
    samples: Sequence[FeatureSample],
    *,
    fingerprint: Fingerprint,
    quarantined: Sequence[QuarantinedSample],
    p0: P0Figures | None,
) -> ShardRecord:
    """Encode and write ``samples`` as one shard below ``path`` (atomic and durable)."""
    hidden_size, codec = fingerprint.hidden_size, fingerprint.codec
    encoded = [encode(sample.hidden, codec) for sample in samples]
    tensors = {
        "hidden": _cat([rows.hidden_ND for rows in encoded], STORED_DTYPES[codec], (hidden_size,)),
        "input_ids": _cat([sample.input_ids for sample in samples], torch.int32, ()),
        "loss_mask": _cat([sample.loss_mask for sample in samples], torch.bool, ()),
    }
    if has_scale(codec):
        scales = [rows.scale_N for rows in encoded if rows.scale_N is not None]
        tensors["scale"] = _cat(scales, torch.float32, ())
    if fingerprint.layer_ids:
        tensors |= _layer_tensors([sample.layers for sample in samples], fingerprint)
    record = ShardRecord(
        name="",
        sha256="",
        num_bytes=0,
        sample_ids=tuple(sample.sample_id for sample in samples),
        lengths=tuple(len(sample.input_ids) for sample in samples),
        mask_hashes=tuple(hash_loss_mask(sample.loss_mask.tolist()) for sample in samples),
        quarantined=tuple(quarantined),
        p0=p0,
    )
    described = {"fingerprint": fingerprint.digest(), "record": dataclasses.asdict(record)}
    data = save(tensors, metadata={METADATA_KEY: json.dumps(described, sort_keys=True)})
    digest = hashlib.sha256(data).hexdigest()
    name = f"shard-{digest[:_NAME_HEX]}.safetensors"
    write_atomic(path / name, data)
    return dataclasses.replace(record, name=name, sha256=digest, num_bytes=len(data))


def _layer_tensors(
    layers: Sequence[torch.Tensor | None], fingerprint: Fingerprint
) -> dict[str, torch.Tensor]:
    codec, width, count = fingerprint.codec, fingerprint.hidden_size, len(fingerprint.layer_ids)
    encoded = []
    for layers_TE in layers:
        assert layers_TE is not None, "the writer refuses samples without them"
        encoded.append(encode_layers(layers_TE, codec, width=width))
    dtype = STORED_DTYPES[codec]
    tensors = {"layers": _cat([rows.hidden_ND for rows in encoded], dtype, (count * width,))}
    if has_scale(codec):
        scales = [rows.scale_N for rows in encoded if rows.scale_N is not None]
        tensors["layers_scale"] = _cat(scales, torch.float32, (count,))
    return tensors


def adopt_shard(file: Path, fingerprint: Fingerprint) -> ShardRecord | None:
    """The record of a shard that no manifest lists, from its own metadata.

    ``None`` when the file is damaged (its content does not hash to its name). Raises
    :class:`FeatureStoreError` when it is whole but was made from something else.
    """
    digest = sha256_file(file)
    if file.name != f"shard-{digest[:_NAME_HEX]}.safetensors":
        return None
    with safe_open(file, framework="pt") as handle:
        described = json.loads(handle.metadata()[METADATA_KEY])
    if described["fingerprint"] != fingerprint.digest():
        raise FeatureStoreError(
            f"shard {file}: not in the manifest, and made from another target, codec or settings; "
            "choose another features.path, or delete the shard"
        )
    record = record_from_json(described["record"])
    return dataclasses.replace(record, name=file.name, sha256=digest, num_bytes=file.stat().st_size)


def check_presence(path: Path, record: ShardRecord) -> str | None:
    """What is wrong with the shard's file as seen from the outside; ``None`` when nothing is."""
    file = path / record.name
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != record.num_bytes:
        return f"has {size} bytes, the manifest says {record.num_bytes}"
    return None


def damaged(file: Path, fault: str) -> FeatureStoreError:
    return FeatureStoreError(f"shard {file}: {fault}; {_REPAIR}")


class ShardReader:
    """An open shard. Rows are read by slice from the memory map; nothing else is held."""

    def __init__(
        self, path: Path, record: ShardRecord, fingerprint: Fingerprint, *, with_layers: bool
    ) -> None:
        self._file = path / record.name
        self._codec: Codec = fingerprint.codec
        self._width = fingerprint.hidden_size
        self._has_layers = with_layers and bool(fingerprint.layer_ids)
        self._stops = torch.tensor(record.lengths, dtype=torch.int64).cumsum(0).tolist()
        names = ["hidden", "input_ids", "loss_mask", *(["scale"] if self._has_scale else [])]
        if self._has_layers:
            names += ["layers", *(["layers_scale"] if self._has_scale else [])]
        try:
            self._handle: Any = safe_open(self._file, framework="pt")
        except SafetensorError as error:
            raise damaged(self._file, f"not a whole safetensors file ({error})") from error
        present = set(self._handle.keys())
        missing = [name for name in names if name not in present]
        if missing:
            raise damaged(self._file, f"tensor {missing[0]} is missing")
        self._slices = {name: self._handle.get_slice(name) for name in names}
        count = len(fingerprint.layer_ids)
        columns = {
            "hidden": [self._width],
            "layers": [count * self._width],
            "layers_scale": [count],
        }
        for name in names:
            shape = list(self._slices[name].get_shape())
            expected = [record.num_tokens, *columns.get(name, [])]
            if shape != expected:
                raise damaged(self._file, f"tensor {name} has shape {shape}, expected {expected}")

    @property
    def _has_scale(self) -> bool:
        return has_scale(self._codec)

    def read(self, index: int, sample_id: str, *, dtype: torch.dtype) -> FeatureSample:
        """Sample ``index`` of this shard, decoded to ``dtype``."""
        start = self._stops[index - 1] if index else 0
        stop = self._stops[index]
        rows = EncodedRows(
            self._slices["hidden"][start:stop],
            self._slices["scale"][start:stop] if self._has_scale else None,
        )
        return FeatureSample(
            sample_id,
            self._slices["input_ids"][start:stop].long(),
            self._slices["loss_mask"][start:stop].clone(),
            decode(rows, dtype=dtype),
            self._read_layers(start, stop, dtype) if self._has_layers else None,
        )

    def _read_layers(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        rows = EncodedRows(
            self._slices["layers"][start:stop],
            self._slices["layers_scale"][start:stop] if self._has_scale else None,
        )
        return decode_layers(rows, width=self._width, dtype=dtype)


def _cat(parts: Sequence[torch.Tensor], dtype: torch.dtype, tail: tuple[int, ...]) -> torch.Tensor:
    if not parts:
        return torch.zeros(0, *tail, dtype=dtype)
    if parts[0].dtype == torch.float8_e4m3fn:  # no concatenation kernel for fp8 on every device
        return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
    return torch.cat([part.to(dtype) for part in parts])
