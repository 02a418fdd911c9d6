"""A Hydra sweep trains several heads over shared data and features: in this process, in others, and
as an optimiser proposes them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mtp_train.distributed import SingleProcessGroup
from mtp_train.precompute import run as precompute
from runtime.head_spec import load_head
from tests.distributed.test_train_stage import save_tokens
from tests.unit.features.targets import make_config, save_target

INSTALL = "the extra is not installed: pip install -c constraints.txt -e '.[sweep]'"


def has_plugin(name: str) -> bool:
    """Whether Hydra finds it; without any plugin their package does not exist."""
    return find_spec("hydra_plugins") is not None and find_spec(f"hydra_plugins.{name}") is not None


@dataclass(frozen=True)
class Place:
    """A token set and features that every member shares, and the settings that name them."""

    root: Path
    settings: tuple[str, ...]

    def train(self, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-m", "mtp_train.train", "-m"),
                *(f"run.name={name}", *self.settings, *more),
            ],
            capture_output=True,
            text=True,
            check=False,
        )

    def records(self, pattern: str) -> list[dict[str, Any]]:
        files = sorted(self.root.glob(f"{pattern}/checkpoints/train.json"))
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("sweep")
    target = save_target(root / "target")
    save_tokens(root / "data")
    config = make_config(root, target, root / "data")
    precompute(config, group=SingleProcessGroup(torch.device("cpu")))
    return Place(
        root,
        (
            *(f"run.root={root}", f"target.path={target}", f"data.path={root / 'data'}"),
            f"target.cache_dir={config.target.cache_dir}",
            f"features.path={root / config.run.name / 'features'}",
            *("trainer.dtype=float32", "trainer.max_steps=2", "trainer.tokens_per_step=60"),
            *("trainer.wandb=disabled", "trainer.tensorboard=false", "runtime.num_threads=1"),
        ),
    )


MEASURED = (
    *("trainer.validate_every=1", "validate.k=2", "validate.num_prompts=2"),
    "validate.max_tokens=6",
)


@pytest.mark.slow
def test_a_sweep_trains_every_head_in_one_process(place: Place) -> None:
    done = place.train("one", "trainer.validate_every=0", "head.init=random,last_layer")
    assert done.returncode == 0, done.stderr[-2000:]
    heads = sorted(path.parent for path in place.root.glob("one*/head/model.safetensors"))
    assert len(heads) == 2
    weights = [load_head(path)[1]["eh_proj.weight"] for path in heads]
    assert not torch.equal(*weights)
    groups = [yaml.safe_load((head.parent / "config.yaml").read_text())["run"] for head in heads]
    assert [run["group"] for run in groups] == ["one", "one"]


@pytest.mark.slow
@pytest.mark.skipif(not has_plugin("hydra_joblib_launcher"), reason=INSTALL)
def test_members_in_other_processes_are_the_same_and_their_failures_come_back(
    place: Place,
) -> None:
    rates = "trainer.learning_rate=0.001,0.002"
    done = place.train(
        *("joblib", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", rates),
        "trainer.validate_every=0",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert place.train("local", rates, "trainer.validate_every=0").returncode == 0
    for rate in ("0.001", "0.002"):
        there, here = (
            load_head(place.root / f"{name}-learning_rate={rate}" / "head")[1]
            for name in ("local", "joblib")
        )
        assert all(torch.equal(there[name], here[name]) for name in there)
    bad = "trainer.dtype=float32,bfloat16"  # the latter is refused without ZeRO
    done = place.train(
        *("bad", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "deepspeed=zero0"),
        *("trainer.validate_every=0", bad),
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "bf16 training needs" in done.stderr
    assert len(place.records("bad-*")) == 1


@pytest.mark.slow
@pytest.mark.skipif(not has_plugin("hydra_submitit_launcher"), reason=INSTALL)
def test_submitted_members_are_the_same_and_a_failing_one_stops_no_other(place: Place) -> None:
    rates = "trainer.learning_rate=0.001,0.003"
    submitit = ("hydra/launcher=submitit_local", "trainer.validate_every=0")
    done = place.train("submitted", rates, *submitit)
    assert done.returncode == 0, done.stderr[-2000:]
    assert place.train("here", rates, "trainer.validate_every=0").returncode == 0
    for rate in ("0.001", "0.003"):
        there, here = (
            load_head(place.root / f"{name}-learning_rate={rate}" / "head")[1]
            for name in ("submitted", "here")
        )
        assert all(torch.equal(there[name], here[name]) for name in there)
    bad = "trainer.dtype=bfloat16,float32"  # the former is refused without ZeRO
    done = place.train("refused", *submitit, "deepspeed=zero0", bad)
    assert done.returncode == 2, done.stderr[-2000:]
    assert len(place.records("refused-*")) == 1


@pytest.mark.slow
@pytest.mark.skipif(not has_plugin("hydra_optuna_sweeper"), reason=INSTALL)
def test_an_optimiser_is_told_the_measured_tokens_per_step(place: Place) -> None:
    search = (
        *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.sampler.seed=1"),
        *("trainer.learning_rate=tag(log, interval(1e-4, 1e-1))", *MEASURED),
    )
    done = place.train("search", *search, "hydra.sweeper.direction=maximize")
    assert done.returncode == 0, done.stderr[-2000:]
    records = place.records("search-learning_rate=*")
    assert len(records) == 3
    taus = {
        r["fingerprint"]["trainer"]["learning_rate"]: r["outputs"]["best"]["tau"] for r in records
    }
    found = yaml.safe_load((place.root / "optimization_results.yaml").read_text())
    assert found["best_value"] == max(taus.values())
    assert taus[found["best_params"]["trainer.learning_rate"]] == found["best_value"]
    done = place.train("worst", *search)  # minimises unless told otherwise
    assert done.returncode == 2
    assert "set hydra.sweeper.direction=maximize" in done.stderr
    assert place.records("worst*") == []
