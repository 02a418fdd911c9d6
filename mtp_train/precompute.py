"""`mtp precompute`: hidden states of every row of the token set, into the feature store.

Work is what the token set wants minus what the store holds, cut into groups of one shard each.
Groups follow the order of sample ids, which are hashes: every shard is a random sample of the
data, groups do not depend on who computes them, and rank ``r`` of ``W`` takes groups ``r``,
``r + W``, … Within a group the source sorts by length.

With ``features.tensor_parallel`` = P, every P neighbouring ranks share one copy of the target and
count as one of these: the first of them computes, checks and writes, the others follow it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from mtp_train.config import Config
from mtp_train.distributed import ProcessGroup, ProcessMesh, run_on_leader
from mtp_train.features.estimate import (
    DiskUsageFn,
    check_free_disk,
    disk_usage,
    estimate_size,
    format_bytes,
)
from mtp_train.features.manifest import Fingerprint, Manifest
from mtp_train.features.progress import DumpProgress
from mtp_train.features.sources import FeatureSource
from mtp_train.features.target import (
    fingerprint_features,
    read_shape,
    target_directory,
)
from mtp_train.features.token_rows import SampleTokens, TokenRows
from mtp_train.features.vllm_source import check_vllm_source
from mtp_train.features.workbench import Workbench, load_workbench
from mtp_train.features.writer import (
    FeatureWriter,
    NonFiniteError,
    allowed_nonfinite,
    finish_store,
    lock_store,
    recover_store,
)
from mtp_train.run_dir import RunDirectory

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class SplitReport:
    """What the store of one split holds now, and what this run added (all ranks)."""

    split: str
    path: str
    num_samples: int
    num_tokens: int
    num_bytes: int
    num_quarantined: int
    num_computed: int
    num_tokens_computed: int
    num_bytes_written: int
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens_computed / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True)
class PrecomputeReport:
    """One entry per split."""

    splits: tuple[SplitReport, ...]


@dataclass(frozen=True)
class _Split:
    """One split's work, the same on every rank."""

    name: str
    store: Path
    rows: TokenRows
    manifest: Manifest  # as it was at the start
    missing: tuple[str, ...]  # sample ids, sorted


def run(
    config: Config,
    *,
    group: ProcessGroup,
    console: Console | None = None,
    usage: DiskUsageFn = disk_usage,
) -> PrecomputeReport:
    """Dump every split of the token set that is not dumped yet. A collective.

    The leader shows progress on ``console``. Raises ``ValueError`` for wrong input, a foreign store
    or too small a disk, :class:`~mtp_train.features.p0.P0Error` and
    :class:`~mtp_train.features.writer.NonFiniteError` when the states cannot be trusted.
    """
    mesh = _split(group, config.features.tensor_parallel)
    if config.features.source == "vllm":
        check_vllm_source(config, world_size=group.world_size)
    directory = run_on_leader(group, lambda: target_directory(config.target))
    with contextlib.ExitStack() as stack:
        splits = run_on_leader(group, lambda: _open_stores(config, directory, group.device, stack))
        run_directory = RunDirectory.from_config(config)
        events = stack.enter_context(
            run_directory.event_log("precompute", is_leader=group.is_leader)
        )
        fingerprint = splits[0].manifest.fingerprint
        run_on_leader(group, lambda: _announce(config, splits, fingerprint, usage))
        bench: Workbench | None = None
        if any(split.missing for split in splits):
            longest = max(split.rows.longest for split in splits)
            bench = load_workbench(
                config, directory, group=group, max_len=longest, tensor_group=mesh.tensor
            )
            stack.callback(bench.source.close)
        reports = []
        for split in splits:
            started = time.perf_counter()
            if split.missing:
                assert bench is not None, "the target is loaded when anything is missing"
                _dump(config, split, bench, group=group, mesh=mesh, console=console)
            wall_s = time.perf_counter() - started
            report = run_on_leader(group, functools.partial(_finish, config, split, wall_s=wall_s))
            events.write("split_finished", report)
            reports.append(report)
    return PrecomputeReport(tuple(reports))


def _split(group: ProcessGroup, width: int) -> ProcessMesh:
    try:
        return group.split(width)
    except ValueError as error:
        raise ValueError(f"features.tensor_parallel={width}: {error}") from error


def _open_stores(
    config: Config, directory: Path, device: torch.device, stack: contextlib.ExitStack
) -> tuple[_Split, ...]:
    """Leader only: check the token set, lock and recover the stores, find what is missing.

    The locks are released with ``stack``.
    """
    run_directory = RunDirectory.from_config(config)
    fingerprint = fingerprint_features(config, directory, device=device)
    longest_allowed = read_shape(directory).max_position_embeddings
    splits = []
    for name in SPLITS:
        rows = TokenRows(run_directory.data / name)
        if rows.longest > longest_allowed:
            raise ValueError(
                f"data={rows.path}: a row of {rows.longest} tokens; the target takes at most "
                f"{longest_allowed} (max_position_embeddings). Lower data.max_tokens"
            )
        store = run_directory.features / name
        stack.enter_context(lock_store(store))
        manifest = recover_store(store, fingerprint)
        rows.check_masks(manifest)
        missing = tuple(sorted(set(rows.lengths) - manifest.settled_ids()))
        splits.append(_Split(name, store, rows, manifest, missing))
    return tuple(splits)


def _announce(
    config: Config, splits: Sequence[_Split], fingerprint: Fingerprint, usage: DiskUsageFn
) -> None:
    """Leader only: say what is there and what will be written; refuse too small a disk."""
    lengths: list[int] = []
    for split in splits:
        wanted, settled = len(split.rows.lengths), split.manifest.settled_ids()
        unwanted = len(settled - set(split.rows.lengths))
        state = "nothing to do" if not split.missing else f"{len(split.missing):,} to compute"
        logger.info(
            "%s: %s of %s samples are there%s; %s",
            split.store,
            f"{wanted - len(split.missing):,}",
            f"{wanted:,}",
            f" ({unwanted:,} others are not in the token set)" if unwanted else "",
            state,
        )
        lengths += [split.rows.lengths[sample_id] for sample_id in split.missing]
    if not lengths:
        return
    features = config.features
    estimate = estimate_size(
        lengths,
        hidden_size=fingerprint.hidden_size,
        num_states=fingerprint.num_states,
        codec=fingerprint.codec,
    )
    logger.info("features: %s will be written", estimate.describe())
    check_free_disk(
        estimate, splits[0].store, min_free_share=features.min_free_disk_share, usage=usage
    )


def _dump(
    config: Config,
    split: _Split,
    bench: Workbench,
    *,
    group: ProcessGroup,
    mesh: ProcessMesh,
    console: Console | None,
) -> None:
    """Compute this rank's groups, or follow who does, and wait for the others."""
    num_quarantined = 0
    if mesh.tensor.is_leader:
        with bench.leading():
            num_quarantined = _dump_groups(config, split, bench, group=mesh.data, console=console)
    else:
        bench.follow()
    num_bad, num_known = group.all_reduce_ints(
        [num_quarantined, len(split.manifest.quarantined) if group.is_leader else 0]
    )
    if num_bad + num_known > _allowed_bad(config, split):
        raise NonFiniteError(
            f"{split.store}: {num_bad + num_known} samples with non-finite hidden states, at most "
            f"{_allowed_bad(config, split)} allowed (features.max_nonfinite_share="
            f"{config.features.max_nonfinite_share})"
        )


def _dump_groups(
    config: Config,
    split: _Split,
    bench: Workbench,
    *,
    group: ProcessGroup,
    console: Console | None,
) -> int:
    """Compute and write the groups of this one of ``group``'s ranks; how many are quarantined."""
    groups = cut_into_groups(
        split.missing,
        split.rows.lengths,
        shard_tokens=config.features.shard_tokens,
        world_size=group.world_size,
    )[group.rank :: group.world_size]
    title = f"features/{split.name}"
    if group.world_size > 1:
        title += f", rank {group.rank} of {group.world_size}"
    num_tokens = sum(split.rows.lengths[sample_id] for part in groups for sample_id in part)
    with (
        FeatureWriter(
            split.store,
            fingerprint=split.manifest.fingerprint,
            shard_tokens=2 * num_tokens + 1,  # a shard is a group; never cut one in between
            max_quarantined=_allowed_bad(config, split) - len(split.manifest.quarantined),
            rank=group.rank,
            check=bench.check,
        ) as writer,
        DumpProgress(
            console if group.is_leader else None, title=title, num_tokens=num_tokens
        ) as progress,
    ):
        for part in groups:
            _dump_group(split.rows.get(part), bench.source, writer, progress)
    return writer.num_quarantined


def _dump_group(
    rows: Sequence[SampleTokens],
    source: FeatureSource,
    writer: FeatureWriter,
    progress: DumpProgress,
) -> None:
    """One shard's worth: every sequence comes back once, with one row per token."""
    waiting = dict(enumerate(rows))
    for states in source.hidden([row.input_ids for row in rows]):
        row = waiting.pop(int(states.key))
        if list(states.token_ids) != row.input_ids:
            raise RuntimeError(
                f"sample {row.sample_id}: the {source.name} source returned states of other tokens"
            )
        writer.add(row.sample_id, row.input_ids, row.loss_mask, states.hidden_TD, states.layers_TE)
        progress.advance(len(row.input_ids), num_bytes=writer.num_bytes)
    if waiting:
        first = next(iter(waiting.values())).sample_id
        raise RuntimeError(
            f"the {source.name} source returned no states for {len(waiting)} of {len(rows)} "
            f"samples (first: {first})"
        )
    writer.flush()


def _finish(config: Config, split: _Split, *, wall_s: float) -> SplitReport:
    """Leader only: merge the ranks' parts and report."""
    manifest = finish_store(split.store)
    before = split.manifest
    report = SplitReport(
        split=split.name,
        path=str(split.store),
        num_samples=manifest.num_samples,
        num_tokens=manifest.num_tokens,
        num_bytes=manifest.num_bytes,
        num_quarantined=len(manifest.quarantined),
        num_computed=manifest.num_samples - before.num_samples,
        num_tokens_computed=manifest.num_tokens - before.num_tokens,
        num_bytes_written=manifest.num_bytes - before.num_bytes,
        wall_s=wall_s,
    )
    if report.num_computed:
        logger.info(
            "%s: %s samples, %s tokens, %s in %.1f s (%s tokens/s, %.3f GB/s); %d quarantined",
            split.store,
            f"{report.num_computed:,}",
            f"{report.num_tokens_computed:,}",
            format_bytes(report.num_bytes_written),
            wall_s,
            f"{report.tokens_per_s:,.0f}",
            report.num_bytes_written / wall_s / 1e9,
            report.num_quarantined,
        )
    return report


def cut_into_groups(
    sample_ids: Sequence[str],
    lengths: Mapping[str, int],
    *,
    shard_tokens: int,
    world_size: int,
) -> list[list[str]]:
    """Cut ``sample_ids``, in their order, into groups of at most ``shard_tokens`` tokens.

    Groups are smaller where fewer than one per rank would come out; a longer sample has a group of
    its own.
    """
    total = sum(lengths[sample_id] for sample_id in sample_ids)
    budget = max(1, min(shard_tokens, -(-total // world_size)))
    groups: list[list[str]] = []
    size = 0
    for sample_id in sample_ids:
        if not groups or size + lengths[sample_id] > budget:
            groups.append([])
            size = 0
        groups[-1].append(sample_id)
        size += lengths[sample_id]
    return groups


def _allowed_bad(config: Config, split: _Split) -> int:
    return allowed_nonfinite(config.features.max_nonfinite_share, len(split.rows.lengths))


def main() -> None:
    from mtp_train.app import run_command
    from mtp_train.stages import run_precompute

    run_command("precompute", run_precompute)


if __name__ == "__main__":
    main()
