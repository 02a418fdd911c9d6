"""What a run through servers leaves behind, and how it goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.config import DataConfig, RegenerateConfig
from data_prep.endpoints.pool import EndpointPool
from tests.serving.openai_server import (
    Complete,
    Fault,
    Manner,
    serve,
)
from tests.unit.data_prep.endpoint_helpers import (
    TALKS,
    clean_rows,
    config_for,
    journal_lines,
    regenerate,
)

REPOSITORY = Path(__file__).resolve().parents[3]


def test_a_finished_set_needs_no_server_and_says_whose_answers_it_holds(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    out = tmp_path / "out"
    with serve(answers, tiny) as server:
        config = config_for(source, server)
        first, _ = regenerate(config, out, tiny)
    pools: list[EndpointPool] = []
    elsewhere = replace(
        config.regenerate, url=("http://localhost:1/v1",), concurrency=9, retries=1, model="tiny"
    )
    again, _ = regenerate(replace(config, regenerate=elsewhere), out, tiny, pools=pools)
    assert not again.is_new
    assert pools == []
    assert again.fingerprint == first.fingerprint
    assert first.notes == again.notes
    other = replace(config.regenerate, model="another")
    with pytest.raises(ValueError, match=r'answered_by .*"tiny".*"another"'):
        regenerate(replace(config, regenerate=other), out, tiny)
    here = replace(config.regenerate, url=(), model="")
    with pytest.raises(ValueError, match="answered_by"):
        regenerate(replace(config, regenerate=here), out, tiny)


def test_answers_of_another_model_are_not_mixed(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    out = tmp_path / "out"
    clean_rows(source, out, tiny, answers)
    (out / "fingerprint.json").unlink()
    with (
        serve(answers, tiny, manner=Manner(model="two")) as server,
        pytest.raises(ValueError, match=r"other settings \(answered_by\)"),
    ):
        regenerate(config_for(source, server), out, tiny)


KILLED = """
import sys
from pathlib import Path
from tests.serving.openai_server import OpenAIServer
from tests.unit.data_prep.endpoint_helpers import config_for, regenerate
from tests.unit.data_prep.helpers import tiny_tokenizer

source, out, url = sys.argv[1:]
regenerate(config_for(Path(source), OpenAIServer(url)), Path(out), tiny_tokenizer())
"""


def test_kill_9_in_the_middle_loses_and_repeats_no_answer(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    wanted = clean_rows(source, tmp_path / "clean", tiny, answers)
    out = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TOKENIZERS_PARALLELISM": "false"}

    def slow(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        return Fault(delay_s=0.05 if number < 9 else 3600.0)

    with serve(answers, tiny, fault=slow) as server:
        command = [sys.executable, "-c", KILLED, str(source), str(out), server.url]
        with subprocess.Popen(command, cwd=REPOSITORY, env=environment) as process:
            deadline = time.monotonic() + 60
            while not (out / "regenerated.jsonl").is_file() or len(journal_lines(out)) < 9:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    kept = {line[0] for line in journal_lines(out)}
    assert len(kept) == 9
    with serve(answers, tiny) as server:
        _, rows = regenerate(config_for(source, server), out, tiny)
    assert rows == wanted
    assert len(server.asked()) == 2 * len(TALKS) - 9
    keys = [line[0] for line in journal_lines(out)]
    assert len(keys) == len(set(keys)) == 2 * len(TALKS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enabled": False}, r"data\.regenerate\.url needs data\.regenerate\.enabled=true"),
        ({"capture_features": True}, r"capture_features=true with data\.regenerate\.url"),
        ({"url": ("localhost:8000",)}, r"data\.regenerate\.url='localhost:8000': expected an addr"),
        ({"url": ("http://me:key@host/v1",)}, r"url: no user, .* in data\.regenerate\.api_key_env"),
        ({"url": ("http://me:key@host:port/v1",)}, "no user, password or query in the address"),
        ({"url": ("me:key@host:80/v1",)}, "no user, password or query in the address"),
        ({"url": ("http://host/v1?key=me:key",)}, "no user, password or query in the address"),
        ({"url": ("http://a b/v1",)}, r"data\.regenerate\.url='http://a b/v1': expected an addr"),
        ({"url": ("http://a/v1\n",)}, r"expected an address"),
        ({"url": ("http://a:0/v1",)}, r"expected an address"),
        ({"url": ("http://a:99999/v1",)}, r"expected an address"),
        ({"url": ("ftp://a/v1",)}, r"expected an address"),
        ({"url": ("http://a/v1", "http://a/v1")}, "the same endpoint twice"),
        ({"url": ("http://a/v1", "http://a/")}, "the same endpoint twice"),
        (
            {"api_key_env": "sk-me:key"},
            r"api_key_env: expected the name of an environment variable",
        ),
        ({"concurrency": 0}, "concurrency=0: must be at least 1"),
        ({"retries": -1}, "retries=-1: must not be negative"),
        ({"request_timeout_s": 0.0}, "must be greater than 0"),
    ],
)
def test_impossible_settings_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"enabled": True, "url": ("http://localhost:8000/v1",)} | options
    with pytest.raises(ValueError, match=message) as caught:
        RegenerateConfig(**given)
    assert "me:key" not in str(caught.value)


def test_a_run_in_this_process_has_the_fingerprint_it_always_had(source: Path, tiny: Any) -> None:
    from data_prep.chat import ChatFormat
    from data_prep.fingerprints import fingerprint_inputs

    config = DataConfig(sources=(str(source),), regenerate=RegenerateConfig(enabled=True))
    chat = ChatFormat(tiny)
    inputs = fingerprint_inputs(config, chat, seed=1, target_fingerprint="t")
    assert sorted(inputs["regenerate"]) == [
        "capture_features",
        "drop_cut_off",
        "enabled",
        "max_tokens",
        "temperature",
        "tool_results",
        "top_k",
        "top_p",
    ]
