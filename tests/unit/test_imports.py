"""The shape of the code base: who imports whom, that everything imports, that files stay small."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import data_prep
import mtp_train
import runtime

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"runtime": runtime, "data_prep": data_prep, "mtp_train": mtp_train}
FORBIDDEN = {"runtime": {"data_prep", "mtp_train"}, "data_prep": {"mtp_train"}, "mtp_train": set()}
MAX_LINES = 600
# Parsed before the configuration is known to be right: a typo must not cost a torch import.
LIGHT_MODULES = (
    "mtp_train.check_render",
    "mtp_train.compare.page",
    "mtp_train.reproduce",
    "mtp_train.cli",
    "mtp_train.app",
    "mtp_train.settings",
    "mtp_train.data",
    "mtp_train.train",
    "mtp_train.validate.__main__",
    "mtp_train.demo",
    "mtp_train.generate",
    "mtp_train.report.page",
    "mtp_train.doctor.__main__",
    "mtp_train.doctor.driver",
    "mtp_train.plan.__main__",
)


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _imported_roots(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, (node.module or "").partition(".")[0]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_point_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {root}"
        for path in _files(package)
        for line, root in _imported_roots(path)
        if root in FORBIDDEN[package] | {"tests", "conf"}
    ]
    assert wrong == []


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_module_imports(package: str) -> None:
    names = [
        info.name
        for info in pkgutil.walk_packages(PACKAGES[package].__path__, prefix=f"{package}.")
        if not info.name.endswith("_triton")  # GPU only
    ]
    for name in names:
        importlib.import_module(name)


@pytest.mark.parametrize("folder", [*sorted(PACKAGES), "tests"])
def test_no_file_is_too_long_to_follow(folder: str) -> None:
    too_long = {
        str(path.relative_to(ROOT)): count
        for path in _files(folder)
        if (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert too_long == {}


def test_configuration_folder_holds_no_code() -> None:
    assert [p.name for p in (ROOT / "conf").rglob("*") if p.is_file() and p.suffix != ".yaml"] == []


def test_commands_start_without_heavy_imports() -> None:
    code = (
        f"import importlib, sys\n"
        f"for name in {LIGHT_MODULES!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'deepspeed', 'transformers', 'datasets', 'wandb'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
