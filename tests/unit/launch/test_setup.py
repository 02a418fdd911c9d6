"""`make setup GPU=1` and the container recipe, read without running them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAKE = shutil.which("make")
DOCKERFILE = (ROOT / "launch" / "Dockerfile").read_text(encoding="utf-8")


def dry_run(*settings: str) -> list[str]:
    """The commands that `make setup` would run, one per entry."""
    assert MAKE is not None
    # Under `make test` the nested make would inherit the outer one's options and print directories.
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    done = subprocess.run(
        [MAKE, "-n", "-B", "setup", "PYTHON=python3", *settings],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.strip() for line in done.stdout.replace("\\\n", " ").splitlines()]


needs_make = pytest.mark.skipif(MAKE is None, reason="make is not installed")


@needs_make
@pytest.mark.parametrize("settings", [(), ("GPU=0",), ("GPU=",)])
def test_without_a_gpu_nothing_is_asked_of_drivers(settings: tuple[str, ...]) -> None:
    commands = dry_run(*settings)
    assert not any("doctor.driver" in command for command in commands)
    assert any(command.endswith("-e '.[dev]'") for command in commands)
    assert commands[-1] == "touch .venv/.setup-done .venv/.setup-done"


@needs_make
def test_with_a_gpu_the_driver_is_checked_before_and_torch_after_the_download() -> None:
    commands = dry_run("GPU=1")
    driver = commands.index("python3 -m mtp_train.doctor.driver 13")
    create = commands.index("python3 -m venv .venv")
    torch = next(i for i, command in enumerate(commands) if command.endswith(" torch"))
    build = commands.index(".venv/bin/python -m mtp_train.doctor.driver --torch")
    assert driver < create < torch < build
    assert commands[-1] == "touch .venv/.setup-done .venv/.setup-done-gpu13"


@needs_make
def test_another_cuda_another_index_and_flashinfer_can_be_chosen() -> None:
    commands = dry_run("GPU=1", "TORCH_CUDA=12", "TORCH_INDEX=file:///wheels", "FLASHINFER=1")
    assert "python3 -m mtp_train.doctor.driver 12" in commands
    assert any("--index-url file:///wheels torch" in command for command in commands)
    assert any(command.endswith("-e '.[dev,gpu]'") for command in commands)
    assert commands[-1].endswith(".setup-done-gpu12-flashinfer")


@pytest.mark.parametrize(
    ("driver", "code", "message"),
    [("580.65.06", 0, "good for CUDA 13"), ("550.54.15", 1, "needs 580.65.06 or newer")],
)
def test_the_driver_check_needs_no_package(
    driver: str, code: int, message: str, tmp_path: Path
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho 'NVIDIA H100, 81559, {driver}, 9.0'\n")
    smi.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "mtp_train.doctor.driver", "13"],  # -S: no site-packages
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert message in done.stdout + done.stderr


def test_the_container_uses_what_is_there() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"\bmake ([a-z]+) ", re.sub(r"#.*", "", DOCKERFILE))) - {"git"} <= targets
    version = re.search(r"FROM python:3\.(\d+)", DOCKERFILE)
    assert version is not None
    assert int(version.group(1)) >= 11
    assert "580.65.06" in DOCKERFILE


def test_runs_and_environments_stay_out_of_the_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"runs", ".venv*", ".git"} <= set(ignored)
    for needed in ("mtp_train", "runtime", "data_prep", "conf", "Makefile", "constraints.txt"):
        assert needed not in ignored
