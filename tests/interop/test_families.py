"""Heads for tiny targets of other families in a real vLLM. A head for Qwen2 has biases of query,
key and value, as trained; of Qwen3 it is a plain layer, for the layout has no norms of heads.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

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
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "vocab_size": VOCAB,
    "initializer_range": 0.06,
}


def make_bench(path: Path, family: str) -> Bench:
    """A tiny random target and a head with attention that matters, fitted to its states."""
    set_threads(1)
    decoder: Literal["target", "llama"] = "llama" if family == "qwen3" else "target"
    own = {"head_dim": 32} if family == "qwen3" else {}
    save_model(path / "target", family, **SIZES, **own)
    byte_tokenizer().save_pretrained(path / "target")  # vLLM wants one for Mistral
    target = load_target(path / "target", dtype=torch.float32, device=torch.device("cpu"))
    spec = make_head_spec(
        HeadConfig(decoder=decoder), target.config, fingerprint=target.fingerprint
    )
    stored = load_file(path / "target" / "model.safetensors")
    tensors = initialise(
        spec,
        method="random",
        seed=1,
        initializer_range=0.03,
        num_target_layers=target.config.num_layers,
        read_target=stored.__getitem__,
    )
    for name, tensor in tensors.items():
        if name.endswith(".bias"):
            tensor.normal_(generator=torch.Generator().manual_seed(2))
    engine = make_engine(target, max_model_len=200, num_pages=256)
    texts = [random_ids(150, seed=seed, vocab_size=VOCAB) for seed in range(40)]
    rows = list(engine.forward_hidden(texts))
    fit(tensors, rows, target.model.embedding_VD, stored["model.norm.weight"])
    save_head(path / "head", spec, tensors)
    out = path / "mimo"
    write_export(path / "head", out, format="mimo", target_dir=path / "target", unvalidated=True)
    prompts = tuple(tuple(random_ids(12 + i, seed=50 + i, vocab_size=VOCAB)) for i in range(8))
    return Bench(path / "target", out, prompts)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_drafts_and_accepted_per_position_are_equal_in_fp32(family: str, tmp_path: Path) -> None:
    bench = make_bench(tmp_path, family)
    pair = bench.compare(k=3)
    assert pair.our_sums.tolist() == pair.their_sums.tolist()
    assert pair.their_sums[:, 1].sum() > 20
    if family != "qwen2":
        return
    without = tmp_path / "without" / "mimo"
    shutil.copytree(bench.export_dir, without)
    written = load_file(without / "model.safetensors")
    zeroed = {n: t.zero_() if n.endswith(".bias") else t for n, t in written.items()}
    save_file(zeroed, without / "model.safetensors", metadata={"format": "pt"})
    other = bench.compare(k=3, export_dir=without, generations=pair.generations)
    assert other.their_sums.tolist() != pair.their_sums.tolist()
