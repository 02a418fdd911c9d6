from __future__ import annotations

import json

import pytest
import torch

from mtp_train import checkpoint
from mtp_train.checkpoint import TrainerState
from mtp_train.distributed import SingleProcessGroup
from mtp_train.metrics import Best


class FileEngine:
    """Writes one file where DeepSpeed writes many; remembers what it was told to load."""

    def __init__(self):
        self.loaded = []

    def save(self, directory, tag):
        path = checkpoint.Path(directory) / tag
        path.mkdir()
        (path / "weights.pt").write_bytes(b"weights")

    def load(self, directory, tag):
        self.loaded.append((directory, tag))
        return True


GROUP = SingleProcessGroup(torch.device("cpu"))
SETTINGS = {"seed": 1, "world_size": 1}


def state(step, best=None):
    return TrainerState(step, step, 0, 0, 0, best, SETTINGS)


def save(directory, step, best=None, keep_last=2, observe=lambda _: None):
    return checkpoint.save(
        FileEngine(),
        state(step, best),
        directory,
        keep_last=keep_last,
        group=GROUP,
        observe=observe,
    )


def names(directory):
    return [path.name for path in checkpoint.find_checkpoints(directory)]


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    best = Best(10, 1.5, 2.0)
    for step in (10, 20, 30, 40):
        save(tmp_path, step, best)
    assert names(tmp_path) == ["step-000010", "step-000030", "step-000040"]
    assert (tmp_path / "best").resolve().name == "step-000010"
    save(tmp_path, 50, Best(50, 1.6, 2.0))
    assert names(tmp_path) == ["step-000040", "step-000050"]
    assert (tmp_path / "best").resolve().name == "step-000050"


def test_an_interrupted_write_leaves_no_checkpoint_and_is_cleaned(tmp_path):
    save(tmp_path, 1)

    def stop(event):
        if event == "checkpoint: synced":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, observe=stop)
    assert names(tmp_path) == ["step-000001"]
    checkpoint.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    path = save(tmp_path, 7, Best(7, 1.5, 2.0))
    engine = FileEngine()
    loaded = checkpoint.load(engine, path, run_checkpoints=tmp_path, settings=SETTINGS)
    assert loaded == state(7, Best(7, 1.5, 2.0))
    assert engine.loaded == [(str(path), "engine")]


def test_only_the_runs_own_checkpoints_are_loaded(tmp_path):
    path = save(tmp_path / "other", 7)
    link = tmp_path / "mine" / "step-000007"
    link.parent.mkdir()
    link.symlink_to(path)
    engine = FileEngine()
    for foreign in (path, link, tmp_path / "mine" / ".." / "other" / "step-000007"):
        with pytest.raises(ValueError, match="only checkpoints of this run"):
            checkpoint.load(engine, foreign, run_checkpoints=link.parent, settings=SETTINGS)
    assert engine.loaded == []
    assert checkpoint.find_checkpoints(link.parent) == []


def test_other_settings_are_refused_by_name(tmp_path):
    path = save(tmp_path, 7)
    with pytest.raises(ValueError, match="world_size was 1, is 2"):
        checkpoint.load(
            FileEngine(), path, run_checkpoints=tmp_path, settings={"seed": 1, "world_size": 2}
        )


def test_damaged_state_is_an_error_that_names_the_file(tmp_path):
    path = save(tmp_path, 7)
    file = path / "state.json"
    file.write_text(json.dumps({"step": 7}))
    with pytest.raises(ValueError, match=r"state\.json: damaged"):
        checkpoint.load(FileEngine(), path, run_checkpoints=tmp_path, settings=SETTINGS)
    file.unlink()
    with pytest.raises(ValueError, match="missing"):
        checkpoint.load(FileEngine(), path, run_checkpoints=tmp_path, settings=SETTINGS)
