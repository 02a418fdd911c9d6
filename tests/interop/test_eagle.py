"""EAGLE-3 and EAGLE-1 heads for tiny targets in a real vLLM: equal counts, and what tampering with
the files does there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_train.config import HeadConfig, HeadNorms
from mtp_train.validate import p6
from mtp_train.validate.served import EnginePair
from tests.interop.engines import Bench, vllm_python
from tests.interop.tiny_heads import REDUCED, VOCAB, TinyHead, make_tiny_bench, share_accepted

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not vllm_python().is_file(), reason="no vLLM here; make interop builds one"),
]

EAGLE3 = {
    "kind": "eagle3",
    "recycle": "pre_norm",
    "first_embedding_mask": False,
    "norms": HeadNorms(input=False),
}
EAGLE = HeadConfig(
    kind="eagle",
    recycle="pre_norm",
    first_embedding_mask=False,
    norms=HeadNorms(enorm=False, hnorm=False, input=False, final=False),
)
NARROW = {  # than the target's 128
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 32,
    "target_hidden_size": 128,
    "embedding": "own",
}
HEADS = {
    # the engines' default layers, which the directory does not name
    "full": TinyHead("eagle3", HeadConfig(**EAGLE3, layer_ids=(2, 3, 4)), num_layers=7),
    "reduced": TinyHead(
        "eagle3",
        HeadConfig(**EAGLE3, layer_ids=(1, 3), fusion_norm="each", draft_vocab_size=len(REDUCED)),
        ids=REDUCED,
    ),
    "norm_output": TinyHead(
        "eagle3",
        HeadConfig(**EAGLE3 | {"recycle": "post_norm"}, layer_ids=(1, 2, 3), fusion_norm="joined"),
    ),
    "speculators": TinyHead(
        "speculators",
        HeadConfig(
            **EAGLE3, layer_ids=(3,), norm_before_residual=True, draft_vocab_size=len(REDUCED)
        ),
        ids=REDUCED,
    ),
    "narrow": TinyHead(
        "eagle3",
        HeadConfig(**EAGLE3, layer_ids=(1, 3), fusion_norm="each", draft_vocab_size=len(REDUCED)),
        ids=REDUCED,
        fields=NARROW,
    ),
    "own_embedding": TinyHead(
        "speculators", HeadConfig(**EAGLE3, layer_ids=(1, 3)), fields={"embedding": "own"}
    ),
    "eagle": TinyHead("eagle", EAGLE),
}


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, EnginePair]:
    bench = make_tiny_bench(tmp_path_factory.mktemp("reduced"), HEADS["reduced"])
    return bench, bench.compare(k=3)


def check_equal(pair: EnginePair) -> None:
    assert pair.our_sums.tolist() == pair.their_sums.tolist()
    assert pair.counters_differ == 0
    for generation, served in zip(pair.generations, pair.served.prompts, strict=True):
        assert generation.output_ids == served.output_ids
        assert tuple(s.num_accepted for s in generation.steps) == served.accepted_per_step
    share = share_accepted(pair.their_sums.tolist())
    assert 0.1 < share < 0.95, f"{share:.2f} of the drafts accepted: a mistake would not show"


def test_a_reduced_draft_vocabulary_has_equal_counts_in_fp32(
    reduced: tuple[Bench, EnginePair],
) -> None:
    check_equal(reduced[1])


@pytest.mark.parametrize(
    "name", ["full", "norm_output", "speculators", "narrow", "own_embedding", "eagle"]
)
def test_drafts_and_accepted_per_position_are_equal_in_fp32(name: str, tmp_path: Path) -> None:
    bench = make_tiny_bench(tmp_path, HEADS[name])
    check_equal(bench.compare(k=3))


@pytest.mark.parametrize("name", sorted(HEADS))
def test_bf16_stays_within_the_bound(name: str, tmp_path: Path) -> None:
    bench = make_tiny_bench(tmp_path, HEADS[name])
    pair = bench.compare(k=3, dtype=torch.bfloat16)
    run = p6.EngineRun(pair, ("random",) * len(pair.generations))
    result = p6.check(bench.subject(torch.bfloat16), [run], min_drafts=100)
    assert result.passed, result.note
    assert pair.their_sums[:, 1].sum() > 20


def test_ids_in_the_place_of_offsets_load_and_draft_something_else(
    reduced: tuple[Bench, EnginePair], tmp_path: Path
) -> None:
    """Modulo the vocabulary, or vLLM would index beyond it."""
    bench, pair = reduced
    damaged = tmp_path / "out"
    shutil.copytree(bench.export_dir, damaged)
    tensors = load_file(damaged / "model.safetensors")
    count = torch.arange(len(REDUCED))
    tensors["d2t"] = (tensors["d2t"] + 2 * count) % VOCAB - count
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    other = bench.compare(k=3, export_dir=damaged, generations=pair.generations)
    assert other.their_sums.tolist() != pair.their_sums.tolist()
    assert [p.output_ids for p in other.served.prompts] == [
        p.output_ids for p in pair.served.prompts
    ]
