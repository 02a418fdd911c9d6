"""P0 of targets that round what their linears read: passes with the real model, sees wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.features.sources import load_hugging_face
from mtp_train.quantise import SCHEMES, quantise_target
from mtp_train.validate import p0, p0_rounding, p3
from mtp_train.validate.p0_rounding import compare_linears, stop_rounding
from mtp_train.validate.report import RungResult
from mtp_train.validate.subject import Subject
from runtime.head_spec import save_head
from runtime.models.checkpoint import Checkpoint
from runtime.models.loader import load_target
from runtime.quantised_linear import InputRounding
from runtime.stored_weight import StoredWeight
from tests.unit.runtime.engine_fixtures import head_spec, random_head_tensors
from tests.unit.runtime.model_fixtures import random_ids, save_model
from tests.unit.validate.subjects import RUNTIME

pytest.importorskip("compressed_tensors")
CPU = torch.device("cpu")
VOCAB = 97


def make_subject(path: Path, scheme: str) -> Subject:
    torch.manual_seed(0)
    save_model(path / "model", "llama", vocab_size=VOCAB)
    quantise_target(path / "model", path / "target", SCHEMES[scheme])
    target = load_target(path / "target", dtype=torch.float32, device=CPU, cache_dir=path)
    spec = head_spec(target)
    save_head(path / "head", spec, random_head_tensors(spec))
    return Subject(path / "target", path / "head", torch.bfloat16, RUNTIME, cache_dir=path)


def climb(subject: Subject) -> RungResult:
    sequences = [random_ids(n, seed=n, vocab_size=VOCAB) for n in (30, 17, 9)]
    return p0.check(subject, sequences, max_logprob_gap=1e-4, max_kl=0.01)


@pytest.mark.parametrize("scheme", ["int8-w8a8", "fp8-w8a8"])
def test_the_target_as_it_is_passes(scheme: str, tmp_path: Path) -> None:
    result = climb(make_subject(tmp_path, scheme))
    assert result.passed, result.note
    assert result.figures["linears"]["count"] == 14
    assert result.figures["linears"]["max_error"] < 1e-5
    assert result.figures["float32_huggingface"]["max_gap"] < 1e-4
    assert "linear by linear" in result.note


def test_a_range_over_all_rows_of_a_batch_makes_the_dump_another_model(tmp_path: Path) -> None:
    result = climb(make_subject(tmp_path, "fp8-tensor-w8a8"))
    assert not result.passed
    assert "float32: log-probabilities differ from decode" in result.note
    assert "huggingface" not in result.note


def test_on_vllms_grid_transformers_is_asked_on_that_grid(tmp_path: Path) -> None:
    subject = make_subject(tmp_path, "int8-w8a8")
    on_grid = replace(subject, engine_config=replace(RUNTIME, int8_grid="vllm"))
    assert climb(on_grid).passed
    theirs = load_hugging_face(tmp_path / "target", dtype=torch.float32, device=CPU)
    ids = random_ids(30, seed=1, vocab_size=VOCAB)
    found = compare_linears(on_grid.target(torch.float32).model, theirs, ids, grid="library")
    assert found is not None
    assert found.worst > 1e-3  # and the grid was put back


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's weights two per cent too large."""
    read = Checkpoint.read_weight

    def wrong(self: Checkpoint, name: str) -> StoredWeight:
        weight = read(self, name)
        factor = 1.02 if name == "model.layers.1.mlp.down_proj.weight" else 1.0
        return replace(weight, scale_PQ=weight.scale_PQ * factor)

    monkeypatch.setattr(Checkpoint, "read_weight", wrong)


def wrong_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs cut off at half of their range, which no weight shows."""
    scale = InputRounding.scale

    def wrong(self: InputRounding, x_MI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps, zero_point = scale(self, x_MI)
        return steps / 2, zero_point

    monkeypatch.setattr(InputRounding, "scale", wrong)


def no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputRounding, "__call__", lambda self, x_MI: x_MI)


@pytest.mark.parametrize(
    ("mutate", "scheme", "named"),
    [
        (wrong_scale, "int8-w8a8", "float32: log-probabilities differ from huggingface"),
        (wrong_scale, "fp8-w8a8", "model.layers.1.mlp.down_proj: its outputs differ"),
        (wrong_rounding, "int8-w8a8", "its outputs differ from those of transformers"),
        (no_rounding, "fp8-w8a8", "its outputs differ from those of transformers"),
    ],
)
def test_what_is_wrong_is_named(
    mutate: Callable[[pytest.MonkeyPatch], None],
    scheme: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = make_subject(tmp_path, scheme)
    mutate(monkeypatch)
    result = climb(subject)
    assert not result.passed
    assert named in result.note


def test_rounding_that_transformers_leaves_out_is_said_not_to_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p0_rounding, "_rounding_modules", lambda model: iter(()))
    monkeypatch.setattr(p0, "load_hugging_face", plain_weights)
    result = climb(make_subject(tmp_path, "int8-w8a8"))
    assert result.passed, result.note
    assert "were not compared: transformers rounds none here" in result.note


def plain_weights(path: Path, **named: Any) -> Any:
    """As transformers reads a format that it makes plain."""
    model = load_hugging_face(path, **named)
    assert stop_rounding(model) == 0  # patched
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = False
    return model


def test_trees_are_compared_without_rounding(tmp_path: Path) -> None:
    subject = replace(make_subject(tmp_path, "int8-w8a8"), runtime_dtype=torch.float32)
    prompts = [random_ids(n, seed=n, vocab_size=VOCAB) for n in (9, 5, 12)]
    result = p3.check(subject, prompts, k=2, max_tokens=16, min_drafts=0)
    assert result.passed, result.figures
    assert "(without rounded inputs)" in result.note
    assert result.figures["float32_fixed_tree_nodes"] > 0
    plain = replace(subject, target_path=tmp_path / "model", may_differ=True)
    plain = replace(plain, _targets={}, _heads={})
    assert plain.unrounded() is plain
    assert "rounded" not in p3.check(plain, prompts, k=2, max_tokens=8, min_drafts=0).note


def test_a_model_that_rounds_nothing_has_nothing_to_stop(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    theirs = load_hugging_face(tmp_path / "model", dtype=torch.float32, device=CPU)
    target = load_target(tmp_path / "model", dtype=torch.float32, device=CPU, cache_dir=tmp_path)
    assert stop_rounding(theirs) == 0
    assert compare_linears(target.model, theirs, [1, 2, 3], grid="library") is None
