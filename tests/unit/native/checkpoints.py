"""Tiny random checkpoints that hold MTP weights, under the names that are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.unit.runtime.engine_fixtures import VOCAB
from tests.unit.runtime.model_fixtures import OWN, SMALL, save_model

# Of one module, behind `model.layers.61.`: DeepSeek-V3's index, experts aside.
DEEPSEEK_NAMES = (
    "embed_tokens.weight",
    "enorm.weight",
    "hnorm.weight",
    "eh_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_a_proj.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
    "shared_head.norm.weight",
    "shared_head.head.weight",
)
MIMO_NAMES = (
    "token_layernorm.weight",
    "hidden_layernorm.weight",
    "input_proj.weight",
    "final_layernorm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.weight",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.weight",
    "self_attn.v_proj.bias",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


def rewrite_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def add_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = path / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


def random_module(
    path: Path, names: tuple[str, ...], prefix: str, *, like: str, seed: int = 5
) -> dict[str, torch.Tensor]:
    """Values for a module whose block is shaped as the layer ``like`` of the checkpoint."""
    stored, width = load_file(path / "model.safetensors"), SMALL["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    module = {}
    experts = [
        name.removeprefix(like)
        for name in stored
        if name.startswith(like + "mlp.experts.") and "mlp.gate.weight" in names
    ]
    for name in (*names, *experts):
        if like + name in stored:
            shape = stored[like + name].shape
        else:
            shape = torch.Size([width, 2 * width] if "proj" in name else [width])
        values = torch.randn(shape, generator=generator) * 0.3
        module[prefix + name] = values + 1.0 if "norm" in name else values
    return module


def save_deepseek(path: Path, family: str = "deepseekv3", **overrides: Any) -> dict[str, Any]:
    """A target with its own MTP module; returns the module's tensors, named as in the file."""
    save_model(path, family, **{"vocab_size": VOCAB, "rms_norm_eps": 1e-6, **overrides})
    layers = SMALL["num_hidden_layers"]
    prefix, like = f"model.layers.{layers}.", f"model.layers.{layers - 1}."
    has_rank = OWN[family]["q_lora_rank"] is not None
    left_out = [n for n in DEEPSEEK_NAMES if "embed" in n or "shared_head.head" in n]
    if not has_rank:
        left_out += [n for n in DEEPSEEK_NAMES if ".q_" in n]
    if family == "deepseekv2":
        left_out.append("mlp.gate.e_score_correction_bias")
    names = [name for name in DEEPSEEK_NAMES if name not in left_out]
    names += [] if has_rank else ["self_attn.q_proj.weight"]
    module = random_module(path, tuple(names), prefix, like=like)
    add_tensors(path, module)
    share_vocabulary(path, prefix)
    rewrite_config(path, num_nextn_predict_layers=1)
    return module


def share_vocabulary(path: Path, prefix: str) -> None:
    stored = load_file(path / "model.safetensors")
    copies = {
        prefix + "embed_tokens.weight": stored["model.embed_tokens.weight"].clone(),
        prefix + "shared_head.head.weight": stored["lm_head.weight"].clone(),
    }
    add_tensors(path, copies)


def save_mimo(path: Path) -> dict[str, torch.Tensor]:
    """Qwen2's decoder under MiMo's name, with its MTP module."""
    save_model(path, "qwen2", vocab_size=VOCAB)
    module = random_module(path, MIMO_NAMES, "model.mtp_layers.0.", like="model.layers.1.")
    add_tensors(path, module)
    rewrite_config(
        path, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1
    )
    return module
