"""Quantised copies of tiny models, written by hand: what they stand for is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from runtime.models.quantisation import read_quantisation

FP8 = torch.float8_e4m3fn
INT8_ROWS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def stated(**changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": INT8_ROWS, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group | changes.pop("group", {})},
        "ignore": ["lm_head"],
        **changes,
    }


def write_quantised(path: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Quantise the linears of a saved model by rows in place; what they stand for."""
    file = path / "model.safetensors"
    quantisation = read_quantisation({"quantization_config": config}, "test")
    assert quantisation is not None
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        scheme = quantisation.scheme_of(name) if tensor.ndim == 2 else None
        if scheme is None:
            stored[name] = meant[name] = tensor
            continue
        is_fp8 = scheme.weights.kind == "fp8"
        scale = tensor.abs().amax(1, keepdim=True) / (448 if is_fp8 else 127)
        steps = tensor / scale
        stored[name] = steps.to(FP8) if is_fp8 else steps.round().to(torch.int8)
        stored[name + "_scale"] = scale
        meant[name] = stored[name].float() * scale
    save_file(stored, file, {"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return meant
