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
from runtime.models.config import load_config

_LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def vllm_layout_for(format: str, target: Path) -> EngineLayout:
    """:func:`vllm_layout`, with what a quantised target in ``target`` needs besides."""
    told = vllm_layout(format)
    if not told.hf_overrides:
        return told
    return replace(told, hf_overrides={**told.hf_overrides, **_plain_draft_layer(target)})


def _plain_draft_layer(target: Path) -> dict[str, Any]:
    """``quantization_config`` with the layer behind the target's last one left out, where it is not
    left out already.
    """
    config = load_config(target)
    layer, quantisation = f"model.layers.{config.num_layers}.", config.quantisation
    if quantisation is None or quantisation.scheme_of(f"{layer}{_LINEARS[0]}.weight") is None:
        return {}
    stated = json.loads((target / "config.json").read_text())["quantization_config"]
    if quantisation.method == "compressed-tensors":
        key, names = "ignore", ["re:" + re.escape(layer) + ".*"]
    else:
        key, names = "ignored_layers", [layer + name for name in _LINEARS]
    return {"quantization_config": stated | {key: [*(stated.get(key) or []), *names]}}
