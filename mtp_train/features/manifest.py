"""The manifest of a feature store: which shards exist, what they hold, what they were made from.

``manifest.json`` is replaced atomically by the leader only. While a dump runs, every rank appends
finished shards to its own ``part-<rank>.jsonl``, one line per shard, after the shard's rename; the
leader merges the parts at the next start and at the end. A reader merges them in memory. So a
crash at any point loses at most the shard that was being written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.config import Codec
from runtime.files import write_atomic

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
POST_FINAL_NORM = "g: post-final-norm"


class FeatureStoreError(ValueError):
    """The store on disk is damaged, foreign or incomplete; the message says what to do."""


@dataclass(frozen=True)
class Fingerprint:
    """What the stored states depend on. Any difference makes the store a foreign one."""

    target_weights: str
    tokenizer: str
    chat_template: str
    hidden_size: int
    codec: Codec
    hidden_state: str = POST_FINAL_NORM
    layer_ids: tuple[int, ...] = ()  # k of the un-normed residual streams S_k beside g
    settings: tuple[tuple[str, str], ...] = ()  # of what computed the states: source, dtype, …

    @property
    def num_states(self) -> int:
        """Vectors of ``hidden_size`` per token: ``g`` and one for each of ``layer_ids``."""
        return 1 + len(self.layer_ids)

    def digest(self) -> str:
        """sha256 of the canonical JSON, hex."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: Fingerprint) -> list[str]:
        """One ``field: ours != theirs`` per differing field."""
        found = []
        for spec in dataclasses.fields(self):
            ours, theirs = getattr(self, spec.name), getattr(other, spec.name)
            if ours != theirs:
                found.append(f"{spec.name}: {ours!r} != {theirs!r}")
        return found


@dataclass(frozen=True)
class Comparison:
    """Log-probabilities of the taken tokens and distributions of one side against another."""

    name: str  # "decode", "huggingface", or "decode_error" (decode path against fp32)
    max_gap: float  # largest |log p - log p'|, nats
    mean_gap: float
    mean_kl: float  # mean KL(other || ours), nats


@dataclass(frozen=True)
class LayerComparison:
    """The dumped ``S_k`` against Hugging Face's in fp32. Errors are means over rows of
    ``|ours - theirs| / |theirs|``.
    """

    layer_id: int
    max_error: float  # of the worst row
    mean_error: float
    codec_error: float  # mean, of what is stored against what was dumped
    neighbour: float  # mean distance to the nearer of S_{k-1} and S_{k+1}, on the same scale


@dataclass(frozen=True)
class P0Figures:
    """The first rung of the parity ladder, measured on a sample of one shard while dumping."""

    num_samples: int  # samples and rows compared with the references
    num_rows: int
    dtype: str  # dtype of the states before the codec
    comparisons: tuple[Comparison, ...]
    codec_mean_kl: float  # mean KL(before || after the codec), nats
    layers: tuple[LayerComparison, ...] = ()  # empty: none are stored, or none were compared


@dataclass(frozen=True)
class QuarantinedSample:
    """A sample left out because some of its rows are not finite."""

    sample_id: str
    num_rows: int
    num_bad_rows: int


@dataclass(frozen=True)
class ShardRecord:
    """One immutable shard. ``name`` is the file name; per-sample tuples run in parallel."""

    name: str
    sha256: str
    num_bytes: int
    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    mask_hashes: tuple[str, ...]
    quarantined: tuple[QuarantinedSample, ...]
    p0: P0Figures | None

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Manifest:
    """The whole store. Immutable: merging gives a new one."""

    fingerprint: Fingerprint
    shards: tuple[ShardRecord, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def num_samples(self) -> int:
        return sum(len(shard.sample_ids) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def quarantined(self) -> tuple[QuarantinedSample, ...]:
        return tuple(item for shard in self.shards for item in shard.quarantined)

    def settled_ids(self) -> set[str]:
        """Ids that need no work: stored, or quarantined."""
        stored = {sample_id for shard in self.shards for sample_id in shard.sample_ids}
        return stored | {item.sample_id for item in self.quarantined}

    def with_shards(self, shards: Iterable[ShardRecord]) -> Manifest:
        """This manifest with ``shards`` added; a shard that is already listed is kept once."""
        by_name = {shard.name: shard for shard in (*self.shards, *shards)}
        return dataclasses.replace(self, shards=tuple(by_name.values()))


def require_same_fingerprint(stored: Fingerprint, wanted: Fingerprint, *, source: str) -> None:
    """Raise :class:`FeatureStoreError` naming every field in which the store is foreign."""
    differences = stored.differences(wanted)
    if differences:
        raise FeatureStoreError(
            f"{source}: the feature store was made from something else "
            f"(stored != wanted): {'; '.join(differences)}. "
            "Choose another features.path, or delete the store to dump again"
        )


def load_manifest(path: Path) -> Manifest:
    """Read ``manifest.json`` and the part files of the store at ``path`` (nothing is changed)."""
    file = path / MANIFEST_NAME
    if not file.is_file():
        raise FeatureStoreError(
            f"features={path}: {MANIFEST_NAME} is missing; run `mtp precompute` first"
        )
    try:
        raw = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise FeatureStoreError(
            f"{file}: not valid JSON ({error}); remove it and run `mtp precompute`, "
            "which adopts the shards that are whole"
        ) from error
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        raise FeatureStoreError(
            f"{file}: format_version={version!r}, this program reads {FORMAT_VERSION}"
        )
    try:
        fingerprint = fingerprint_from_json(raw["fingerprint"])
        shards = tuple(record_from_json(item) for item in raw["shards"])
    except (KeyError, TypeError) as error:
        raise FeatureStoreError(f"{file}: field {error} is missing or malformed") from error
    manifest = Manifest(fingerprint, shards)
    return manifest.with_shards(record for part in part_files(path) for record in read_part(part))


def save_manifest(path: Path, manifest: Manifest) -> None:
    """Replace ``manifest.json`` atomically and durably."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1) + "\n"
    write_atomic(path / MANIFEST_NAME, text)


def part_files(path: Path) -> list[Path]:
    return sorted(path.glob("part-*.jsonl"))


def append_part(path: Path, rank: int, record: ShardRecord) -> None:
    """Add one finished shard to this rank's part, durably."""
    with open(path / f"part-{rank:05d}.jsonl", "a") as file:
        file.write(json.dumps(dataclasses.asdict(record)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_part(file: Path) -> list[ShardRecord]:
    """Records of one part file; a torn last line (crash while appending) is left out.

    Raises :class:`FeatureStoreError` naming any other line that is damaged.
    """
    lines = file.read_text().split("\n")
    torn = lines.pop()
    if torn:
        logger.warning("%s: last line is torn; its shard is adopted from the file itself", file)
    return [_parse_line(file, number, line) for number, line in enumerate(lines, start=1)]


def _parse_line(file: Path, number: int, line: str) -> ShardRecord:
    try:
        return record_from_json(json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
        raise FeatureStoreError(
            f"{file}: line {number} is damaged ({error!r}); delete this file and run "
            "`mtp precompute` again, which adopts its shards from themselves"
        ) from error


def fingerprint_from_json(raw: Mapping[str, Any]) -> Fingerprint:
    values = dict(raw)
    values["layer_ids"] = tuple(values["layer_ids"])
    values["settings"] = tuple((key, value) for key, value in values["settings"])
    return Fingerprint(**values)


def record_from_json(raw: Mapping[str, Any]) -> ShardRecord:
    values = dict(raw)
    for name in ("sample_ids", "lengths", "mask_hashes"):
        values[name] = tuple(values[name])
    values["quarantined"] = tuple(QuarantinedSample(**item) for item in values["quarantined"])
    values["p0"] = None if values["p0"] is None else _figures_from_json(values["p0"])
    return ShardRecord(**values)


def _figures_from_json(raw: Mapping[str, Any]) -> P0Figures:
    values = dict(raw)
    values["comparisons"] = tuple(Comparison(**item) for item in values["comparisons"])
    layers = values.get("layers", ())  # manifests from before EAGLE-3 have none
    values["layers"] = tuple(LayerComparison(**item) for item in layers)
    return P0Figures(**values)


def hash_loss_mask(mask: Sequence[bool]) -> str:
    """Eight hex characters of sha256 over one byte per token: tells a changed mask apart."""
    return hashlib.sha256(bytes(bytearray(map(bool, mask)))).hexdigest()[:8]
