"""The study of heads on targets of other forms: what it binds, and what its table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.studies.quantised import bind_head, describe, read_run
from runtime.head_spec import load_head, save_head
from tests.unit.runtime.engine_fixtures import head_spec, random_head_tensors, tiny_target


def cell(accepted: int, *, passed: bool = True) -> dict[str, Any]:
    """Eight prompts of ten drafts each."""
    rung = {"passed": passed}
    return {"sums": [[10, accepted, 0]] * 8, "rungs": {"P2": rung, "P3": rung}}


def test_a_bound_head_has_its_weights_and_another_target(tmp_path: Path) -> None:
    spec = head_spec(tiny_target(tmp_path / "target"))
    tensors = random_head_tensors(spec)
    save_head(tmp_path / "head", spec, tensors)
    bind_head(tmp_path / "head", tmp_path / "bound", fingerprint="f" * 64)
    bound, weights = load_head(tmp_path / "bound")
    assert bound.target_fingerprint == "f" * 64
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())


def test_differences_are_against_the_head_of_that_target() -> None:
    cells = {
        "bf16:bf16": cell(5),
        "int8:int8": cell(6),
        "bf16:int8": cell(4, passed=False),
    }
    rows = describe(cells, ["bf16", "int8"]).splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| bf16", "bf16"],
        ["| int8", "bf16"],
        ["| int8", "int8"],
    ]
    assert "1.400 [1.400, 1.400] | -0.200 [-0.200, -0.200] | 0.400 0.000" in rows[1]
    assert rows[1].endswith("| FAILED | FAILED |")
    assert "1.500 [1.500, 1.500] |  | 0.500 0.000 | passed | passed |" in rows[0]


def test_a_run_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no head; run `mtp train` first"):
        read_run(tmp_path)
