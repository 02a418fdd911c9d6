"""Ways to damage an exported directory, by name, and what the check says about each.

A tamper changes ``config.json`` or ``model.safetensors`` as a careless script or a broken copy
would, and leaves ``export.json`` alone. They need nothing but the directory, so that a serving
engine can be shown the same damage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYER = "model.mtp_layers.0."
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tamper:
    """``apply`` changes the directory in place; ``named`` is what a refusal must contain."""

    apply: Callable[[Path], None]
    named: str


def with_config(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        file = directory / "config.json"
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))

    return apply


def with_tensors(change: Callable[[Tensors], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        file = directory / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return apply


def scale_theta(config: dict[str, Any]) -> None:
    config["rope_theta"] *= 10
    config["rope_parameters"]["rope_theta"] *= 10


def poison(tensors: Tensors) -> None:
    tensors[LAYER + "mlp.down_proj.weight"][1, 2] = torch.nan


def other_embedding(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * 2


def cut_file(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def find(tensors: Tensors, suffix: str) -> str:
    """The one name that ends so."""
    (name,) = (name for name in tensors if name.endswith(suffix))
    return name


def without(suffix: str) -> Callable[[Path], None]:
    return with_tensors(lambda t: void(t.pop(find(t, suffix))))


def with_swapped_halves(suffix: str) -> Callable[[Path], None]:
    def swap(tensors: Tensors) -> None:
        name = find(tensors, suffix)
        left, right = tensors[name].chunk(2, dim=1)
        tensors[name] = torch.cat((right, left), dim=1)

    return with_tensors(swap)


def ids_for_offsets(tensors: Tensors) -> None:
    """Modulo the vocabulary, or an engine would index beyond it."""
    count = torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = (tensors["d2t"] + 2 * count) % len(tensors["t2d"]) - count


def scale_every_theta(config: dict[str, Any]) -> None:
    for part in (config, config.get("transformer_layer_config", {})):
        for place in (part, part.get("rope_parameters") or {}):
            if "rope_theta" in place:
                place["rope_theta"] *= 10


def tie(config: dict[str, Any]) -> None:
    config.get("transformer_layer_config", config)["tie_word_embeddings"] = True


INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": [],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "dynamic": True,
                "symmetric": True,
            },
        }
    },
}


def tampers_of(*, linear: str, norm: str, joined: str, has_list: bool) -> dict[str, Tamper]:
    """For a layout whose tensors end in these names; ``joined`` takes two inputs side by side."""
    found = {
        "missing_linear": Tamper(without(linear), f"{linear} ["),
        "missing_norm": Tamper(without(norm), f"{norm} ["),
        "swapped_concatenation": Tamper(
            with_swapped_halves(joined), f"{joined} has its column halves exchanged"
        ),
        "ids_for_offsets": Tamper(with_tensors(ids_for_offsets), "tensor t2d does not mark"),
        "theta": Tamper(with_config(scale_every_theta), "rope_theta"),
        "tie_flag": Tamper(with_config(tie), "tie_word_embeddings"),
        "quantisation_scope": Tamper(
            with_config(lambda c: c.update(quantization_config=INT8)),
            "quantization_config=",
        ),
    }
    if not has_list:
        del found["ids_for_offsets"]
    return found


_EAGLE3 = {
    "linear": "mlp.up_proj.weight",
    "norm": "layers.0.hidden_norm.weight",
    "joined": "self_attn.q_proj.weight",
}
# Of the other layouts: what PARITY asks of each.
TAMPERS_OF: Mapping[str, Mapping[str, Tamper]] = MappingProxyType(
    {
        "eagle": tampers_of(
            linear="mlp.up_proj.weight",
            norm="post_attention_layernorm.weight",
            joined="fc.weight",
            has_list=False,
        ),
        "eagle3": tampers_of(**_EAGLE3, has_list=True),
        "speculators": tampers_of(**_EAGLE3, has_list=True),
        "deepseek": tampers_of(
            linear="mlp.experts.1.up_proj.weight",
            norm="hnorm.weight",
            joined="eh_proj.weight",
            has_list=False,
        ),
    }
)


TAMPERS: Mapping[str, Tamper] = MappingProxyType(
    {
        "missing_linear": Tamper(
            with_tensors(lambda t: void(t.pop(LAYER + "mlp.up_proj.weight"))),
            f"tensor {LAYER}mlp.up_proj.weight",
        ),
        "missing_norm": Tamper(
            with_tensors(lambda t: void(t.pop(LAYER + "hidden_layernorm.weight"))),
            f"tensor {LAYER}hidden_layernorm.weight",
        ),
        "missing_projection": Tamper(
            with_tensors(lambda t: void(t.pop(LAYER + "input_proj.weight"))),
            f"tensor {LAYER}input_proj.weight",
        ),
        "dropped_bias": Tamper(
            with_tensors(lambda t: void(t.pop(LAYER + "self_attn.k_proj.bias"))),
            f"tensor {LAYER}self_attn.k_proj.bias",
        ),
        "random_bias": Tamper(
            with_tensors(lambda t: void(t[LAYER + "self_attn.q_proj.bias"].add_(0.5))),
            f"tensor {LAYER}self_attn.q_proj.bias is not zero",
        ),
        "swapped_concatenation": Tamper(
            with_swapped_halves("input_proj.weight"),
            f"tensor {LAYER}input_proj.weight has its column halves exchanged",
        ),
        "extra_tensor": Tamper(
            with_tensors(lambda t: t.update({LAYER + "extra.weight": torch.ones(2)})),
            f"unexpected tensor {LAYER}extra.weight",
        ),
        "nan": Tamper(with_tensors(poison), f"tensor {LAYER}mlp.down_proj.weight has 1 values"),
        "scaled_norm": Tamper(
            with_tensors(lambda t: void(t[LAYER + "final_layernorm.weight"].mul_(2))),
            f"tensor {LAYER}final_layernorm.weight",
        ),
        "other_embedding": Tamper(with_tensors(other_embedding), "model.embed_tokens.weight"),
        "missing_lm_head": Tamper(
            with_tensors(lambda t: void(t.pop("lm_head.weight"))), "tensor lm_head.weight"
        ),
        "truncated_file": Tamper(cut_file, "model.safetensors: damaged"),
        "theta": Tamper(with_config(scale_theta), "rope_theta="),
        "theta_in_one_notation": Tamper(
            with_config(lambda c: void(c["rope_parameters"].update(rope_theta=1.0))),
            "rope_parameters=",
        ),
        "eps": Tamper(with_config(lambda c: c.update(rms_norm_eps=1e-3)), "rms_norm_eps=0.001"),
        "tie_flag": Tamper(
            with_config(lambda c: c.update(tie_word_embeddings=True)), "tie_word_embeddings=true"
        ),
        "short_max_position": Tamper(
            with_config(lambda c: c.update(max_position_embeddings=64)),
            "max_position_embeddings=64",
        ),
        "wrong_architecture": Tamper(
            with_config(lambda c: c.update(architectures=["Qwen2ForCausalLM"])), "architectures="
        ),
        "wrong_layer_count": Tamper(
            with_config(lambda c: c.update(num_hidden_layers=1)), "num_hidden_layers=1"
        ),
        "no_module_count": Tamper(
            with_config(lambda c: void(c.pop("num_nextn_predict_layers"))),
            "num_nextn_predict_layers is missing",
        ),
        "unknown_key": Tamper(with_config(lambda c: c.update(bias=True)), "bias=true"),
    }
)


def void(_: object) -> None:
    """For lambdas whose value nobody wants."""
