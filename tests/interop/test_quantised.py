"""Plain heads on quantised targets in a real vLLM: which loads, and what it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.engines import vllm_python
from tests.interop.quantised_table import HEADS, ask, quantised_bench, without_draft_layers

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not vllm_python().is_file(), reason="no vLLM here; make interop builds one"),
]
pytest.importorskip("compressed_tensors")


@pytest.mark.parametrize("layout", HEADS)
def test_a_plain_head_on_an_int8_target_accepts_what_it_accepts_here(
    layout: str, tmp_path: Path
) -> None:
    """On vLLM's grid of int8 inputs; last bits of float32 sums differ and can move a step."""
    answer = ask(quantised_bench(tmp_path, layout, "int8-w8a8"), layout, "int8-w8a8")
    assert not answer.load_error, answer.load_error
    assert answer.ours > 0.1
    assert abs(answer.theirs - answer.ours) < 0.02


def test_a_head_filed_under_a_quantised_layer_drafts_worse(tmp_path: Path) -> None:
    """Without the entry in ``ignore`` vLLM 0.32 loads it without a word, and drafts worse."""
    bench = quantised_bench(tmp_path, "mimo", "int8-w8a8")
    answer = ask(bench, "mimo", "int8-w8a8", without_draft_layers(bench))
    assert answer.load_error or answer.theirs < answer.ours - 0.02
