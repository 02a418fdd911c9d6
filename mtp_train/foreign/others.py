"""Our own native heads, and the formats that are recognised and not read."""

from __future__ import annotations

import json

from mtp_train.foreign.contract import Contract, Shape
from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.findings import Finding
from mtp_train.foreign.formats import FORMATS
from mtp_train.foreign.reading import FormatReader, Given, Reading, common_facts, layer_block
from mtp_train.foreign.sizes import Sizes, read_sizes
from runtime.head_spec import HeadSpec
from runtime.layer_parts import LayerParts


class NativeReader(FormatReader):
    """``HeadSpec`` says everything; :func:`runtime.head_spec.load_head` reads it."""

    def read(self, files: HeadFiles, given: Given) -> Reading:
        try:
            spec = HeadSpec.from_json(json.dumps(dict(files.config)), source="config.json")
        except ValueError as error:
            finding = Finding("error", "config", "config.json", str(error), "", "train it again")
            return Reading(findings=(finding,), why_not="config.json cannot be read")
        sizes = Sizes(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
            max_position_embeddings=spec.max_position_embeddings,
            norm_eps=spec.norm_eps,
            rope=spec.rope,
            rope_note="",
            dtype="",
        )
        streams = ", ".join(map(str, spec.layer_ids))
        reads = f"residual streams S_k of the target, k = {streams}" if streams else "g"
        drafts = "all tokens"
        if spec.draft_vocab is not None:
            drafts = f"{spec.draft_vocab.size} tokens; ids, not offsets"
        return Reading(
            contract=Contract(spec.tensor_shapes()),
            spec=spec,
            facts=(
                ("kind", spec.kind),
                ("reads", reads),
                ("projection", spec.concat.replace("_", " first, then ")),
                ("residual", f"{spec.residual}; recycles {spec.recycle}"),
                *common_facts(files, sizes),
                ("drafts from", drafts),
                ("lm_head", spec.lm_head),
                ("trained for target", spec.target_fingerprint[:12] or "not recorded"),
            ),
            reads_width=spec.hidden_size,
            sizes=sizes,
        )


class BlockDrafterReader(FormatReader):
    """DFlash and DSpark: several layers of Qwen3's kind over states of the target, no EAGLE layer.

    Tensors beside layers and ``fc`` are of kinds that change from version to version; they are
    not checked.
    """

    def read(self, files: HeadFiles, given: Given) -> Reading:
        config = files.config
        block, source = layer_block(config)
        sizes, findings = read_sizes(block, source=source)
        why_not = FORMATS["dflash"].not_read
        if sizes is None:
            return Reading(findings=tuple(findings), why_not=why_not)
        ids, shown = _target_layers(files)
        stated = config.get("target_hidden_size")
        width = stated if type(stated) is int and stated > 0 else sizes.hidden_size
        count = block.get("num_hidden_layers")
        layers = count if type(count) is int and count > 0 else 1
        required: dict[str, Shape] = {
            "hidden_norm.weight": (sizes.hidden_size,),
            "norm.weight": (sizes.hidden_size,),
        }
        if ids:
            required["fc.weight"] = (sizes.hidden_size, len(ids) * width)
        for index in range(layers):
            required |= _qwen3_layer(sizes, index)
        unknown = frozenset(n for n in files.headers if n not in required)
        block_size = config.get("block_size", (config.get("dflash_config") or {}).get("block_size"))
        return Reading(
            contract=Contract(required, {}, unknown),
            why_not=why_not,
            facts=(
                ("reads", f"residual streams of the target, {shown}"),
                ("layers", str(layers)),
                ("block", f"{block_size} tokens at once" if block_size else "not stated"),
                *common_facts(files, sizes),
                ("further tensors", f"{len(unknown)}, not checked"),
            ),
            findings=tuple(findings),
            reads_width=width,
            sizes=sizes,
        )


class NamedOnlyReader(FormatReader):
    """Recognised by name and nothing more."""

    def read(self, files: HeadFiles, given: Given) -> Reading:
        return Reading(
            why_not="recognised only: heads of this kind are not trained here",
            facts=(("tensors", str(len(files.headers))),),
        )


def _target_layers(files: HeadFiles) -> tuple[list[int], str]:
    """Ids as written, and what they mean: the library counts k, the raw format k - 1."""
    own = files.config.get("dflash_config") or {}
    for value, counts_before in (
        (files.config.get("aux_hidden_state_layer_ids"), False),
        (own.get("target_layer_ids", files.config.get("target_layer_ids")), True),
    ):
        if isinstance(value, list) and value and all(type(k) is int for k in value):
            streams = [k + 1 if counts_before else k for k in value]
            return value, f"S_k of k = {', '.join(map(str, streams))}"
    return [], "which is not stated"


def _qwen3_layer(sizes: Sizes, index: int) -> dict[str, Shape]:
    shapes = sizes.layer_shapes(LayerParts(qk_norm=True))
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}
