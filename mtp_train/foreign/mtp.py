"""MTP heads with a dense layer: MiMo layout, speculators, DeepSeek's names around a plain layer.

One arithmetic, three sets of names, and two orders in front of the projection: the hidden state
comes first in MiMo's, the embedding in the others. The contract is that of
:mod:`mtp_train.export.layouts.mimo`. A head may lie in its target's checkpoint, beside the target's
own tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from mtp_train.config import HeadFormat
from mtp_train.export.layouts import LAYOUTS
from mtp_train.export.layouts.base import TARGET_EMBEDDING, TARGET_LM_HEAD
from mtp_train.export.layouts.mimo import PREFIX, bias_shapes
from mtp_train.foreign.contract import Contract, Shape
from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.findings import Finding
from mtp_train.foreign.mtp_sparse import deepseek_block, is_sparse
from mtp_train.foreign.reading import (
    Copy,
    FormatReader,
    Given,
    Reading,
    common_facts,
    join_reasons,
    layer_block,
)
from mtp_train.foreign.recognise import in_target
from mtp_train.foreign.sizes import Sizes, read_sizes
from runtime.head_spec import HeadSpec
from runtime.layer_parts import PLAIN_LAYER, LayerParts

Order = Literal["embedding_hidden", "hidden_embedding"]
_BLOCK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_DEEPSEEK: Mapping[str, str] = MappingProxyType(
    {
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "shared_head.norm.weight": "final_layernorm.weight",
    }
)


@dataclass(frozen=True)
class _Names:
    """How a format names things: ``prefix`` of module 0, and its own names -> MiMo's behind it."""

    prefix: str
    own: Mapping[str, str]
    order: Order
    masks_first: bool
    copies: tuple[Copy, ...]


class MtpReader(FormatReader):
    """``format``: which of the three sets of names."""

    def __init__(self, format: HeadFormat) -> None:
        self._format = format

    def read(self, files: HeadFiles, given: Given) -> Reading:
        block, source = layer_block(files.config)
        sizes, findings = read_sizes(block, source=source)
        if sizes is None:
            return Reading(findings=tuple(findings), why_not="sizes are missing")
        names = self._names(files)
        own = [name for name in files.headers if name.startswith(names.prefix)]
        ignored = frozenset(name for name in files.headers if name not in own and in_target(files))
        modules = _count_modules(files, self._format)
        findings += _module_findings(files, block, self._format, names, modules)
        order = given.choices.concat if given.choices.concat != "auto" else names.order
        masks = given.choices.first_embedding_mask
        parts = _parts(files, names)
        sparse = is_sparse(own)
        spec = HeadSpec(
            kind="mtp",
            **sizes.spec_fields(),
            concat=order,
            first_embedding_mask=names.masks_first if masks == "auto" else masks,
            layer_parts=parts,
        )
        if sparse:
            required = _sparse_shapes(files, sizes, names)
        else:
            required = self._dense_shapes(spec, files, names)
        optional: dict[str, Shape] = {
            copy.name: (sizes.vocab_size, sizes.hidden_size) for copy in names.copies
        }
        why_not = _why_not(sizes, sparse, modules)
        there = tuple(copy for copy in names.copies if copy.name in files.headers)
        return Reading(
            contract=Contract(required, optional, ignored),
            spec=None if why_not else spec,
            why_not=why_not,
            facts=(
                ("reads", "g of the target, behind its final norm, and the next token's embedding"),
                ("projection", f"{order.replace('_', ' first, then ')}"),
                (
                    "position 0",
                    "its embedding is zeroed" if spec.first_embedding_mask else "as any",
                ),
                ("layer", sparse or str(parts)),
                ("modules", str(modules)),
                *common_facts(files, sizes),
                ("lies", "in the target's checkpoint" if in_target(files) else "alone"),
            ),
            findings=tuple(findings),
            copies=there,
            reads_width=sizes.hidden_size,
            sizes=sizes,
        )

    def native_tensors(
        self, spec: HeadSpec, files: HeadFiles, given: Given
    ) -> dict[str, torch.Tensor]:
        names = self._names(files)
        written = {
            _to_mimo(names, name): files.read(name)
            for name in files.headers
            if name.startswith(names.prefix)
        }
        return LAYOUTS["mimo"].from_layout(spec, written)

    def _names(self, files: HeadFiles) -> _Names:
        if self._format == "deepseek_mtp":
            prefix = _deepseek_prefix(files)
            copies = (
                Copy(prefix + "embed_tokens.weight", TARGET_EMBEDDING),
                Copy(prefix + "shared_head.head.weight", TARGET_LM_HEAD),
            )
            return _Names(prefix, _DEEPSEEK, "embedding_hidden", True, copies + _top_copies(files))
        if self._format == "speculators_mtp":
            copies = (
                Copy("embed_tokens.weight", TARGET_EMBEDDING),
                Copy(TARGET_LM_HEAD, TARGET_LM_HEAD),
            )
            return _Names("mtp_layers.0.", {}, "embedding_hidden", False, copies)
        return _Names(PREFIX, {}, "hidden_embedding", True, _top_copies(files))

    def _dense_shapes(self, spec: HeadSpec, files: HeadFiles, names: _Names) -> dict[str, Shape]:
        layout = LAYOUTS["mimo"]
        shapes = layout.tensor_shapes(spec)
        for name in layout.copies:
            shapes.pop(name, None)
        if self._format != "mimo":  # its biases are always parameters
            for name in bias_shapes(spec):
                shapes.pop(name, None)
        back = {mimo: own for own, mimo in names.own.items()}
        return {
            names.prefix + back.get(tail, tail): shape
            for name, shape in shapes.items()
            for tail in (name.removeprefix(PREFIX),)
        }


def _to_mimo(names: _Names, name: str) -> str:
    tail = name.removeprefix(names.prefix)
    return PREFIX + names.own.get(tail, tail)


def _top_copies(files: HeadFiles) -> tuple[Copy, ...]:
    """In a target's checkpoint these are the target's own."""
    if in_target(files):
        return ()
    return (Copy(TARGET_EMBEDDING, TARGET_EMBEDDING), Copy(TARGET_LM_HEAD, TARGET_LM_HEAD))


def _deepseek_prefix(files: HeadFiles) -> str:
    """Of the first module."""
    numbers = sorted(
        int(found.group(1))
        for name in files.headers
        if (found := re.fullmatch(r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm)\.weight", name))
    )
    return f"model.layers.{numbers[0] if numbers else 0}."


def _count_modules(files: HeadFiles, format: HeadFormat) -> int:
    pattern = {
        "mimo": r"model\.mtp_layers\.(\d+)\.",
        "speculators_mtp": r"mtp_layers\.(\d+)\.",
        "deepseek_mtp": r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm)\.",
    }[format]
    found = {match.group(1) for name in files.headers if (match := re.match(pattern, name))}
    return len(found)


def _module_findings(
    files: HeadFiles,
    block: Mapping[str, object],
    format: HeadFormat,
    names: _Names,
    modules: int,
) -> list[Finding]:
    findings = []
    stated = files.config.get("num_nextn_predict_layers", block.get("num_nextn_predict_layers"))
    if stated != modules and format != "speculators_mtp":
        findings.append(
            Finding(
                "error",
                "module-count",
                "num_nextn_predict_layers",
                "missing" if stated is None else str(stated),
                str(modules),
                "write it: vLLM builds as many modules as it says",
            )
        )
    if format == "deepseek_mtp":
        number, layers = int(names.prefix.split(".")[2]), block.get("num_hidden_layers")
        if number != layers and not (number == 0 and layers == 1):
            findings.append(
                Finding(
                    "error",
                    "module-index",
                    names.prefix,
                    f"num_hidden_layers {layers}",
                    f"model.layers.{layers}. (the number of the target's layers)",
                    "engines look for the module behind the target's last layer",
                )
            )
        findings.append(
            Finding(
                "note",
                "first-embedding",
                names.prefix,
                "nothing says whether position 0 keeps its embedding",
                "",
                "vLLM zeroes it, SGLang does not; it is read as in vLLM, "
                "foreign.first_embedding_mask=false says otherwise",
            )
        )
    return findings


def _parts(files: HeadFiles, names: _Names) -> LayerParts:
    """Biases that are all zero are none: some layouts always have them."""
    biases = [f"{names.prefix}self_attn.{part}_proj.bias" for part in "qkv"]
    there = [name for name in biases if name in files.headers]
    return replace(
        PLAIN_LAYER,
        qkv_bias=any(bool(files.read(name).any()) for name in there),
        qk_norm=any(names.prefix + name in files.headers for name in _BLOCK_NORMS),
    )


def _sparse_shapes(files: HeadFiles, sizes: Sizes, names: _Names) -> dict[str, Shape]:
    """DeepSeek's own layer, or nothing but the module's norms where it cannot be told."""
    width = sizes.hidden_size
    shapes: dict[str, Shape] = {
        names.prefix + "enorm.weight": (width,),
        names.prefix + "hnorm.weight": (width,),
        names.prefix + "eh_proj.weight": (width, 2 * width),
        names.prefix + "shared_head.norm.weight": (width,),
    }
    number = int(names.prefix.split(".")[2])
    block = deepseek_block(files.config, number)
    if block is None:
        own = {n: h.shape for n, h in files.headers.items() if n.startswith(names.prefix)}
        return {**own, **shapes}
    return shapes | {names.prefix + name: shape for name, shape in block.items()}


def _why_not(sizes: Sizes, sparse: str, modules: int) -> str:
    return join_reasons(
        (
            bool(sparse),
            f"its layer has {sparse}: read from the target's own checkpoint (head.init=native) or "
            "from a directory with its export.json",
        ),
        (modules > 1, f"it has {modules} modules, one per step; heads here have one"),
        (sizes.rope is None, f"RoPE: {sizes.rope_note}"),
    )
