"""A Hydra sweep trains several heads in one process, over shared data and features."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtp_train.distributed import SingleProcessGroup
from mtp_train.precompute import run as precompute
from runtime.head_spec import load_head
from tests.distributed.test_train_stage import save_tokens
from tests.unit.features.targets import make_config, save_target


@pytest.mark.slow
def test_a_sweep_trains_every_head_in_one_process(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    save_tokens(tmp_path / "data")
    config = make_config(tmp_path, target, tmp_path / "data")
    precompute(config, group=SingleProcessGroup(torch.device("cpu")))
    features = tmp_path / config.run.name / "features"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mtp_train.train", "-m"),
            *("run.name=sweep", f"run.root={tmp_path}"),
            *(f"target.path={target}", f"data.path={tmp_path / 'data'}"),
            *(f"target.cache_dir={config.target.cache_dir}", f"features.path={features}"),
            *("trainer.dtype=float32", "trainer.epochs=1", "trainer.validate_every=0"),
            *("trainer.wandb=disabled", "trainer.tensorboard=false"),
            "head.init=random,last_layer",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    heads = sorted(path.parent for path in tmp_path.glob("sweep*/head/model.safetensors"))
    assert len(heads) == 2
    weights = [load_head(path)[1]["eh_proj.weight"] for path in heads]
    assert not torch.equal(*weights)
