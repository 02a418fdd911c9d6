"""A head in the DeepSeek layout beside a tiny random DeepSeek-V2-Lite in a real vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.config import HeadConfig
from mtp_train.export import write_export
from mtp_train.heads.init import initialise, make_head_spec
from runtime.cpu import set_threads
from runtime.head_spec import save_head
from runtime.models.loader import load_target
from tests.interop.engines import Bench, vllm_python
from tests.interop.fitted_head import fit
from tests.unit.cli.byte_target import byte_tokenizer
from tests.unit.runtime.engine_fixtures import make_engine
from tests.unit.runtime.model_fixtures import random_ids, save_model

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not vllm_python().is_file(), reason="no vLLM here; make interop builds one"),
]
VOCAB = 24
# Widths of a latent and of a head's parts are the published ones, which vLLM's kernel is made for.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "vocab_size": VOCAB,
    "initializer_range": 0.06,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,  # vLLM's router on a CPU wants both stated, as published configurations do
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}


def make_bench(path: Path) -> Bench:
    """A head of the target's kind, fitted to its states."""
    set_threads(1)
    save_model(path / "target", "deepseekv2", **SIZES)
    byte_tokenizer().save_pretrained(path / "target")
    target = load_target(path / "target", dtype=torch.float32, device=torch.device("cpu"))
    spec = make_head_spec(HeadConfig(), target.config, fingerprint=target.fingerprint)
    stored = load_file(path / "target" / "model.safetensors")
    tensors = initialise(
        spec,
        method="random",
        seed=1,
        initializer_range=0.03,
        num_target_layers=target.config.num_layers,
        read_target=stored.__getitem__,
    )
    engine = make_engine(target, max_model_len=200, num_pages=256)
    texts = [random_ids(150, seed=seed, vocab_size=VOCAB) for seed in range(40)]
    rows = list(engine.forward_hidden(texts))
    fit(tensors, rows, target.model.embedding_VD, stored["model.norm.weight"])
    save_head(path / "head", spec, tensors)
    out = path / "out" / "deepseek"
    write_export(
        path / "head", out, format="deepseek", target_dir=path / "target", unvalidated=True
    )
    prompts = tuple(tuple(random_ids(12 + i, seed=50 + i, vocab_size=VOCAB)) for i in range(8))
    return Bench(path / "target", out, prompts, format="deepseek")


def test_drafts_and_accepted_per_position_are_equal_in_fp32(tmp_path: Path) -> None:
    pair = make_bench(tmp_path).compare(k=3)
    assert pair.our_sums.tolist() == pair.their_sums.tolist()
    assert pair.their_sums[:, 1].sum() > 20
