"""Every family against transformers, fp32 <= 1e-4 relative after each layer; what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from runtime.attention.sdpa import SdpaBackend
from runtime.batch import BatchMode
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.layer_parts import LayerParts
from runtime.linear import TensorSource
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import ModelConfig, load_config, parse_config
from runtime.models.families import FAMILIES
from runtime.models.llama import LlamaModel
from runtime.models.loader import Target, load_target
from runtime.ops import RotaryAngles, TorchOps
from runtime.parallel import SingleProcessGroup
from runtime.request import Request
from tests.unit.runtime.engine_fixtures import (
    check_draft_state,
    make_engine,
    make_requests,
    random_head,
    run_stepwise,
    tiny_target,
)
from tests.unit.runtime.model_fixtures import (
    LLAMA3_ROPE,
    OWN,
    SMALL,
    YARN_ROPE,
    kernel_cache,
    make_batch,
    make_table,
    random_ids,
    relative_error,
    save_model,
)

CPU = torch.device("cpu")
LAYERS = 4
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"num_key_value_heads": 4, "max_position_embeddings": 4096}),
    "llama 3.1": (
        "llama",
        {
            "rope_parameters": LLAMA3_ROPE
            | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192},
            "max_position_embeddings": 131072,
        },
    ),
    "llama 3.2": (
        "llama",
        {
            "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0, "factor": 32.0},
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("mistral", {"max_position_embeddings": 32768}),
    "mistral, wide window": ("mistral", {"sliding_window": 96}),
    "mistral nemo": ("mistral", {"head_dim": 12, "max_position_embeddings": 131072}),
    "qwen2": (
        "qwen2",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5, yarn": (
        "qwen2",
        {
            "rope_parameters": YARN_ROPE | {"original_max_position_embeddings": 32768},
            "max_position_embeddings": 131072,
        },
    ),
    "qwen3": (
        "qwen3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "max_position_embeddings": 40960,
        },
    ),
    "qwen3, biases": ("qwen3", {"attention_bias": True, "head_dim": 8}),
    "qwen3, heads in whole vectors": ("qwen3", {"head_dim": 32, "hidden_size": 64}),
    "qwen3 moe": (
        "qwen3moe",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "max_position_embeddings": 40960,
        },
    ),
    "qwen3 moe, some layers dense": (
        "qwen3moe",
        {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "deepseek v2 lite": (
        "deepseekv2",
        {
            "rope_parameters": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            "max_position_embeddings": 163840,
        },
    ),
    "deepseek v2, group limit": (
        "deepseekv2",
        {
            "q_lora_rank": 18,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "rope_parameters": DEEPSEEK_YARN | {"mscale": 0.5, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek v3": (
        "deepseekv3",
        {
            "rope_parameters": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "max_position_embeddings": 163840,
        },
    ),
    "deepseek v3, halves": (
        "deepseekv3",
        {
            "rope_interleave": False,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
        },
    ),
}
KERNELS = [pytest.param(False, id="torch"), pytest.param(True, id="fused")]


@pytest.fixture(scope="module", params=CASES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    family, overrides = CASES[request.param]
    path = tmp_path_factory.mktemp("family") / "model"
    return path, save_model(path, family, num_hidden_layers=LAYERS, **overrides)


def load(path: Path, *, use_kernels: bool = False, **options: Any) -> Target:
    return load_target(
        path,
        dtype=torch.float32,
        device=CPU,
        use_kernels=use_kernels,
        cache_dir=kernel_cache() if use_kernels else path.parent / "cache",
        **options,
    )


def every_layer(hf: PreTrainedModel, ids: list[int], *, start: int = 0) -> torch.Tensor:
    """``[g | S_1 ... S_{N-1}]`` of transformers for ids at positions from ``start`` on."""
    positions = torch.arange(start, start + len(ids))[None]
    with torch.no_grad():
        out = hf(torch.tensor([ids]), position_ids=positions, output_hidden_states=True)
    states = out.hidden_states
    return torch.stack((states[-1][0], *(states[k][0] for k in range(1, LAYERS))))


def layers_of(rows_NE: torch.Tensor) -> torch.Tensor:
    return rows_NE.unflatten(1, (LAYERS, -1)).transpose(0, 1)


def worst(got_LND: torch.Tensor, wanted_LND: torch.Tensor) -> float:
    assert got_LND.shape == wanted_LND.shape
    return max(relative_error(a, b) for a, b in zip(got_LND, wanted_LND, strict=True))


@pytest.mark.parametrize("use_kernels", KERNELS)
def test_every_layer_equals_transformers_in_prefill_chunks_and_decode(
    saved: tuple[Path, PreTrainedModel], use_kernels: bool
) -> None:
    path, hf = saved
    model = load(path, use_kernels=use_kernels).model
    is_dense = model.config.latent is None and model.config.experts is None
    if is_dense:
        assert (model.blocks[0].fused is not None) == use_kernels
    tapped = model.tapped(range(1, LAYERS))
    ids = random_ids(90, seed=1)
    wanted = every_layer(hf, ids)
    table = make_table()
    row, pool = table.acquire_row(), model.new_pool(256 * 16)
    done = 0
    for count in (31, 7, 22, *[1] * 20, 4, 6):  # prefill, chunks, decode, verification
        mode = BatchMode.DECODE if count == 1 else BatchMode.PREFILL
        batch = make_batch(table, [row], [ids[done : done + count]], [done], mode=mode)
        got = tapped.forward(batch, table, pool)
        assert worst(layers_of(got), wanted[:, done : done + count]) < 1e-4
        done += count
    assert done == len(ids)
    with torch.no_grad():
        logits = hf.lm_head(wanted[0])
    assert relative_error(model.logits(wanted[0]), logits) < 1e-4


def test_rotation_is_right_up_to_the_last_position(
    saved: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hf = saved
    model = load(path).model
    last, count = model.config.max_position_embeddings, 24
    positions = torch.cat((torch.arange(0, last, last // 500), torch.arange(last - 9, last)))
    angles = model.rotary.angles(positions, torch.float32, end=last)
    cos, sin = hf_angles(hf, positions)
    half = sin.shape[-1] // 2
    torch.testing.assert_close(angles.cos_NC, cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(angles.sin_NC[:, half:], sin[0, :, half:], rtol=0, atol=1e-6)

    start, of_rows = last - count, model.rotary.angles

    def moved(positions_N: torch.Tensor, dtype: torch.dtype, *, end: int) -> RotaryAngles:
        return of_rows(positions_N + start, dtype, end=end + start)

    monkeypatch.setattr(model.rotary, "angles", moved)
    ids, table = random_ids(count, seed=2), make_table()
    batch = make_batch(table, [table.acquire_row()], [ids], [0])
    got = model.tapped(range(1, LAYERS)).forward(batch, table, model.new_pool(4096))
    assert worst(layers_of(got), every_layer(hf, ids, start=start)) < 1e-4


def hf_angles(hf: PreTrainedModel, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = hf.model.rotary_emb(torch.zeros(1), positions_N[None])
    if isinstance(angles, tuple):
        return angles
    return tuple(torch.cat((part, part), -1) for part in (angles.real, angles.imag))  # complex


def test_sharded_files_give_the_same_states(
    saved: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    path, hf = saved
    hf.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    ids, states = random_ids(12, seed=3), []
    for directory in (path, tmp_path / "many"):
        model, table = load(directory).model, make_table()
        batch = make_batch(table, [table.acquire_row()], [ids], [0])
        states.append(model.forward(batch, table, model.new_pool(4096)))
    assert torch.equal(*states)


def test_both_rope_schemas_of_a_family_give_one_configuration(
    saved: tuple[Path, PreTrainedModel],
) -> None:
    path, hf = saved
    new = hf.config.to_dict()
    assert "rope_scaling" not in new
    parameters = new.pop("rope_parameters")
    old = new | {"rope_theta": parameters["rope_theta"], "rope_scaling": None}
    if parameters["rope_type"] != "default":
        scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
        old["rope_scaling"] = scaling | {"type": scaling["rope_type"]}
    old["architectures"] = [type(hf).__name__]
    assert parse_config(old, generation={}, source="old") == load_config(path)


# Sizes as published in config.json, with the parameters that the safetensors files hold.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-2-7b": (
        6_738_415_616,
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-8B": (
        8_190_735_360,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tensor_list_of_a_published_model_has_its_parameters(name: str) -> None:
    count, raw = PUBLISHED[name]
    config = parse_config(raw, generation={}, source=name)
    assert sum(map(math.prod, config.tensor_shapes().values())) == count


def tiny_raw(family: str, **changes: Any) -> dict[str, Any]:
    names = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}
    raw = {**SMALL, **OWN.get(family, {}), "architectures": [names[family]], **changes}
    return {key: value for key, value in raw.items() if value != "left out"}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"attention_bias": "yes"}, "attention_bias='yes'; expected true or false"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0; expected a positive integer or null"),
        ("mistral", {"num_key_value_heads": "left out"}, "num_key_value_heads is missing"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=true; supported: false"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ("qwen2", {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config is set"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("qwen3", {"head_dim": "left out"}, "head_dim is missing; Qwen3ForCausalLM has to"),
    ],
)
def test_what_a_family_does_not_compute_is_named(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^conf: {message}"):
        parse_config(tiny_raw(family, **changes), generation={}, source="conf")


def test_an_unknown_architecture_is_told_what_is_supported() -> None:
    raw = tiny_raw("llama") | {"architectures": ["GemmaForCausalLM"]}
    with pytest.raises(ValueError, match="GemmaForCausalLM") as error:
        parse_config(raw, generation={}, source="conf")
    assert all(name in str(error.value) for name in FAMILIES)


def test_a_window_that_is_left_out_is_that_of_transformers() -> None:
    raw = tiny_raw("mistral", sliding_window="left out")
    assert parse_config(raw, generation={}, source="conf").sliding_window == 4096


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_engine_refuses_lengths_beyond_a_sliding_window(tmp_path: Path, role: str) -> None:
    save_model(tmp_path / "windowed", "mistral", sliding_window=40)
    save_model(tmp_path / "other", "llama")
    windowed, other = (load(tmp_path / name).model for name in ("windowed", "other"))
    target, draft = (windowed, None) if role == "target" else (other, windowed)
    k = 0 if draft is None else 1

    def start(length: int) -> Engine:
        config = EngineConfig(max_model_len=length, num_pages=64, num_draft_tokens=k)
        return Engine(target, config=config, draft=draft)

    with pytest.raises(ValueError, match=rf"max_model_len=41: the {role} has sliding_window=40"):
        start(41)
    start(40)


def test_up_to_its_window_a_windowed_model_is_transformers_and_beyond_it_is_not(
    tmp_path: Path,
) -> None:
    hf = save_model(tmp_path / "model", "mistral", sliding_window=20, num_hidden_layers=LAYERS)
    model, table = load(tmp_path / "model").model, make_table()
    ids = random_ids(24, seed=4)
    batch = make_batch(table, [table.acquire_row()], [ids], [0])
    got = layers_of(model.tapped(range(1, LAYERS)).forward(batch, table, model.new_pool(4096)))
    wanted = every_layer(hf, ids)
    assert worst(got[:, :20], wanted[:, :20]) < 1e-4
    assert worst(got[:, 20:], wanted[:, 20:]) > 1e-3


def test_one_plus_w_norms_are_the_others_with_weights_less_one(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen3")
    plain = load(tmp_path / "model")
    states = []
    for form, moved in (("w", 0.0), ("1+w", 1.0)):
        config: ModelConfig = replace(plain.config, norm_form=form)
        model = LlamaModel(
            config,
            reader(tmp_path / "model", config, moved),
            backend=SdpaBackend(),
            ops=TorchOps(),
            dtype=torch.float32,
            device=CPU,
            group=SingleProcessGroup(CPU),
        )
        table = make_table()
        batch = make_batch(table, [table.acquire_row()], [random_ids(9, seed=5)], [0])
        states.append(model.forward(batch, table, model.new_pool(4096)))
    assert relative_error(states[1], states[0]) < 1e-5


def reader(path: Path, config: ModelConfig, moved: float) -> TensorSource:
    checkpoint = Checkpoint(path, config.tensor_shapes(), tied=False)

    def take(name: str) -> torch.Tensor:
        tensor = checkpoint.read(name, dtype=torch.float32, device=CPU)
        return tensor - moved if "norm" in name else tensor

    return take


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_speculation_with_a_head_of_the_targets_kind_changes_no_token(
    family: str, num_layers: int, tmp_path: Path
) -> None:
    target = tiny_target(tmp_path, family=family)
    head = random_head(target, num_layers=num_layers)
    parts = {"qwen2": LayerParts(qkv_bias=True), "qwen3": LayerParts(qk_norm=True)}
    assert head.spec.layer_parts == parts.get(family, LayerParts())  # type: ignore[attr-defined]
    for temperature in (0.0, 0.9):
        requests = make_requests(6, temperature=temperature, ignore_eos=True)
        plain = run_stepwise(make_engine(target), requests)
        for k in (1, 3):
            checked: list[int] = []

            def check(engine: Engine, counts: list[int] = checked) -> None:
                counts.append(check_draft_state(engine))

            engine = make_engine(target, head, num_draft_tokens=k)
            got = run_stepwise(engine, requests, late=True, after_step=check)
            assert got == plain
            assert sum(checked) > 20
        generations = make_engine(target, head, num_draft_tokens=3).generate(requests)
        assert any(step.num_accepted for one in generations for step in one.steps)


def test_what_a_head_leaves_out_changes_its_drafts(tmp_path: Path) -> None:
    """Otherwise equal tokens would say nothing of biases and head norms."""
    target = tiny_target(tmp_path, family="qwen3")
    requests = [Request("a", tuple(random_ids(20, seed=6, vocab_size=11)))]
    drafts = []
    for parts in (LayerParts(), LayerParts(qk_norm=True), LayerParts(True, True, True, True)):
        head = random_head(target, layer_parts=parts)
        (rows,) = make_engine(target, head, num_draft_tokens=1).forward_draft(
            [requests[0].prompt_ids]
        )
        drafts.append(rows.draft_TD)
    assert relative_error(drafts[0], drafts[1]) > 1e-2
    assert relative_error(drafts[1], drafts[2]) > 1e-2
