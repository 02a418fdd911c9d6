"""Keys and values in fp8: what is stored, that every path reads the same of it, and that it costs
what it says.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.config import EngineConfig, KvCache
from runtime.kv_cache import Fp8Scales, KVPool
from runtime.models.loader import Target, load_target
from tests.unit.runtime.engine_fixtures import (
    VOCAB,
    make_engine,
    make_requests,
    random_head,
    run_stepwise,
)
from tests.unit.runtime.model_fixtures import random_ids, relative_error, save_model

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def load(path: Path, *, kv_cache: KvCache) -> Target:
    return load_target(path, dtype=torch.float32, device=CPU, kv_cache=kv_cache)


def rounded(rows: torch.Tensor, scale: float) -> torch.Tensor:
    return (rows / scale).clamp(-448, 448).to(FP8).float() * scale


def make_pool(fp8: Fp8Scales | None) -> KVPool:
    return KVPool(
        num_layers=2,
        num_slots=6,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=CPU,
        fp8=fp8,
    )


def test_what_is_read_is_what_was_written_rounded_to_its_layers_scale() -> None:
    pool = make_pool(Fp8Scales(k=(1.0, 0.5), v=(2.0, 0.25)))
    k_NGC, v_NGC = torch.randn(3, 2, 4), torch.randn(3, 2, 4) * 300
    slots_N = torch.tensor([4, 0, 2])
    keys, values = pool.store(1, slots_N, k_NGC, v_NGC)
    assert torch.equal(keys.index_select(0, slots_N), rounded(k_NGC, 0.5))
    assert torch.equal(values.index_select(0, slots_N), rounded(v_NGC, 0.25))
    assert values.index_select(0, slots_N).abs().max() == 448 * 0.25  # cut off, not infinite
    assert keys[1:2].eq(0).all()
    keys, values = pool.store_run(0, 3, k_NGC, v_NGC)
    assert torch.equal(keys[3:6], rounded(k_NGC, 1.0))
    assert torch.equal(values[3:6], rounded(v_NGC, 2.0))
    pool.move(torch.tensor([3]), torch.tensor([5]))
    assert torch.equal(pool.rows(0)[0][5:6], rounded(k_NGC[:1], 1.0))
    assert pool.num_bytes() * 4 == make_pool(None).num_bytes()


def test_scales_stay_with_their_layers_when_others_are_left_out() -> None:
    scales = Fp8Scales(k=(1.0, 2.0, 3.0), v=(4.0, 5.0, 6.0))
    assert scales.of_layers([0, 2]) == Fp8Scales(k=(1.0, 3.0), v=(4.0, 6.0))
    assert Fp8Scales().of_layers([0, 2]).of(1) == (1.0, 1.0)


def test_states_are_those_of_rounded_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model", "llama")
    ids = random_ids(60, seed=1)

    def states(kv_cache: KvCache) -> torch.Tensor:
        engine = make_engine(load(tmp_path / "model", kv_cache=kv_cache))
        (rows,) = engine.forward_hidden([ids])
        return rows.hidden_TD

    got, exact = states("fp8_e4m3"), states("model")
    encode = KVPool._encode

    def round_rows(
        self: KVPool, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return encode(self, layer, rounded(k, 1.0), rounded(v, 1.0))

    monkeypatch.setattr(KVPool, "_encode", round_rows)
    from runtime.attention.sdpa import SdpaBackend

    target = load_target(tmp_path / "model", dtype=torch.float32, device=CPU, backend=SdpaBackend())
    (wanted,) = make_engine(target).forward_hidden([ids])
    assert relative_error(got, wanted.hidden_TD) < 1e-5
    assert relative_error(got, exact) > 1e-3


@pytest.mark.parametrize("schedule", ["mtp", "fixed_tree"])
def test_speculation_over_an_fp8_cache_changes_no_token(schedule: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    target = load(tmp_path / "model", kv_cache="fp8_e4m3")
    requests = make_requests(4, max_tokens=16, ignore_eos=True)
    plain = run_stepwise(make_engine(target), requests)
    draft = random_head(target)
    engine = make_engine(
        target, draft, num_draft_tokens=3, schedule=schedule, tree_nodes=8, max_batch_tokens=96
    )
    assert run_stepwise(engine, requests, late=True) == plain
    exact = make_engine(load(tmp_path / "model", kv_cache="model"))
    assert run_stepwise(exact, requests) != plain


def test_scales_of_the_checkpoint_are_used(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_model(path, "llama")
    (whole,) = make_engine(load(path, kv_cache="fp8_e4m3")).forward_hidden([random_ids(9, seed=1)])
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    scales = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["model.none"], "weights": weights}},
        "kv_cache_scheme": scales,
    }
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_scale \[1\] is missing"):
        load(path, kv_cache="fp8_e4m3")
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        for kind in ("k", "v"):
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor([1e-4])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (cut,) = make_engine(load(path, kv_cache="fp8_e4m3")).forward_hidden([random_ids(9, seed=1)])
    assert relative_error(cut.hidden_TD, whole.hidden_TD) > 0.01  # nothing above 448 * 1e-4


def test_attention_that_does_not_read_fp8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"runtime\.kv_cache=fp8_e4m3 with runtime\.attention=fla"):
        EngineConfig(kv_cache="fp8_e4m3", attention="flashinfer")
    save_model(tmp_path / "model", "deepseekv3")
    with pytest.raises(ValueError, match=r"kv_cache=fp8_e4m3 with latent attention"):
        load(tmp_path / "model", kv_cache="fp8_e4m3")
