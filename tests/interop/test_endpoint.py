"""A real vLLM server answers as the runtime does, and renders prompts as rows hold them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.token_set import TokenRow, load_token_set
from mtp_train.check_render import run_check_render
from mtp_train.config import Config
from mtp_train.features.target import cache_directory, target_directory
from mtp_train.run_dir import RunDirectory, read_json
from mtp_train.settings import load_config
from mtp_train.stages import run_data
from tests.interop.engines import SMOLLM2, vllm_python

pytestmark = [pytest.mark.interop, pytest.mark.real]

_START_S = 400.0
TALKS = [
    ["What is the capital of France?", "x", "And of Italy? Answer in one word."],
    ["Write a haiku about the sea."],
    ["def add(a, b):\n    # complete this function"],
    ["Wie heißt die Hauptstadt von Österreich? 🙂"],
    ["List three primes.", "x", "And three more."],
    ["Say hello."],
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not vllm_python().is_file():
        pytest.skip(f"{vllm_python()} is absent (make interop)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    command = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(target_directory(SMOLLM2)), "--served-model-name", "smollm2"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    command += ["--max-num-seqs", "8", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)
    with (
        log.open("wb") as stream,
        subprocess.Popen(
            command, stdout=stream, stderr=stream, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + _START_S
            while not _is_up(url):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(1.0)
            yield url + "/v1"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def make_config(root: Path, name: str, **regenerate: Any) -> Config:
    source = root / "talks.jsonl"
    roles = ("user", "assistant")
    talks = [
        {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(talk)]}
        for talk in TALKS
    ]
    source.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return load_config(
        {
            "run": {"name": name, "root": str(root / "runs")},
            "target": {
                "path": SMOLLM2.path,
                "dtype": "float32",
                "device": "cpu",
                "cache_dir": str(cache_directory(SMOLLM2)),
            },
            "data": {
                "sources": [str(source)],
                "validation_share": 0.0,
                "max_tokens": 512,
                "regenerate": {"enabled": True, "max_tokens": 48} | regenerate,
            },
            "runtime": {"num_threads": 1},
        }
    )


def rows_of(config: Config) -> list[TokenRow]:
    return list(load_token_set(RunDirectory.from_config(config).data).rows("train"))


def test_greedy_answers_through_vllm_are_those_of_the_runtime(tmp_path: Path, server: str) -> None:
    here = make_config(tmp_path, "here")
    there = make_config(tmp_path, "there", url=[server], concurrency=4)
    assert run_data(here) == 0
    assert run_data(there) == 0
    ours, theirs = rows_of(here), rows_of(there)
    assert len(ours) == len(TALKS)
    assert theirs == ours
    notes = read_json(RunDirectory.from_config(there).data / "statistics.json")["notes"]
    assert not any("tokenised again" in note for note in notes), "ids both ways"


def test_sampled_answers_keep_their_ids_and_end_where_the_model_ended(
    tmp_path: Path, server: str
) -> None:
    config = make_config(
        tmp_path, "sampled", url=[server], temperature=1.0, top_k=50, top_p=0.9, max_tokens=64
    )
    assert run_data(config) == 0
    rows = rows_of(config)
    assert rows
    assert all(row.loss_mask[-1] for row in rows)


def test_vllm_renders_the_prompts_as_rows_hold_them(tmp_path: Path, server: str) -> None:
    config = make_config(tmp_path, "render")
    config = replace(config, check_render=replace(config.check_render, url=server))
    assert run_check_render(config) == 0
    found = read_json(RunDirectory.from_config(config).root / "render_check.json")
    assert found["way"] == "/tokenize"
    assert (found["prompts"], found["different"]) == (len(TALKS), 0)
    template = tmp_path / "other.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    other = replace(config, data=replace(config.data, chat_template=str(template)))
    assert run_check_render(other) == 1
