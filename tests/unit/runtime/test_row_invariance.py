"""With the fused kernels a row's bits do not depend on the rows beside it, in bfloat16 too: a
prompt at once, in chunks, one token at a time and under verification are the same numbers.
"""

from __future__ import annotations

import pytest
import torch

from runtime.models.loader import Target, load_target
from runtime.panel_linear import PanelLinear
from tests.unit.runtime.engine_fixtures import make_engine, make_requests, random_head
from tests.unit.runtime.model_fixtures import random_ids, save_model

WIDTH = 64


# Heads of 32 fill the matrix tiles of a processor that has them; the others' are narrower.
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "wide heads": {"head_dim": 32}}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory) -> Target:
    path = tmp_path_factory.mktemp("target")
    sizes = {"vocab_size": 11, "hidden_size": WIDTH, "intermediate_size": 80}
    family = request.param if request.param in ("qwen2", "qwen3") else "llama"
    save_model(path, family, **sizes, **FAMILIES[request.param])
    loaded = load_target(path, dtype=torch.bfloat16, device=torch.device("cpu"))
    if not isinstance(loaded.model.lm_head, PanelLinear):
        pytest.skip("no bfloat16 products on this processor, or no compiler")
    assert all(block.fused for block in loaded.model.blocks)
    return loaded


@pytest.mark.parametrize("max_batch_tokens", [4, 7, 64])
def test_scores_are_the_same_bits_however_the_rows_are_cut(target, max_batch_tokens):
    sequences = [random_ids(n, seed=n, vocab_size=11) for n in (2, 70, 33, 90)]
    whole = make_engine(target, max_batch_tokens=512, max_model_len=128).score(sequences)
    engine = make_engine(target, max_batch_tokens=max_batch_tokens, max_model_len=128)
    for decode_path in (False, True):
        for a, b in zip(whole, engine.score(sequences, decode_path=decode_path), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3])
def test_speculation_gives_the_tokens_of_plain_decoding(target, k, temperature):
    requests = make_requests(8, max_tokens=40, temperature=temperature)
    plain = make_engine(target, max_running=3).generate(requests)
    drafted = make_engine(target, random_head(target), num_draft_tokens=k).generate(requests)
    assert [g.output_ids for g in drafted] == [g.output_ids for g in plain]
    assert any(step.num_accepted for g in drafted for step in g.steps)
