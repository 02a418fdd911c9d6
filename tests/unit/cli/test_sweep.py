"""Members of a sweep: their names, their group, and what the sweeper is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_train import app, sweep
from mtp_train.config import Config
from mtp_train.settings import load_config


def start(
    monkeypatch: pytest.MonkeyPatch,
    cwd: Path,
    *arguments: str,
    stage: Callable[[Config], int] | None = None,
) -> tuple[list[Config], Any]:
    seen: list[Config] = []

    def watched(config: Config) -> int:
        seen.append(config)
        return stage(config) if stage else 0

    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["mtp train", "-m", *arguments, "target.path=m"])
    with pytest.raises(SystemExit) as ended:
        app.run_command("train", watched)
    return seen, ended.value.code


def config_of(root: Path, **changes: Any) -> Config:
    values = {"run": {"name": "x", "root": str(root)}, "target": {"path": "m"}}
    return load_config(values | changes)


def record(root: Path, name: str, content: dict[str, Any]) -> None:
    file = root / "x" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def test_members_have_the_sweeps_name_as_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, code = start(monkeypatch, tmp_path, "run.name=x", "seed=1,2")
    assert code == 0
    assert [(c.run.name, c.run.group) for c in seen] == [("x-seed=1", "x"), ("x-seed=2", "x")]


def test_a_group_that_was_given_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = start(monkeypatch, tmp_path, "run.name=a,b", "run.group=norms")
    assert [(c.run.name, c.run.group) for c in seen] == [("a", "norms"), ("b", "norms")]
    seen, _ = start(monkeypatch, tmp_path, "run.name=a,b")
    assert [c.run.group for c in seen] == ["", ""]


def test_a_setting_given_twice_is_swept_when_one_of_them_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, _ = start(monkeypatch, tmp_path, "run.name=x", "seed=7", "seed=1,2")
    assert [c.run.name for c in seen] == ["x-seed=1", "x-seed=2"]


def test_settings_that_a_sweeper_varies_by_itself_name_the_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "conf" / "experiment" / "search.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 3,4\n")
    arguments = ("--config-dir", str(tmp_path / "conf"), "experiment=search", "run.name=x")
    seen, _ = start(monkeypatch, tmp_path, *arguments)
    assert [c.run.name for c in seen] == ["x-seed=3", "x-seed=4"]
    assert {c.run.group for c in seen} == {"x"}


def test_a_single_member_without_variation_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, _ = start(monkeypatch, tmp_path, "run.name=x")
    assert [c.run.name for c in seen] == ["x"]


def test_training_returns_its_best_validation(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert sweep.objective("train", config) is None
    record(tmp_path, "checkpoints/train.json", {"outputs": {"best": None}})
    assert sweep.objective("train", config) is None
    record(tmp_path, "checkpoints/train.json", {"outputs": {"best": {"tau": 1.5, "step": 2}}})
    assert sweep.objective("train", config) == 1.5


def test_validation_returns_the_first_set_at_the_configured_k(tmp_path: Path) -> None:
    rows = [
        {"prompt_set": name, "k": k, "temperature": 0.0, "tau": tau}
        for name, k, tau in (("humaneval", 3, 2.2), ("mtbench", 1, 1.3), ("mtbench", 3, 1.7))
    ]
    record(tmp_path, "parity.json", {"acceptance": rows})
    config = config_of(tmp_path)
    assert sweep.objective("validate", config) == 1.7
    assert sweep.objective("demo", config) == 1.7
    assert sweep.objective("data", config) is None
    assert sweep.objective("validate", config_of(tmp_path, validate={"k": 5})) is None


def test_a_search_is_refused_before_it_works_when_it_looks_for_the_worst(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for direction, is_fine in ((None, True), ("maximize", True), ("minimize", False)):
        monkeypatch.setattr(sweep, "_searching_direction", lambda found=direction: found)
        if is_fine:
            sweep.check_direction()
        else:
            with pytest.raises(ValueError, match=r"set hydra\.sweeper\.direction=maximize"):
                sweep.check_direction()


def test_a_search_without_a_figure_says_what_measures_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_searching_direction", lambda: "maximize")
    with pytest.raises(ValueError, match="measured no tokens per step for the sweeper"):
        sweep.objective("train", config_of(tmp_path))
