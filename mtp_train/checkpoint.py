"""Trainer checkpoints: ``checkpoints/step-000500/`` with DeepSpeed's files and ``state.json``.

A checkpoint appears by one rename, after every byte of it is on disk; a directory with that name is
always whole. Names starting with a dot are leftovers and are removed at the next start. DeepSpeed's
files are pickles, so nothing outside of the run's own directory is ever loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.distributed import ProcessGroup
from mtp_train.metrics import Best
from mtp_train.run_dir import describe_differences
from mtp_train.zero import HeadEngine
from runtime.files import sync_path

STATE_NAME = "state.json"
BEST_NAME = "best"
_TAG = "engine"
_STEP_NAME = re.compile(r"step-(\d{6,})")

# Told at named points of a write, so that a caller may watch (or a test interrupt) it.
Observer = Callable[[str], None]


@dataclass(frozen=True)
class TrainerState:
    """Everything that decides how a run continues, beside weights and optimiser.

    Random streams are derived from (seed, epoch, step) by name, so there is no generator state to
    keep. ``settings`` are those that must be the same for the continuation to be exact.
    """

    step: int  # steps done, skipped ones included; the position in the epochs' plans
    updates: int  # of them, those that changed the weights: the position in the schedule
    skipped: int
    nonfinite_run: int  # skipped steps in a row
    epoch: int
    best: Best | None
    settings: dict[str, Any]
    stale: int = 0  # validations in a row without a higher tau

    @classmethod
    def from_json(cls, text: str, *, source: Path) -> TrainerState:
        try:
            raw = json.loads(text)
            best = raw.pop("best")
            return cls(best=None if best is None else Best(**best), **raw)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{source}: damaged trainer state ({error})") from error


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def find_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    if not directory.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in directory.iterdir()
        if (match := _STEP_NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    return [path for _, path in sorted(found)]


def clean(directory: Path) -> None:
    """Remove what a killed writer left behind (leader only)."""
    if directory.is_dir():
        for path in directory.glob(".*"):
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path)


def save(
    engine: HeadEngine,
    state: TrainerState,
    directory: Path,
    *,
    keep_last: int,
    group: ProcessGroup,
    observe: Observer,
) -> Path:
    """Write a checkpoint of all ranks, set the ``best`` link, remove old ones. Collective."""
    final = directory / checkpoint_name(state.step)
    is_there = group.broadcast_object(final.is_dir())
    if not is_there:
        staged = directory / f".{final.name}.partial"
        if group.is_leader:
            staged.mkdir(parents=True, exist_ok=True)
        group.barrier()
        observe("checkpoint: start")
        engine.save(str(staged), _TAG)
        observe("checkpoint: engine written")
        group.barrier()
        if group.is_leader:
            _publish(staged, final, state, observe)
    if group.is_leader:
        if state.best is not None:
            point_best(directory, state.best.step)
        _prune(directory, keep_last=keep_last, best=state.best, observe=observe)
    group.barrier()
    return final


def load(
    engine: HeadEngine, path: Path, *, run_checkpoints: Path, settings: dict[str, Any]
) -> TrainerState:
    """Continue from ``path``. Collective.

    Raises ``ValueError`` when it lies outside of ``run_checkpoints``, was written with other
    settings, or is damaged.
    """
    if path.resolve().parent != run_checkpoints.resolve():
        raise ValueError(
            f"checkpoint={path}: only checkpoints of this run ({run_checkpoints}) are loaded; "
            "their files can execute code"
        )
    file = path / STATE_NAME
    if not file.is_file():
        raise ValueError(f"{file}: missing; remove {path} to continue from an older checkpoint")
    state = TrainerState.from_json(file.read_text(), source=file)
    differences = describe_differences(state.settings, settings)
    if differences:
        raise ValueError(f"{path} was written with other settings: {'; '.join(differences)}")
    if not engine.load(str(path), _TAG):
        raise ValueError(f"{path}: DeepSpeed found no loadable state in it")
    return state


def point_best(directory: Path, step: int) -> None:
    """Set the ``best`` link, by rename."""
    staged = directory / f".{BEST_NAME}.{os.getpid()}"
    staged.unlink(missing_ok=True)
    staged.symlink_to(checkpoint_name(step))
    os.replace(staged, directory / BEST_NAME)


def _publish(staged: Path, final: Path, state: TrainerState, observe: Observer) -> None:
    (staged / STATE_NAME).write_text(json.dumps(dataclasses.asdict(state), indent=2) + "\n")
    for path in [*staged.rglob("*"), staged]:
        sync_path(path)
    observe("checkpoint: synced")
    os.rename(staged, final)
    sync_path(final.parent)
    observe("checkpoint: published")


def _prune(directory: Path, *, keep_last: int, best: Best | None, observe: Observer) -> None:
    kept = {path.name for path in find_checkpoints(directory)[-keep_last:]}
    if best is not None:
        kept.add(checkpoint_name(best.step))
    for path in find_checkpoints(directory):
        if path.name in kept:
            continue
        doomed = directory / f".{path.name}.old"
        os.rename(path, doomed)  # never a half-removed directory under a checkpoint's name
        observe("checkpoint: pruning")
        shutil.rmtree(doomed)
