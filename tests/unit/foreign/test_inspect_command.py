"""`mtp inspect` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.cli.test_commands import run_mtp
from tests.unit.foreign.heads import change_tensors, make_export, put


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made")
    make_export(path, "eagle3")
    return path


def test_a_clean_directory_is_a_table_and_exit_code_zero(made: Path) -> None:
    done = run_mtp("inspect", "out/eagle3", f"target={made / 'target'}", cwd=made)
    assert done.returncode == 0, done.stderr
    for part in ("EAGLE-3", "Expects", "vLLM: loads", "SGLang: loads", "draft vocabulary"):
        assert part in done.stdout
    assert not (made / "runs").exists()


def test_json_and_exit_code_one_for_an_error(made: Path, tmp_path: Path) -> None:
    out = make_export(tmp_path, "eagle3")
    change_tensors(out, lambda t: t.pop("norm.weight"))
    done = run_mtp("inspect", str(out), "--json", cwd=tmp_path)
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["verdict"] == "error"
    assert said["format"]["key"] == "eagle3"
    assert not said["read_here"]
    finding = next(f for f in said["findings"] if f["severity"] == "error")
    assert finding == {
        "severity": "error",
        "code": "tensor-missing",
        "field": "norm.weight",
        "value": "missing",
        "allowed": "[32]",
        "action": finding["action"],
    }
    assert {verdict["engine"] for verdict in said["engines"]} == {"vLLM", "SGLang"}


def test_a_format_can_be_forced(tmp_path: Path) -> None:
    out = put(tmp_path / "x", {"architectures": ["Bert"]}, {"a.weight": torch.ones(1)})
    forced = run_mtp("inspect", str(out), "--json", "inspect.as=medusa", cwd=tmp_path)
    assert json.loads(forced.stdout)["format"]["key"] == "medusa"
    short = run_mtp("inspect", str(out), "--json", "as=medusa", cwd=tmp_path)
    assert short.stdout == forced.stdout
    wrong = run_mtp("inspect", str(out), "as=medussa", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean medusa?" in wrong.stderr


def test_no_directory_and_a_wrong_one_are_one_message(tmp_path: Path) -> None:
    none = run_mtp("inspect", cwd=tmp_path)
    assert none.returncode == 2
    assert "name its directory" in none.stderr
    wrong = run_mtp("inspect", "nowhere", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "no such directory" in wrong.stderr
