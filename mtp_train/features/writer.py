"""Writes a feature store: recovery at the start, one writer per rank, merge at the end.

Encoding, hashing and disk run on one background thread; at most two shards wait for it. Errors of
the thread surface in the next call. Within a shard, samples are ordered by id, so the file does
not depend on the order in which they were computed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

from mtp_train.errors import StageRefusedError
from mtp_train.features.codecs import storable_rows
from mtp_train.features.manifest import (
    MANIFEST_NAME,
    FeatureStoreError,
    Fingerprint,
    Manifest,
    P0Figures,
    QuarantinedSample,
    ShardRecord,
    append_part,
    load_manifest,
    part_files,
    require_same_fingerprint,
    save_manifest,
)
from mtp_train.features.shards import FeatureSample, adopt_shard, check_presence, write_shard
from runtime.files import STAGED_PREFIX

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_MAX_WAITING = 2

ShardCheck = Callable[[Sequence[FeatureSample]], P0Figures]


class NonFiniteError(StageRefusedError):
    """More samples with NaN or infinite rows than allowed."""


@contextlib.contextmanager
def lock_store(path: Path) -> Iterator[None]:
    """Hold the store for writing (leader only). Raises when another dump runs."""
    path.mkdir(parents=True, exist_ok=True)
    with open(path / LOCK_NAME, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FeatureStoreError(
                f"features={path}: another process is writing to this store; wait for it, or "
                "choose another features.path"
            ) from error
        yield


def recover_store(path: Path, fingerprint: Fingerprint) -> Manifest:
    """Make the store consistent after any crash and return its manifest (leader only).

    Creates it when it does not exist, merges part files, adopts whole shards that no manifest
    lists and removes the others, drops records whose file is gone or cut off. Raises
    :class:`FeatureStoreError` when the store has another fingerprint.
    """
    path.mkdir(parents=True, exist_ok=True)
    for staged in path.glob(f"{STAGED_PREFIX}*"):
        logger.warning("%s: unfinished file of an interrupted dump, removed", staged)
        staged.unlink()
    manifest = Manifest(fingerprint)
    if (path / MANIFEST_NAME).is_file():
        manifest = load_manifest(path)
        require_same_fingerprint(manifest.fingerprint, fingerprint, source=f"features={path}")
    whole = []
    for record in manifest.shards:
        fault = check_presence(path, record)
        if fault is None:
            whole.append(record)
            continue
        logger.warning(
            "%s %s: its %d samples are computed again",
            path / record.name,
            fault,
            len(record.sample_ids),
        )
        (path / record.name).unlink(missing_ok=True)
    manifest = Manifest(fingerprint, tuple(whole)).with_shards(
        _adopt_orphans(path, fingerprint, listed={record.name for record in whole})
    )
    save_manifest(path, manifest)
    for part in part_files(path):
        part.unlink()
    return manifest


def finish_store(path: Path) -> Manifest:
    """Merge every rank's part into ``manifest.json`` (leader only, all writers closed)."""
    manifest = load_manifest(path)
    save_manifest(path, manifest)
    for part in part_files(path):
        part.unlink()
    return manifest


def allowed_nonfinite(share: float, num_samples: int) -> int:
    """Samples that may be quarantined: ``share`` of all, but at least one unless it is zero."""
    return max(1, int(share * num_samples)) if share > 0 else 0


class FeatureWriter:
    """Collects samples of one rank and writes them as shards of about ``shard_tokens`` tokens.

    Usable as a sink for hidden states: call :meth:`add` for each sample, leave the ``with`` block.
    ``known`` are ids that need no writing. ``check`` measures P0 on the samples of a shard before
    it is written, on the calling thread. More than ``max_quarantined`` samples with non-finite
    rows raise :class:`NonFiniteError`.
    """

    def __init__(
        self,
        path: Path,
        *,
        fingerprint: Fingerprint,
        shard_tokens: int,
        max_quarantined: int,
        rank: int = 0,
        known: Collection[str] = (),
        check: ShardCheck | None = None,
    ) -> None:
        self.path = path
        self.records: list[ShardRecord] = []
        self.num_quarantined = 0
        self._fingerprint = fingerprint
        self._shard_tokens = shard_tokens
        self._max_quarantined = max_quarantined
        self._rank = rank
        self._known = set(known)
        self._check = check
        self._pending: list[FeatureSample] = []
        self._pending_tokens = 0
        self._bad: list[QuarantinedSample] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feature-writer")
        self._waiting: deque[Future[ShardRecord]] = deque()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.flush()
                self._collect(allowed=0)
        finally:
            self._thread.shutdown(wait=True, cancel_futures=error is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards that are durable so far."""
        return sum(record.num_bytes for record in self.records)

    def add(
        self,
        sample_id: str,
        input_ids: torch.Tensor | Sequence[int],
        loss_mask: torch.Tensor | Sequence[bool],
        hidden_TD: torch.Tensor,
        layers_TE: torch.Tensor | None = None,
    ) -> bool:
        """Take one sample; rows that decoding did not compute must be cut off by the caller.

        ``hidden_TD`` is ``[T, D]`` of any float dtype and device, and so is ``layers_TE`` with one
        ``[T, D]`` for each of the fingerprint's ``layer_ids``, side by side; both are kept until
        their shard is written. Returns whether the sample was taken: not when it is known or
        quarantined.
        """
        ids_T = torch.as_tensor(input_ids, dtype=torch.int64)
        mask_T = torch.as_tensor(loss_mask, dtype=torch.bool)
        expected = (len(ids_T), self._fingerprint.hidden_size)
        if tuple(hidden_TD.shape) != expected or len(mask_T) != len(ids_T):
            raise ValueError(
                f"sample {sample_id}: {len(ids_T)} tokens, {len(mask_T)} mask entries and hidden "
                f"states {list(hidden_TD.shape)}; expected one row of {expected[1]} per token"
            )
        num_columns = expected[1] * len(self._fingerprint.layer_ids)
        found = [len(ids_T), 0] if layers_TE is None else list(layers_TE.shape)
        if found != [len(ids_T), num_columns]:
            raise ValueError(
                f"sample {sample_id}: residual streams {found}; expected {num_columns} columns, of "
                f"layers {list(self._fingerprint.layer_ids)}"
            )
        if sample_id in self._known:
            return False
        self._known.add(sample_id)
        rows_TD = hidden_TD.detach().cpu()
        is_storable = storable_rows(rows_TD, self._fingerprint.codec)
        if layers_TE is not None:
            layers_TE = layers_TE.detach().cpu()
            is_storable &= storable_rows(layers_TE, self._fingerprint.codec)
        num_bad = int((~is_storable).sum())
        if num_bad:
            self._quarantine(QuarantinedSample(sample_id, len(ids_T), num_bad))
            return False
        self._pending.append(FeatureSample(sample_id, ids_T, mask_T, rows_TD, layers_TE))
        self._pending_tokens += len(ids_T)
        if self._pending_tokens >= self._shard_tokens:
            self.flush()
        return True

    def flush(self) -> None:
        """Hand what is pending to the background thread as one shard."""
        if not self._pending and not self._bad:
            return
        samples = sorted(self._pending, key=lambda sample: sample.sample_id)
        p0 = self._check(samples) if self._check is not None and samples else None
        self._collect(allowed=_MAX_WAITING - 1)
        self._waiting.append(self._thread.submit(self._write, samples, tuple(self._bad), p0))
        self._pending, self._pending_tokens, self._bad = [], 0, []

    def _write(
        self,
        samples: Sequence[FeatureSample],
        quarantined: Sequence[QuarantinedSample],
        p0: P0Figures | None,
    ) -> ShardRecord:
        record = write_shard(
            self.path, samples, fingerprint=self._fingerprint, quarantined=quarantined, p0=p0
        )
        append_part(self.path, self._rank, record)
        return record

    def _collect(self, *, allowed: int) -> None:
        """Wait until at most ``allowed`` shards are on their way; raise the thread's error."""
        while self._waiting and (len(self._waiting) > allowed or self._waiting[0].done()):
            self.records.append(self._waiting.popleft().result())

    def _quarantine(self, sample: QuarantinedSample) -> None:
        self.num_quarantined += 1
        logger.warning(
            "sample %s: %d of %d rows are not finite in %s; quarantined",
            sample.sample_id,
            sample.num_bad_rows,
            sample.num_rows,
            self._fingerprint.codec,
        )
        self._bad.append(sample)
        if self.num_quarantined > self._max_quarantined:
            raise NonFiniteError(
                f"{self.num_quarantined} samples with non-finite hidden states, at most "
                f"{self._max_quarantined} allowed (features.max_nonfinite_share); last: "
                f"{sample.sample_id}. Check the target's weights and dtype"
            )


def _adopt_orphans(
    path: Path, fingerprint: Fingerprint, *, listed: Collection[str]
) -> list[ShardRecord]:
    adopted = []
    for file in sorted(path.glob("shard-*.safetensors")):
        if file.name in listed:
            continue
        record = adopt_shard(file, fingerprint)
        if record is None:
            logger.warning("%s: damaged shard that no manifest lists, removed", file)
            file.unlink()
        else:
            logger.info("%s: whole shard that no manifest lists, adopted", file)
            adopted.append(record)
    return adopted
