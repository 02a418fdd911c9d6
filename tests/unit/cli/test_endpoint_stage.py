"""`mtp data` with endpoints: what the stage adds to regeneration through them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.token_set import load_token_set
from mtp_train.answering import read_api_key
from mtp_train.events import read_events
from mtp_train.features.target import load_tokenizer
from mtp_train.run_dir import RunDirectory
from mtp_train.stages import run_data
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.loader import load_target
from tests.serving.openai_server import Manner, engine_answers, serve
from tests.unit.cli.test_stages import make_config, target  # noqa: F401 (a fixture)

KEY = "sk-secret-123"


def settings(**options: Any) -> dict[str, Any]:
    return {"regenerate": {"enabled": True, "max_tokens": 6} | options}


def test_the_stage_records_who_answered_and_gets_the_same_rows(
    tmp_path: Path,
    target: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = make_config(tmp_path, target, **settings())
    assert run_data(here) == 0
    capsys.readouterr()
    model = load_target(str(target), dtype=torch.float32, device=torch.device("cpu")).model
    engine = Engine(
        model,
        config=EngineConfig(num_threads=1, max_model_len=256, num_pages=64),
        eos_token_ids=[2],
    )
    tokenizer = load_tokenizer(here.target, target)
    manner = Manner(api_key=KEY)
    with serve(engine_answers(engine), tokenizer, manner=manner) as server:
        options = settings(url=[server.url], api_key_env="TINY_KEY")
        there = make_config(tmp_path, target, **options)
        there = replace(there, run=replace(there.run, name="there"))
        monkeypatch.delenv("TINY_KEY", raising=False)
        with pytest.raises(ValueError, match=r"api_key_env=TINY_KEY: .* not set"):
            run_data(there)
        monkeypatch.setenv("TINY_KEY", KEY + "\n")  # as a file gives it
        assert run_data(there) == 0
    run = RunDirectory.from_config(there)
    sets = [load_token_set(RunDirectory.from_config(config).data) for config in (here, there)]
    for split in ("train", "validation"):
        rows = [list(token_set.rows(split)) for token_set in sets]
        assert rows[0] == rows[1]
    printed = capsys.readouterr().out
    assert "token ids both ways (exact)" in " ".join(printed.split())
    (event,) = read_events(run.events_file, event="endpoint")
    assert (event["url"], event["model"], event["answered"]) == (server.url, "tiny", 16)
    assert event["tokens"] > 0
    (made,) = read_events(run.events_file, event="token_set")
    assert any("nothing here can prove" in note for note in made["notes"])
    fingerprint = json.loads((run.data / "fingerprint.json").read_text())
    assert fingerprint["inputs"]["answered_by"] == {"model": "tiny"}
    assert server.url not in json.dumps(fingerprint)
    written = [path.read_bytes() for path in run.root.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in content for content in written)
    assert KEY not in printed


@pytest.mark.parametrize("value", ["", " \n", "sk-secret-1\nsk-secret-2", "sk-secret-é"])
def test_what_cannot_be_a_key_is_refused_and_not_shown(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_KEY", value)
    with pytest.raises(ValueError, match=r"^check_render\.api_key_env=TINY_KEY: ") as caught:
        read_api_key("TINY_KEY", "check_render.api_key_env")
    assert "secret" not in str(caught.value)
