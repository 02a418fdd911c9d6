"""The ladder and training's settings over a head that others wrote."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mtp_train.config import ValidateConfig
from mtp_train.run_dir import read_json
from mtp_train.stages import run_validate
from mtp_train.validate import ladder
from tests.unit.export.test_export import make_config
from tests.unit.foreign.heads import make_export
from tests.unit.validate.test_ladder import fake_sets


def test_the_ladder_measures_it_and_writes_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "load_prompt_sets", fake_sets)
    out = make_export(tmp_path, "eagle3")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    acceptance = []
    for head in (out, tmp_path / "head"):
        config = make_config(tmp_path)
        validate = ValidateConfig(head=str(head), k=2, max_tokens=20, rungs=("P2", "P3"))
        run = dataclasses.replace(config.run, name=head.name)
        config = dataclasses.replace(config, validate=validate, run=run)
        assert run_validate(config) == 0
        acceptance.append(read_json(tmp_path / "runs" / head.name / "parity.json")["acceptance"])
    assert acceptance[0] == acceptance[1]
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    (imported,) = (tmp_path / "runs" / "eagle3" / "imported").iterdir()
    assert read_json(imported / "import.json")["format"] == "eagle3"
    assert "Drafts from 4 of these ids." in (imported / "README.md").read_text()
