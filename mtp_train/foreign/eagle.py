"""EAGLE-1 directories: of the authors, for vLLM, for SGLang, and in the speculators format.

One contract for all of them, that of :mod:`mtp_train.export.layouts.eagle`; the speculators format
names things differently. Some heads have the two norms that the published one lacks (vLLM's Mistral
class): they compute what our MTP kind without its first two norms does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mtp_train.export.layouts import LAYOUTS
from mtp_train.export.layouts.base import TARGET_EMBEDDING, TARGET_LM_HEAD
from mtp_train.export.layouts.eagle import BIAS_NAME, EMBEDDING_NAME
from mtp_train.foreign.contract import Contract, Shape
from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.findings import Finding
from mtp_train.foreign.reading import (
    Copy,
    FormatReader,
    Given,
    Reading,
    common_facts,
    describe_attention_bias,
    join_reasons,
    layer_block,
    renamed,
)
from mtp_train.foreign.sizes import Sizes, read_sizes
from runtime.head_spec import EAGLE_FIELDS, HeadSpec, NormPlacement, layer_prefix
from runtime.layer_parts import PLAIN_LAYER, LayerParts

LM_HEAD_NAME = "lm_head.weight"
_INPUT_NORM = "layers.0.input_layernorm.weight"
_FINAL_NORM = "norm.weight"
# Of the speculators format, in front of a name; layer 0 is the only one there.
_SPECULATORS = (("fusion_fc.", "fc."), ("transformer.", "layers.0."))
_EXTRA_NORMS = ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight")
_NORMED: Mapping[str, Any] = {
    "norms": NormPlacement(enorm=False, hnorm=False),
    "concat": "embedding_hidden",
    "first_embedding_mask": False,
}


class EagleReader(FormatReader):
    """Also of the speculators format, by its names."""

    def read(self, files: HeadFiles, given: Given) -> Reading:
        block, source = layer_block(files.config)
        sizes, findings = read_sizes(block, source=source)
        if sizes is None:
            return Reading(findings=tuple(findings), why_not="sizes are missing")
        names = _names(files)
        there = set(names.values())
        count = block.get("num_hidden_layers", 1)
        spec = _spec(sizes, there)
        required = LAYOUTS["eagle"].tensor_shapes(spec) if spec.kind == "eagle" else _normed(spec)
        required |= _more_layers(sizes, count if type(count) is int else 1)
        parts = _parts(there)
        required |= _biases(sizes, parts)
        optional: dict[str, Shape] = {
            EMBEDDING_NAME: required.pop(EMBEDDING_NAME, (sizes.vocab_size, sizes.hidden_size)),
            LM_HEAD_NAME: (sizes.vocab_size, sizes.hidden_size),
        }
        why_not = join_reasons(
            (count != 1, f"it has {count} decoder layers, EAGLE-1 as published one"),
            (parts != PLAIN_LAYER, f"it has biases ({parts}), heads of EAGLE-1 here have none"),
            (bool(set(_EXTRA_NORMS) & there), "it has norms of HASS around fc and lm_head"),
            (sizes.rope is None, f"RoPE: {sizes.rope_note}"),
        )
        back = {ours: theirs for theirs, ours in names.items()}
        findings += _surprises(files, there)
        return Reading(
            contract=Contract(
                renamed(back, required),
                renamed(back, optional) | dict.fromkeys(_EXTRA_NORMS, (sizes.hidden_size,)),
            ),
            spec=None if why_not else spec,
            why_not=why_not,
            facts=(
                ("reads", "g of the target, behind its final norm, and the next token's embedding"),
                ("fc", f"[e; g], {'with' if spec.projection_bias else 'without'} a bias"),
                *common_facts(files, sizes),
                ("lm_head", "its own copy" if LM_HEAD_NAME in there else "the target's"),
            ),
            findings=tuple(findings),
            copies=_copies(there),
            reads_width=sizes.hidden_size,
            sizes=sizes,
        )

    def native_tensors(
        self, spec: HeadSpec, files: HeadFiles, given: Given
    ) -> dict[str, torch.Tensor]:
        written = {ours: files.read(theirs) for theirs, ours in _names(files).items()}
        layout = LAYOUTS["eagle"]
        if spec.kind == "eagle":
            return layout.from_layout(spec, written)
        shaped_as_eagle = replace(spec, **EAGLE_FIELDS, kind="eagle")
        native = layout.from_layout(shaped_as_eagle, written)
        return native | {name: written[name] for name in (_INPUT_NORM, _FINAL_NORM)}


def _names(files: HeadFiles) -> dict[str, str]:
    """The directory's names -> those of the layout."""
    names = {}
    for name in files.headers:
        ours = name
        for theirs, layout in _SPECULATORS:
            if name.startswith(theirs):
                ours = layout + name.removeprefix(theirs)
        names[name] = ours
    return names


def _spec(sizes: Sizes, there: set[str]) -> HeadSpec:
    fields = {**sizes.spec_fields(), "projection_bias": BIAS_NAME in there}
    if {_INPUT_NORM, _FINAL_NORM} <= there:
        return HeadSpec(kind="mtp", **fields, **_NORMED)
    return HeadSpec(kind="eagle", **fields, **EAGLE_FIELDS)


def _normed(spec: HeadSpec) -> dict[str, Shape]:
    shapes = LAYOUTS["eagle"].tensor_shapes(replace(spec, **EAGLE_FIELDS, kind="eagle"))
    return shapes | dict.fromkeys((_INPUT_NORM, _FINAL_NORM), (spec.hidden_size,))


def _more_layers(sizes: Sizes, count: int) -> dict[str, Shape]:
    """Of layers behind the first, which have all their norms."""
    shapes = sizes.layer_shapes(LayerParts())
    return {
        layer_prefix(index) + name: shape
        for index in range(1, count)
        for name, shape in shapes.items()
    }


def _parts(there: set[str]) -> LayerParts:
    return LayerParts(
        qkv_bias=describe_attention_bias(dict.fromkeys(there), "layers.0."),
        out_bias="layers.0.self_attn.o_proj.bias" in there,
        mlp_bias="layers.0.mlp.gate_proj.bias" in there,
    )


def _biases(sizes: Sizes, parts: LayerParts) -> dict[str, Shape]:
    shapes = sizes.layer_shapes(parts)
    return {f"layers.0.{n}": shape for n, shape in shapes.items() if n.endswith(".bias")}


def _copies(there: set[str]) -> tuple[Copy, ...]:
    pairs = ((EMBEDDING_NAME, TARGET_EMBEDDING), (LM_HEAD_NAME, TARGET_LM_HEAD))
    return tuple(Copy(name, target) for name, target in pairs if name in there)


def _surprises(files: HeadFiles, there: set[str]) -> list[Finding]:
    """What a loader of one engine takes badly though the head itself is whole."""
    findings = []
    if LM_HEAD_NAME in there:
        findings.append(
            Finding(
                "warning",
                "lm-head-shipped",
                LM_HEAD_NAME,
                "there",
                "no lm_head: engines draft with the target's",
                "leave it out: vLLM refuses the directory, SGLang skips the tensor",
            )
        )
    if files.config.get("bias") is not None:
        findings.append(
            Finding(
                "warning",
                "bias-key",
                "bias",
                str(files.config["bias"]).lower(),
                "no such key",
                "leave it out: SGLang reads it as the attention's bias",
            )
        )
    if files.config.get("tie_word_embeddings"):
        findings.append(
            Finding(
                "warning",
                "tied",
                "tie_word_embeddings",
                "true",
                "false",
                "write false: engines share the target's embedding and lm_head by themselves",
            )
        )
    return findings
