"""What a checkpoint calls the tensors of its own MTP module: DeepSeek's names, and MiMo's.

DeepSeek-V3 and R1 keep module ``m`` as decoder layer ``num_hidden_layers + m``
(``model.layers.61.`` in V3 and R1; its ``README_WEIGHTS.md``), with copies of the embedding and of
``lm_head`` in it. MiMo has ``model.mtp_layers.m.`` without them, and its projection takes the
hidden state first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from runtime.models.config import ModelConfig

NativeLayout = Literal["deepseek", "mimo"]

_BLOCK = "layers.0."
_RENAMED: Mapping[NativeLayout, Mapping[str, str]] = MappingProxyType(
    {
        "deepseek": MappingProxyType({"norm.weight": "shared_head.norm.weight"}),
        "mimo": MappingProxyType(
            {
                "enorm.weight": "token_layernorm.weight",
                "hnorm.weight": "hidden_layernorm.weight",
                "eh_proj.weight": "input_proj.weight",
                "norm.weight": "final_layernorm.weight",
            }
        ),
    }
)
# Of DeepSeek's module, behind its prefix -> the target's tensor that it is a copy of.
SHARED_COPIES: Mapping[str, str] = MappingProxyType(
    {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    }
)


def layout_of(target: ModelConfig) -> NativeLayout:
    return "mimo" if target.architecture == "MiMoForCausalLM" else "deepseek"


def deepseek_prefix(num_target_layers: int) -> str:
    """Of the first module, behind that many layers."""
    return f"model.layers.{num_target_layers}."


def stored_name(name: str, *, layout: NativeLayout, prefix: str) -> str:
    """The checkpoint's name of a tensor of a head of one layer, named as ``HeadSpec`` does."""
    return prefix + _RENAMED[layout].get(name, name.removeprefix(_BLOCK))
