"""wandb runs as wandb itself writes them, offline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mtp_train.config import Config
from mtp_train.settings import load_config
from mtp_train.tracking import ladder_figures, log_ladder, open_wandb
from mtp_train.validate.report import AcceptanceResult, LadderReport, RungResult
from runtime.metrics import Acceptance

REPORT = LadderReport(
    target="t",
    head="h",
    head_sha256={},
    rungs=(RungResult("P0", True), RungResult("P1", False)),
    acceptance=(
        AcceptanceResult(
            "mtbench", 0.0, "argmax", Acceptance(2, 10, (5, 2), (5, 2)), tau_low=1.5, tau_high=1.9
        ),
    ),
)


def config_of(root: Path, *, wandb: str = "offline", group: str = "norms") -> Config:
    return load_config(
        {
            "run": {"name": "x-seed=1", "root": str(root), "group": group},
            "target": {"path": "m"},
            "trainer": {"wandb": wandb},
        }
    )


def wait_for(root: Path, *wanted: bytes) -> None:
    """Until one offline log holds all of it: another process writes them."""
    deadline = time.monotonic() + 60
    while True:
        logs = [file.read_bytes() for file in root.glob("wandb/offline-run-*/*.wandb")]
        if any(all(text in log for text in wanted) for log in logs):
            return
        assert time.monotonic() < deadline, f"{wanted} in none of {len(logs)} logs"
        time.sleep(0.2)


def test_stages_are_runs_of_one_group_with_the_stage_as_job_type(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    identities = []
    for stage in ("train", "validate", "train"):
        run: Any = open_wandb(config, root=tmp_path, stage=stage)
        assert (run.group, run.job_type, run.name) == ("norms", stage, "x-seed=1")
        identities.append(run.id)
        run.finish()
    assert identities[0] == identities[2] != identities[1]
    for stage in (b"train", b"validate"):
        wait_for(tmp_path, b"norms", stage)


def test_the_ladders_figures_are_written(tmp_path: Path) -> None:
    log_ladder(config_of(tmp_path), REPORT, root=tmp_path)
    wait_for(tmp_path, b"mtbench/k2/tau_low", b"rungs/P1")
    figures = ladder_figures(REPORT)
    assert figures["mtbench/k2/tau"] == pytest.approx(1.7)
    assert figures["mtbench/k2/rate_2"] == pytest.approx(0.2)
    assert (figures["passed"], figures["rungs/P0"], figures["rungs/P1"]) == (0.0, 1.0, 0.0)


def test_disabled_leaves_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path, wandb="disabled")
    assert open_wandb(config, root=tmp_path, stage="train") is None
    log_ladder(config, REPORT, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_outside_of_a_sweep_has_no_group(tmp_path: Path) -> None:
    run: Any = open_wandb(config_of(tmp_path, group=""), root=tmp_path, stage="train")
    assert not run.group
    run.finish()
