"""Medusa heads for tiny targets in a real vLLM: equal counts, and blocks in another order."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mtp_train.config import HeadConfig, HeadNorms
from tests.interop.engines import vllm_python
from tests.interop.test_eagle import check_equal
from tests.interop.tiny_heads import TinyHead, make_tiny_bench

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not vllm_python().is_file(), reason="no vLLM here; make interop builds one"),
]

MEDUSA: dict[str, Any] = {
    "kind": "medusa",
    "num_layers": 0,
    "num_blocks": 3,
    "recycle": "pre_norm",
    "first_embedding_mask": False,
    "projection_bias": True,
    "norms": HeadNorms(enorm=False, hnorm=False, input=False, post_attention=False, final=False),
}
HEADS = {
    "target's lm_head": TinyHead("medusa", HeadConfig(**MEDUSA)),
    "own lm_heads, no bias": TinyHead(
        "medusa", HeadConfig(**MEDUSA | {"projection_bias": False}, own_lm_heads=True)
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_drafts_and_accepted_per_position_are_equal_in_fp32(name: str, tmp_path: Path) -> None:
    bench = make_tiny_bench(tmp_path, HEADS[name])
    check_equal(bench.compare(k=3))


def test_fewer_tokens_than_blocks_and_blocks_in_another_order(tmp_path: Path) -> None:
    """Two of three blocks drafted with; exchanged, the texts stay and the counts do not."""
    bench = make_tiny_bench(tmp_path, HEADS["own lm_heads, no bias"])
    pair = bench.compare(k=2)
    check_equal(pair)
    damaged = tmp_path / "out" / "exchanged"
    shutil.copytree(bench.export_dir, damaged)
    tensors = load_file(damaged / "model.safetensors")
    for name in ("blocks.{}.layers.0.weight", "lm_heads.{}.weight"):
        first, second = name.format(0), name.format(1)
        tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    other = bench.compare(k=2, export_dir=damaged, generations=pair.generations)
    assert other.their_sums.tolist() != pair.their_sums.tolist()
    assert [p.output_ids for p in other.served.prompts] == [
        p.output_ids for p in pair.served.prompts
    ]
