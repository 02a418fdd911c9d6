"""Targets with experts and latent attention: routing, speculation, what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from mtp_train.config import HeadConfig
from mtp_train.heads.init import make_head_spec
from runtime.attention.cpu import CpuBackend
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.head_spec import HeadSpec
from runtime.layer_parts import PLAIN_LAYER, ExpertSpec
from runtime.layers import GatedMlp
from runtime.linear import PlainLinear
from runtime.models.config import parse_config
from runtime.models.llama import LlamaModel
from runtime.models.loader import Target, load_target
from runtime.moe import ExpertMlp, Router
from runtime.ops import TorchOps
from runtime.parallel import SingleProcessGroup
from tests.unit.runtime.engine_fixtures import (
    PLAIN,
    VOCAB,
    check_draft_state,
    make_engine,
    make_requests,
    random_head,
    run_stepwise,
    tiny_target,
)
from tests.unit.runtime.model_fixtures import (
    OWN,
    SMALL,
    fused_kernels,
    random_ids,
    relative_error,
    save_model,
)
from tests.unit.runtime.test_families import reader

CPU = torch.device("cpu")
FAMILIES = ["qwen3moe", "deepseekv2", "deepseekv3"]
WIDTH = 16


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Target:
    return load_target(
        path, dtype=dtype, device=CPU, use_kernels=False, cache_dir=path.parent, **options
    )


def slow_routing(
    spec: ExpertSpec, logits: list[float], bias: list[float]
) -> tuple[list[int], list[float]]:
    """One row, in plain Python."""
    if spec.scores == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    ranked = [score + b for score, b in zip(scores, bias, strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(spec.num_groups)]
    best = 1 if spec.group_score == "best" else 2
    groups.sort(key=lambda group: -sum(sorted((ranked[x] for x in group), reverse=True)[:best]))
    allowed = [x for group in groups[: spec.num_kept_groups] for x in group]
    chosen = sorted(allowed, key=lambda x: -ranked[x])[: spec.num_chosen]
    total = sum(scores[x] for x in chosen) if spec.normalises else 1.0
    return chosen, [scores[x] / total * spec.scaling for x in chosen]


ROUTERS = {
    "qwen3": ExpertSpec(12, 4, 8, normalises=True),
    "v2": ExpertSpec(12, 4, 8, num_groups=4, num_kept_groups=2, scaling=16.0),
    "v3": ExpertSpec(
        12,
        4,
        8,
        num_shared=2,
        scores="sigmoid",
        has_bias=True,
        num_groups=3,
        num_kept_groups=2,
        group_score="best_two",
        normalises=True,
        scaling=2.5,
        is_float32=True,
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_their_weights_are_those_of_a_row_by_row_reference(name: str) -> None:
    spec = ROUTERS[name]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(spec.num_experts, WIDTH, generator=generator)
    bias = torch.randn(spec.num_experts, generator=generator) * 0.3 * spec.has_bias
    x = torch.randn(40, WIDTH, generator=generator)
    routing = Router(spec, weight, bias if spec.has_bias else None)(x)
    for row, logits in enumerate((x @ weight.T).tolist()):
        chosen, weights = slow_routing(spec, logits, bias.tolist())
        assert routing.ids_NE[row].tolist() == chosen
        torch.testing.assert_close(routing.weights_NE[row], torch.tensor(weights))


def random_experts(spec: ExpertSpec) -> tuple[ExpertMlp, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = spec.shapes(hidden_size=WIDTH)
    tensors = {name: torch.randn(s, generator=generator) for name, s in shapes.items()}
    mlp = ExpertMlp(
        spec,
        tensors.__getitem__,
        shapes,
        ops=TorchOps(),
        make_linear=PlainLinear,
        group=SingleProcessGroup(CPU),
    )
    return mlp, tensors


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("rows", [1, 37])
def test_grouped_experts_are_experts_row_by_row(name: str, rows: int) -> None:
    spec = ROUTERS[name]
    mlp, tensors = random_experts(spec)
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2))

    def gated(prefix: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (tensors[f"mlp.{prefix}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return down @ (F.silu(gate @ row) * (up @ row))

    routing = mlp.router(x)
    wanted = []
    for row, ids, weights in zip(x, routing.ids_NE.tolist(), routing.weights_NE, strict=True):
        total = sum(w * gated(f"experts.{i}", row) for i, w in zip(ids, weights, strict=True))
        wanted.append(total + gated("shared_experts", row) if spec.num_shared else total)
    assert relative_error(mlp(x), torch.stack(wanted)) < 1e-5


def test_an_expert_is_one_product_over_its_rows_and_none_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlp, _ = random_experts(ROUTERS["qwen3"])
    seen: list[int] = []
    partial = GatedMlp.partial

    def count(self: GatedMlp, x_ND: torch.Tensor) -> torch.Tensor:
        seen.append(len(x_ND))
        return partial(self, x_ND)

    monkeypatch.setattr(GatedMlp, "partial", count)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3))
    mlp(x)
    ids = mlp.router(x).ids_NE.flatten()
    assert seen == [n for n in ids.bincount(minlength=12).tolist() if n]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["plain", "target"])
def test_speculation_changes_no_token(family: str, kind: str, tmp_path: Path) -> None:
    target = tiny_target(tmp_path, family=family)
    head = random_head(target, **(PLAIN if kind == "plain" else {}))
    for temperature, k in ((0.0, 1), (0.9, 3)):
        requests = make_requests(4, temperature=temperature, max_tokens=12, ignore_eos=True)
        plain = run_stepwise(make_engine(target), requests)
        checked: list[int] = []

        def check(engine: Engine, counts: list[int] = checked) -> None:
            counts.append(check_draft_state(engine))

        engine = make_engine(target, head, num_draft_tokens=k)
        assert run_stepwise(engine, requests, late=True, after_step=check) == plain
        assert sum(checked) > 20
    generations = make_engine(target, head, num_draft_tokens=3).generate(requests)
    assert any(step.num_accepted for one in generations for step in one.steps)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", ["fixed_tree", "dynamic_tree"])
def test_draft_trees_change_no_token(family: str, schedule: str, tmp_path: Path) -> None:
    target = tiny_target(tmp_path, family=family)
    head = random_head(target)
    requests = make_requests(3, max_tokens=12, ignore_eos=True)
    plain = run_stepwise(make_engine(target), requests)
    tree = {"schedule": schedule, "num_draft_tokens": 3, "tree_nodes": 8, "max_batch_tokens": 64}
    assert run_stepwise(make_engine(target, head, **tree), requests) == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    hf = save_model(tmp_path / "model", family)
    engine = make_engine(load(tmp_path / "model"), max_batch_tokens=16)
    sequences = [random_ids(length, seed=length) for length in (40, 3, 21)]
    scores = [engine.score(sequences, decode_path=one_row) for one_row in (False, True)]
    states = {int(rows.key): rows.hidden_TD for rows in engine.forward_hidden(sequences)}
    for index, ids in enumerate(sequences):
        with torch.no_grad():
            out = hf(torch.tensor([ids]), output_hidden_states=True)
        assert relative_error(states[index], out.hidden_states[-1][0]) < 1e-4
        wanted = out.logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        for got in scores:
            assert relative_error(got[index], wanted) < 1e-4


@pytest.mark.parametrize("family", ["deepseekv2", "deepseekv3"])
def test_the_cache_holds_one_latent_and_one_rotated_key_per_token(
    family: str, tmp_path: Path
) -> None:
    pool = tiny_target(tmp_path, family=family).model.new_pool(32)
    assert [tuple(keys.shape) for keys in pool.k] == [(32, 1, 20 + 6)] * 2
    assert pool.num_bytes() == 2 * 32 * (20 + 6) * 4


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, file, {"format": "pt"})


def test_layers_for_drafts_are_left_unread_only_where_the_configuration_has_them(
    tmp_path: Path,
) -> None:
    save_model(tmp_path / "model", "deepseekv3")
    rewrite(tmp_path / "model", **{"model.layers.2.eh_proj.weight": torch.zeros(32, 64)})
    with pytest.raises(ValueError, match=r"unexpected tensor model\.layers\.2\.eh_proj\.weight"):
        load(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_nextn_predict_layers": 1}))
    assert load(tmp_path / "model").config.num_native_heads == 1
    rewrite(tmp_path / "model", **{"model.layers.20.norm.weight": torch.zeros(32)})
    with pytest.raises(ValueError, match=r"unexpected tensor model\.layers\.20"):
        load(tmp_path / "model")


@pytest.mark.parametrize("name", ["experts.5.up_proj.weight", "gate.e_score_correction_bias"])
def test_a_missing_tensor_of_the_experts_is_named(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "deepseekv3")
    rewrite(tmp_path / "model", **{f"model.layers.1.mlp.{name}": None})
    with pytest.raises(ValueError, match=rf"tensor model\.layers\.1\.mlp\.{name} .* is missing"):
        load(tmp_path / "model")


def test_the_bias_of_the_choice_stays_float32_in_a_bfloat16_target(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "deepseekv3")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    target = load(tmp_path / "model", torch.bfloat16)
    bias = target.model.blocks[1].mlp.router._bias  # type: ignore[attr-defined]
    assert torch.equal(bias, stored["model.layers.1.mlp.gate.e_score_correction_bias"])
    (rows,) = make_engine(target).forward_hidden([random_ids(20, seed=1)])
    assert rows.hidden_TD.isfinite().all()


def raw_config(family: str, **changes: Any) -> dict[str, Any]:
    names = {
        "qwen3moe": "Qwen3MoeForCausalLM",
        "deepseekv2": "DeepseekV2ForCausalLM",
        "deepseekv3": "DeepseekV3ForCausalLM",
    }
    return {**SMALL, **OWN[family], "architectures": [names[family]], **changes}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3moe", {"mlp_only_layers": 3}, "mlp_only_layers=3; expected a list"),
        ("qwen3moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7; there are 6 experts"),
        ("qwen3moe", {"num_experts": 0}, "num_experts=0; expected a positive integer"),
        ("deepseekv2", {"norm_topk_prob": True}, "norm_topk_prob=True; supported: False"),
        ("deepseekv2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'; supported: 'greedy'"),
        ("deepseekv2", {"attention_bias": True}, "attention_bias=True; supported: False"),
        ("deepseekv2", {"num_key_value_heads": 2}, "num_key_value_heads=2; supported: 4"),
        ("deepseekv2", {"qk_rope_head_dim": 5}, "qk_rope_head_dim=5; rotary embedding needs"),
        ("deepseekv2", {"moe_layer_freq": 2}, "moe_layer_freq=2; supported: 1"),
        ("deepseekv3", {"scoring_func": "softmax"}, "scoring_func='softmax'; supported: 'sigmoid'"),
        ("deepseekv3", {"n_group": 3}, "8 experts in n_group=3, topk_group=2; expected groups of"),
        ("deepseekv3", {"n_group": 8}, "n_group=8; a group needs two experts, it has one"),
    ],
)
def test_what_is_not_computed_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^conf: {message}"):
        parse_config(raw_config(family, **changes), generation={}, source="conf")


@pytest.mark.parametrize("family", ["deepseekv2", "deepseekv3"])
def test_a_query_latent_has_to_be_stated(family: str) -> None:
    raw = raw_config(family)
    del raw["q_lora_rank"]
    with pytest.raises(ValueError, match="q_lora_rank is missing"):
        parse_config(raw, generation={}, source="conf")


def test_what_does_not_go_with_latent_attention_or_experts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_model(path, "deepseekv2", vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"attention=flashinfer with latent attention .*sdpa"):
        load(path, attention="flashinfer")
    target = load(path)
    with pytest.raises(ValueError, match=r"CpuBackend has no latent attention .*attention=sdpa"):
        LlamaModel(
            target.config,
            reader(path, target.config, 0.0),
            backend=CpuBackend(fused_kernels()),
            ops=TorchOps(),
            dtype=torch.float32,
            device=CPU,
            group=SingleProcessGroup(CPU),
        )
    graphs = EngineConfig(cuda_graphs=True)
    with pytest.raises(ValueError, match=r"cuda_graphs=true .*SDPA.*use runtime\.cuda_graphs=fal"):
        Engine(target.model, config=graphs)
    save_model(tmp_path / "moe", "qwen3moe", vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"cuda_graphs=true .*which experts.*cuda_graphs=false"):
        Engine(load(tmp_path / "moe").model, config=graphs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_follows_the_last_layer_unless_it_is_told_to_be_plain(family: str) -> None:
    config = parse_config(raw_config(family), generation={}, source="conf")
    assert config.experts is not None
    spec = make_head_spec(HeadConfig(decoder="target", init="last_layer"), config, fingerprint="")
    assert spec.latent == config.latent
    assert spec.experts == dataclasses.replace(config.experts, dense_layers=())
    own = {n.removeprefix("layers.0.") for n in spec.tensor_shapes() if n.startswith("layers.0.")}
    assert own == config.block_shapes(1).keys()
    assert HeadSpec.from_json(spec.to_json()) == spec
    plain = make_head_spec(HeadConfig(decoder="llama", init="random"), config, fingerprint="")
    assert (plain.layer_parts, plain.latent, plain.experts) == (PLAIN_LAYER, None, None)
    assert "latent" not in plain.to_json()
    assert plain.num_heads * plain.head_dim == (48 if family == "qwen3moe" else 32)


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("qwen3moe", {"decoder": "llama"}),
        ("deepseekv2", {"decoder": "llama"}),
        ("deepseekv2", {"num_layers": 2}),  # the first layer of the target is dense
        ("deepseekv3", {"kind": "eagle"}),
    ],
)
def test_layers_of_another_kind_are_not_copied(family: str, head: dict[str, Any]) -> None:
    config = parse_config(raw_config(family), generation={}, source="conf")
    with pytest.raises(ValueError, match=r"head\.init=last_layer: layer \d of .* has "):
        make_head_spec(HeadConfig(init="last_layer", **head), config, fingerprint="")


BLOCK = (16, 12)  # of no weight a divisor


def store_in_fp8(path: Path) -> dict[str, torch.Tensor]:
    """Quantise the linears of the layers in place; returns what they stand for, float32."""
    file = path / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if "layers" not in name or tensor.ndim != 2 or ".gate." in name:
            stored[name] = meant[name] = tensor
            continue
        rows, columns = (-(-size // part) for size, part in zip(tensor.shape, BLOCK, strict=True))
        scale, values = torch.empty(rows, columns), torch.empty_like(tensor)
        for row in range(rows):
            for column in range(columns):
                part = (
                    slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
                    slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
                )
                scale[row, column] = tensor[part].abs().max() / 448
                values[part] = tensor[part] / scale[row, column]
        stored[name] = values.to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        spread = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        meant[name] = stored[name].float() * spread[: tensor.shape[0], : tensor.shape[1]]
    save_file(stored, file, {"format": "pt"})
    return meant


def test_block_fp8_weights_are_those_that_their_scales_say(tmp_path: Path) -> None:
    path = tmp_path / "model"
    hf = save_model(path, "deepseekv3")
    exact = hf.state_dict()["model.layers.1.self_attn.o_proj.weight"].clone()
    meant = store_in_fp8(path)
    with pytest.raises(ValueError, match=r"is stored in fp8; config\.json has to say so"):
        load(path)
    file = path / "config.json"
    stated = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": stated}))
    ids, target = random_ids(30, seed=1), load(path)
    (rows,) = make_engine(target).forward_hidden([ids])
    save_model(tmp_path / "plain", "deepseekv3")
    rewrite(tmp_path / "plain", **meant)
    (wanted,) = make_engine(load(tmp_path / "plain")).forward_hidden([ids])
    assert torch.equal(rows.hidden_TD, wanted.hidden_TD)
    rounding = relative_error(meant["model.layers.1.self_attn.o_proj.weight"], exact)
    assert 1e-3 < rounding < 0.05
    rewrite(path, **{"model.layers.1.self_attn.o_proj.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(ValueError, match=r"o_proj\.weight_scale_inv has shape \[1, 1\]"):
        load(path)


def test_another_quantisation_is_refused() -> None:
    raw = raw_config("deepseekv3", quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match=r"quant_method='awq'; allowed: 'fp8', 'compressed-ten"):
        parse_config(raw, generation={}, source="conf")


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
        },
    ),
    "DeepSeek-V3, without its layer for drafts": (
        671_026_419_200,
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tensor_list_of_a_published_model_has_its_parameters(name: str) -> None:
    count, raw = PUBLISHED[name]
    config = parse_config(raw, generation={}, source=name)
    assert sum(map(math.prod, config.tensor_shapes().values())) == count
