"""What vLLM is told of a quantised target, so that the head stays what it is: plain.

vLLM files a head of the MTP layouts as the layer behind the target's last one, and looks up there
how it is quantised. Unless ``ignore`` names that layer, linears of a plain head are taken for
quantised ones. Heads of other layouts go by the ``config.json`` of their own directory, which says
nothing of quantisation.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtp_train.serving.job import EngineLayout, vllm_layout
from runtime.models.config import ModelConfig, load_config

_MLP = ("gate_proj", "up_proj", "down_proj")


def vllm_layout_for(format: str, target: Path) -> EngineLayout:
    """:func:`vllm_layout`, with what a quantised target in ``target`` needs besides."""
    told = vllm_layout(format)
    if not told.hf_overrides:
        return told
    return replace(told, hf_overrides={**told.hf_overrides, **plain_draft_layer(target)})


def plain_draft_layer(target: Path, *, stored: str = "") -> dict[str, Any]:
    """``quantization_config`` of ``config.json`` with the layer behind the target's last one left
    out, where it is not left out already.

    ``stored``: what names of a checkpoint that holds the layer begin with. ``compressed-tensors``
    goes by names, whatever dtype a weight has, so that these are left out as well.
    """
    config = load_config(target)
    layer, quantisation = f"model.layers.{config.num_layers}.", config.quantisation
    linears = _linears(config)
    if quantisation is None:
        return {}
    by_name = quantisation.method == "compressed-tensors"
    prefixes = [
        prefix
        for prefix in dict.fromkeys((layer, stored if by_name and stored else layer))
        if quantisation.scheme_of(f"{prefix}{linears[0]}.weight") is not None
    ]
    if not prefixes:
        return {}
    stated = json.loads((target / "config.json").read_text())["quantization_config"]
    names = [layer + name for name in linears]
    if by_name:
        key, names = "ignore", ["re:" + re.escape(prefix) + ".*" for prefix in prefixes]
    elif stated.get("modules_to_not_convert") and not stated.get("ignored_layers"):
        key = "modules_to_not_convert"  # vLLM reads it where the other key names nothing
    else:
        key = "ignored_layers"
    kept = [name for name in stated.get(key) or [] if name not in names]
    return {"quantization_config": stated | {key: [*kept, *names]}}


def _linears(config: ModelConfig) -> list[str]:
    """Of the draft layer, as vLLM looks them up in ``ignored_layers``: parts of fused linears by
    themselves, routed experts as one.
    """
    latent = config.latent
    if latent is None:
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    else:
        queries = ["q_a_proj", "q_b_proj"] if latent.query_rank else ["q_proj"]
        attention = [*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    mlp = list(_MLP)  # also beside targets with experts: MiMo's layer is dense
    if config.experts is not None:
        mlp += ["experts", *(f"shared_experts.{name}" for name in _MLP)]
    return [f"self_attn.{name}" for name in attention] + [f"mlp.{name}" for name in mlp]
