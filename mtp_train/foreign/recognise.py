"""Which format a directory is in, from names of tensors and keys of ``config.json``.

``config.json`` alone does not tell: ``LlamaForCausalLM`` is written into EAGLE-1 heads, and an MTP
head lies in a target's checkpoint under the target's own architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mtp_train.config import HeadFormat
from mtp_train.foreign.files import HeadFiles

_SPECULATORS: Mapping[str, HeadFormat] = MappingProxyType(
    {
        "eagle": "speculators_eagle",
        "eagle3": "speculators_eagle3",
        "peagle": "peagle",
        "dflash": "dflash",
        "dflash2": "dflash",
        "dspark": "dspark",
        "mtp": "speculators_mtp",
    }
)
_DEEPSEEK_NAME = re.compile(r"model\.layers\.\d+\.(enorm|hnorm|eh_proj)\.weight")
_MEDUSA_NAME = re.compile(r"(blocks\.\d+\.layers\.\d+|(medusa_heads?\.)?\d+\.\d+\.linear)\.weight")
_MLP_SPECULATOR_NAME = re.compile(r"(speculator\.)?(emb|proj|head|ln)\.\d+\.weight")
TARGET_LAYER = re.compile(r"(model\.|language_model\.model\.)layers\.0\.self_attn\.\w+\.weight")


@dataclass(frozen=True)
class Recognised:
    """``evidence`` says what gave it away; ``writer`` what probably wrote it, empty if unknown."""

    format: HeadFormat
    evidence: str
    writer: str = ""
    in_target: bool = False  # lies in a target's checkpoint, beside the target's own tensors


def recognise(files: HeadFiles) -> Recognised | None:
    """``None`` for a directory that is none of the known formats."""
    for look in _LOOKS:
        found = look(files)
        if found is not None:
            return found
    return None


def in_target(files: HeadFiles) -> bool:
    """Whether the target's own layers are there as well."""
    return any(TARGET_LAYER.fullmatch(name) for name in files.headers)


def is_native_config(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` is one that ``mtp train`` writes."""
    return "target_fingerprint" in config and "kind" in config


def _native(files: HeadFiles) -> Recognised | None:
    if is_native_config(files.config):
        return Recognised("native", "config.json: kind, target_fingerprint", "mtp train")
    return None


def _speculators(files: HeadFiles) -> Recognised | None:
    stated = files.config.get("speculators_model_type")
    if not isinstance(stated, str) or stated not in _SPECULATORS:
        return None
    version = files.config.get("speculators_version")
    writer = f"speculators {version}" if version else "speculators"
    return Recognised(_SPECULATORS[stated], f"config.json: speculators_model_type={stated}", writer)


def _block_drafters(files: HeadFiles) -> Recognised | None:
    """DFlash and its relatives draft a block at once; their layers are no EAGLE layers."""
    marked = _first(files, lambda name: name.startswith(("markov_head.", "confidence_head.")))
    architecture = _architecture(files.config)
    if marked or "dspark" in architecture.lower():
        return Recognised("dspark", marked or f"config.json: {architecture}", _writer(files))
    is_named = "dflash" in architecture.lower() or files.config.get("model_type") == "dflash"
    if is_named or "dflash_config" in files.config:
        return Recognised("dflash", "config.json: architectures, dflash_config", _writer(files))
    if "mask_hidden" in files.headers or "peagle" in architecture.lower():
        evidence = "mask_hidden" if "mask_hidden" in files.headers else architecture
        return Recognised("peagle", evidence, _writer(files))
    return None


def _mtp(files: HeadFiles) -> Recognised | None:
    rules: tuple[tuple[HeadFormat, Callable[[str], bool]], ...] = (
        ("mimo", lambda name: name.startswith("model.mtp_layers.")),
        ("speculators_mtp", lambda name: name.startswith("mtp_layers.")),
        ("qwen_mtp", lambda name: name.startswith("mtp.")),
        ("deepseek_mtp", lambda name: _DEEPSEEK_NAME.fullmatch(name) is not None),
    )
    for format, is_one in rules:
        name = _first(files, is_one)
        if name:
            return Recognised(format, name, in_target=in_target(files))
    return None


def _medusa(files: HeadFiles) -> Recognised | None:
    name = _first(files, lambda name: _MEDUSA_NAME.fullmatch(name) is not None)
    is_stated = files.config.get("model_type") == "medusa" or "medusa_num_heads" in files.config
    if name or is_stated:
        is_vllm = name.startswith("blocks.") or files.config.get("model_type") == "medusa"
        writer = "in vLLM's names" if is_vllm else "Medusa's repository"
        return Recognised("medusa", name or "config.json: medusa_num_heads", writer)
    return None


def _mlp_speculator(files: HeadFiles) -> Recognised | None:
    name = _first(files, lambda name: _MLP_SPECULATOR_NAME.fullmatch(name) is not None)
    if name or files.config.get("model_type") == "mlp_speculator":
        return Recognised("mlp_speculator", name or "config.json: model_type")
    return None


def _eagle(files: HeadFiles) -> Recognised | None:
    architecture, names = _architecture(files.config), files.headers
    if any(name in names for name in ("fusion_fc.weight", "transformer.mlp.down_proj.weight")):
        return Recognised("speculators_eagle", "fusion_fc.weight", "speculators")
    signs = ("midlayer.", "layers.0.hidden_norm.", "d2t", "fc_norm.", "input_norm.")
    sign = _first(files, lambda name: name.startswith(signs))
    if sign or "eagle3" in architecture.lower():
        return Recognised("eagle3", sign or f"config.json: {architecture}", _writer(files))
    if "fc.weight" in names or "eagle" in architecture.lower():
        evidence = "fc.weight" if "fc.weight" in names else f"config.json: {architecture}"
        return Recognised("eagle", evidence, _writer(files))
    return None


_LOOKS = (_native, _speculators, _block_drafters, _mtp, _medusa, _mlp_speculator, _eagle)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _first(files: HeadFiles, is_one: Callable[[str], bool]) -> str:
    return next((name for name in sorted(files.headers) if is_one(name)), "")


def _writer(files: HeadFiles) -> str:
    if files.has_record:
        return "mtp export"
    version = files.config.get("_torchspec_version")
    if version is not None:
        return f"TorchSpec {version}"
    if any(name.startswith("midlayer.") for name in files.headers):
        return "in the names of EAGLE's repository, SGLang and SpecForge"
    if "auto_map" in files.config:
        return "SpecForge or the authors' repository"
    return ""
