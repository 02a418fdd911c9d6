"""A quantised copy of a target, written by the ``compressed-tensors`` library, for tests and demos.

Weights are rounded to the nearest of 256 values with the largest magnitude of a row (or tensor) at
the end of the range; nothing is calibrated, so what rounds inputs finds their range as they come.
For a model that is to be served well take a calibrated checkpoint instead.

    python -m mtp_train.quantise --target smollm2-135m-instruct --scheme int8-w8a8 --out runs/int8

Needs the extra ``quantised``. The whole model is held in memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from runtime.files import write_atomic
from runtime.models.checkpoint import weight_files
from runtime.models.config import load_config
from runtime.models.loader import default_cache_dir, resolve_target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenScheme:
    """Fields of the library's ``QuantizationArgs`` beside eight bits. ``inputs``: how they are
    rounded, with a range of their own; ``None``: they are not.
    """

    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None


_INT_ROWS: Mapping[str, Any] = MappingProxyType({"type": "int", "strategy": "channel"})
_FP8_ROWS: Mapping[str, Any] = MappingProxyType({"type": "float", "strategy": "channel"})
SCHEMES: Mapping[str, WrittenScheme] = MappingProxyType(
    {
        "int8-w8a16": WrittenScheme(_INT_ROWS),
        "int8-w8a8": WrittenScheme(_INT_ROWS, {"type": "int", "strategy": "token"}),
        "fp8-w8a16": WrittenScheme(_FP8_ROWS),
        "fp8-w8a8": WrittenScheme(_FP8_ROWS, {"type": "float", "strategy": "token"}),
        "fp8-tensor-w8a8": WrittenScheme(
            {"type": "float", "strategy": "tensor"}, {"type": "float", "strategy": "tensor"}
        ),
    }
)


def quantise_target(source: Path, out: Path, scheme: WrittenScheme) -> None:
    """Write ``out``, which must not exist and appears whole; what is no weight is copied.

    All linears of decoder layers are quantised. ``ignore`` also names the layers behind the last
    one, where vLLM files a draft head of the MTP layouts: it would take the head for a quantised
    one. Raises ``ValueError`` where the library is missing or the target is quantised already.
    """
    if out.exists():
        raise ValueError(f"out={out}: exists; name a directory that does not")
    config = load_config(source)
    if config.quantisation is not None:
        raise ValueError(f"{source}: is quantised already ({config.quantisation.label})")
    try:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationScheme,
            apply_quantization_config,
        )
    except ImportError as error:
        raise ValueError(
            "compressed-tensors is not installed: pip install 'mtp-train[quantised]'"
        ) from error
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    group = QuantizationScheme(targets=["Linear"], **_arguments(scheme))
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    )
    for module in model.modules():
        if getattr(getattr(module, "quantization_scheme", None), "weights", None) is not None:
            _find_range(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    staged = out.with_name(f".{out.name}.staged")
    shutil.rmtree(staged, ignore_errors=True)
    weights = {file.name for file in weight_files(source)} | {"model.safetensors.index.json"}
    shutil.copytree(source, staged, ignore=lambda _, names: [n for n in names if n in weights])
    written = staged / ".written"
    model.save_pretrained(written)
    compressor.update_config(str(written))
    stated = json.loads((written / "config.json").read_text())["quantization_config"]
    for file in written.glob("*.safetensors*"):
        file.rename(staged / file.name)
    shutil.rmtree(written)
    stated["ignore"] = ["lm_head", draft_layers_pattern(config.num_layers)]
    raw = json.loads((source / "config.json").read_text())
    raw["quantization_config"] = stated
    write_atomic(staged / "config.json", json.dumps(raw, indent=2) + "\n")
    staged.rename(out)


def draft_layers_pattern(num_layers: int) -> str:
    """Of names of the layer behind the last one, for ``ignore``."""
    return rf"re:model\.layers\.{num_layers}\..*"


def _arguments(scheme: WrittenScheme) -> dict[str, Any]:
    from compressed_tensors.quantization import QuantizationArgs

    found = {"weights": QuantizationArgs(num_bits=8, dynamic=False, **scheme.weights)}
    if scheme.inputs is not None:
        found["input_activations"] = QuantizationArgs(num_bits=8, dynamic=True, **scheme.inputs)
    return found


def _find_range(module: Any) -> None:
    """Set scales and zero points of a linear's weight from its smallest and largest values."""
    from compressed_tensors.quantization.utils import calculate_qparams

    weight_OI = module.weight.detach().float()
    arguments = module.quantization_scheme.weights
    if arguments.strategy == "tensor":
        low, high = torch.aminmax(weight_OI)
    elif arguments.strategy == "group":
        groups_OGI = weight_OI.unflatten(1, (-1, arguments.group_size))
        low, high = groups_OGI.amin(2), groups_OGI.amax(2)
    else:
        low, high = weight_OI.amin(1, keepdim=True), weight_OI.amax(1, keepdim=True)
    scale, zero_point = calculate_qparams(low, high, arguments)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if not arguments.symmetric:
        module.weight_zero_point.data.copy_(zero_point.reshape(module.weight_zero_point.shape))


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m mtp_train.quantise")
    parser.add_argument("--target", required=True, help="directory, .gguf file or built-in name")
    parser.add_argument("--scheme", required=True, choices=tuple(SCHEMES))
    parser.add_argument("--out", required=True, type=Path, help="directory of the new target")
    given = parser.parse_args(arguments)
    try:
        source = resolve_target(given.target, cache_dir=default_cache_dir())
        given.out.parent.mkdir(parents=True, exist_ok=True)
        quantise_target(source, given.out, SCHEMES[given.scheme])
    except ValueError as error:
        parser.error(str(error))
    logger.info("%s: %s", given.out, given.scheme)


if __name__ == "__main__":
    main()
