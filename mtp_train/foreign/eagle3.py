"""EAGLE-3 directories: of the authors, SGLang, SpecForge, TorchSpec, vLLM and speculators; P-EAGLE,
whose heads are built like these, is looked at here too.

The contract is that of :mod:`mtp_train.export.layouts.eagle3`, under ``midlayer.`` where a
directory says so, with what only others write: biases, head norms, more layers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from mtp_train.export.layouts import LAYOUTS
from mtp_train.export.layouts.base import TARGET_EMBEDDING
from mtp_train.export.layouts.eagle3 import MASK_NAME, OFFSETS_NAME, to_mask, to_offsets
from mtp_train.foreign.contract import Contract, Shape
from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.findings import Finding, OpenChoice
from mtp_train.foreign.layer_sources import LayerSources, read_layer_sources
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
from mtp_train.foreign.vocabulary import Vocabulary, read_draft_ids, read_vocabulary
from runtime.head_spec import (
    DRAFT_VOCAB_NAME,
    EAGLE3_FIELDS,
    EMBEDDING_NAME,
    DraftVocab,
    HeadSpec,
    hash_vocab_ids,
    layer_prefix,
)
from runtime.layer_parts import PLAIN_LAYER, LayerParts

_LAYER = "layers.0."
_ALIAS = "midlayer."
_MASK_HIDDEN = "mask_hidden"
_OLD_FC_NORMS = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")


class Eagle3Reader(FormatReader):
    """Also of the speculators format, whose layer's keys lie in an object of their own."""

    def read(self, files: HeadFiles, given: Given) -> Reading:
        config = files.config
        is_speculators = "speculators_model_type" in config
        block, source = layer_block(config)
        sizes, findings = read_sizes(block, source=source)
        if sizes is None:
            return Reading(findings=tuple(findings), why_not="sizes are missing")
        names = _names(files)
        there = set(names.values())
        if any("kv_a_proj" in name for name in there):
            why = "its layer has latent attention, heads of EAGLE-3 here have not"
            return Reading(findings=tuple(findings), why_not=why, sizes=sizes)
        sources = read_layer_sources(config, block, given, is_speculators=is_speculators)
        vocabulary = read_vocabulary(files, sizes, given)
        normed, choice = _norm_before_residual(files, given, is_speculators=is_speculators)
        findings += [*sources.findings, *vocabulary.findings, *_norm_flags(files)]
        findings += choice[0]
        width = _target_width(files, sizes, sources.count, given, findings)
        spec = _spec(files, sizes, sources, vocabulary, normed, width)
        parts = _parts(there, block)
        required, optional = _contract(spec, sizes, files, there, parts)
        back = {ours: theirs for theirs, ours in names.items()}
        why_not = _why_not(sizes, there, parts, width)
        is_whole = vocabulary.draft is None
        ignored = {OFFSETS_NAME, MASK_NAME} if is_whole else set()
        return Reading(
            contract=Contract(
                _theirs(back, required, names), _theirs(back, optional, names), frozenset(ignored)
            ),
            spec=None if why_not else spec,
            why_not=why_not,
            facts=_facts(files, sizes, sources, vocabulary, spec, width, there),
            findings=tuple(findings),
            open_choices=(*sources.open_choices, *vocabulary.open_choices, *choice[1]),
            copies=_copies(spec, there),
            reads_width=width,
            sizes=sizes,
        )

    def native_tensors(
        self, spec: HeadSpec, files: HeadFiles, given: Given
    ) -> dict[str, torch.Tensor]:
        written = {ours: files.read(theirs) for theirs, ours in _names(files).items()}
        if spec.draft_vocab is not None:
            draft = read_draft_ids(
                files, vocab_size=spec.vocab_size, choice=given.choices.draft_ids
            )
            assert draft.ids_W is not None, "a head without known ids is not read"
            written[OFFSETS_NAME] = to_offsets(draft.ids_W)
            written[MASK_NAME] = to_mask(draft.ids_W, vocab_size=spec.vocab_size)
        native = LAYOUTS["speculators"].from_layout(spec, written)
        if DRAFT_VOCAB_NAME in native:
            native[DRAFT_VOCAB_NAME] = native[DRAFT_VOCAB_NAME].to(torch.int64)
        return native


def _names(files: HeadFiles) -> dict[str, str]:
    """The directory's names -> those of the layout."""
    old = {name: f"fc_norm.{index}.weight" for index, name in enumerate(_OLD_FC_NORMS)}
    return {
        name: old.get(name, _LAYER + name.removeprefix(_ALIAS) if name.startswith(_ALIAS) else name)
        for name in files.headers
    }


def _theirs(
    back: dict[str, str], shapes: dict[str, Shape], names: dict[str, str]
) -> dict[str, Shape]:
    """Under the directory's names; a tensor that is missing is named as its neighbours are."""
    uses_alias = any(name.startswith(_ALIAS) for name in names)
    aliased = {
        name: _ALIAS + name.removeprefix(_LAYER)
        for name in shapes
        if uses_alias and name.startswith(_LAYER)
    }
    return renamed({**aliased, **back}, shapes)


def _norm_before_residual(
    files: HeadFiles, given: Given, *, is_speculators: bool
) -> tuple[bool, tuple[list[Finding], list[OpenChoice]]]:
    stated, chosen = files.config.get("norm_before_residual"), given.choices.norm_before_residual
    if chosen != "auto":
        return chosen, ([], [])
    if isinstance(stated, bool):
        if not stated or is_speculators:
            return stated, ([], [])
        finding = Finding(
            "warning",
            "norm-before-residual",
            "norm_before_residual",
            "true",
            "false",
            "SGLang ignores it and adds the un-normed state: it would draft badly from step 0",
        )
        return stated, ([finding], [])
    if not is_speculators:
        return False, ([], [])
    finding = Finding(
        "warning",
        "norm-before-residual",
        "norm_before_residual",
        "missing",
        "true or false",
        "vLLM takes true and the speculators library false; write what the head was trained with",
    )
    option = OpenChoice(
        "foreign.norm_before_residual=true|false",
        "whether the layer's residual is the normed state or the state as it is",
    )
    return False, ([finding], [option])


def _norm_flags(files: HeadFiles) -> list[Finding]:
    """Norm tensors that no key announces stay unread."""
    findings = []
    pairs = (
        ("fc_norm", any(n.startswith(("fc_norm.", "aux_norm_")) for n in files.headers)),
        ("norm_before_fc", "input_norm.weight" in files.headers),
    )
    for key, is_there in pairs:
        if is_there and files.config.get(key) is not True:
            findings.append(
                Finding(
                    "error",
                    "norm-flag",
                    key,
                    str(files.config.get(key, "missing")).lower(),
                    "true, as the tensors say",
                    "write it: engines build the norm by this key",
                )
            )
    if files.config.get("tie_word_embeddings"):
        findings.append(
            Finding(
                "error",
                "tied",
                "tie_word_embeddings",
                "true",
                "false",
                "write false: SGLang leaves lm_head unloaded when told that it is tied",
            )
        )
    return findings


def _target_width(
    files: HeadFiles, sizes: Sizes, count: int, given: Given, findings: list[Finding]
) -> int:
    stated = files.config.get("target_hidden_size")
    if type(stated) is int and stated > 0:
        return stated
    header = files.headers.get("fc.weight")
    if header is None or len(header.shape) != 2 or header.shape[1] % count:
        return sizes.hidden_size
    width = header.shape[1] // count
    is_the_targets = given.target is None or given.target.sizes.hidden_size == width
    if width == sizes.hidden_size or not is_the_targets:
        return sizes.hidden_size
    findings.append(
        Finding(
            "error",
            "target-width",
            "target_hidden_size",
            "missing",
            f"{width}, as fc.weight has {header.shape[1]} columns for {count} states",
            "write it, if the target is wider than the head; engines take hidden_size",
        )
    )
    return width


def _spec(
    files: HeadFiles,
    sizes: Sizes,
    sources: LayerSources,
    vocabulary: Vocabulary,
    normed: bool,
    width: int,
) -> HeadSpec:
    config = files.config
    ids_W = vocabulary.draft.ids_W if vocabulary.draft is not None else None
    draft_vocab = None
    if vocabulary.draft is not None:
        digest = "" if ids_W is None else hash_vocab_ids(ids_W)
        draft_vocab = DraftVocab(vocabulary.size, coverage=0.0, ids_sha256=digest)
    fusion: Literal["none", "each", "joined"] = "none"
    if config.get("fc_norm") is True:
        fusion = "each"
    elif config.get("norm_before_fc") is True:
        fusion = "joined"
    fields: dict[str, Any] = {**sizes.spec_fields(), **EAGLE3_FIELDS}
    if width > sizes.hidden_size:
        fields |= {"target_hidden_size": width, "embedding": "own"}
    return HeadSpec(
        kind="eagle3",
        **fields,
        layer_ids=sources.ids or tuple(range(sources.count)),
        fusion_norm=fusion,
        residual="normed" if normed else "standard",
        recycle="post_norm" if config.get("norm_output") is True else "pre_norm",
        draft_vocab=draft_vocab,
    )


def _parts(there: set[str], block: Any) -> LayerParts:
    has_norms = any(f"{_LAYER}self_attn.{p}_norm.weight" in there for p in "qk")
    return LayerParts(
        qkv_bias=describe_attention_bias(dict.fromkeys(there), _LAYER)
        or block.get("attention_bias") is True,
        out_bias=f"{_LAYER}self_attn.o_proj.bias" in there,
        mlp_bias=f"{_LAYER}mlp.gate_proj.bias" in there,
        qk_norm=has_norms or block.get("model_type") == "qwen3",
    )


def _contract(
    spec: HeadSpec,
    sizes: Sizes,
    files: HeadFiles,
    there: set[str],
    parts: LayerParts,
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The layout's list, and what of it may be left out."""
    required = LAYOUTS["speculators"].tensor_shapes(spec)
    required |= _layer(sizes, 0, parts, inputs=2 * sizes.hidden_size)
    optional: dict[str, Shape] = {}
    if spec.embedding == "target":
        optional[EMBEDDING_NAME] = required.pop(EMBEDDING_NAME)
    if MASK_NAME in required:
        optional[MASK_NAME] = required.pop(MASK_NAME)
    if _MASK_HIDDEN in there or _is_parallel(files):
        required[_MASK_HIDDEN] = (1, 1, spec.input_size)
    for index in range(1, _num_layers(files)):
        required |= _layer(sizes, index, parts, inputs=sizes.hidden_size)
        optional[f"{layer_prefix(index)}hidden_norm.weight"] = (sizes.hidden_size,)
    return required, optional


def _layer(sizes: Sizes, index: int, parts: LayerParts, *, inputs: int) -> dict[str, Shape]:
    shapes = sizes.layer_shapes(parts, inputs=inputs)
    return {layer_prefix(index) + name: shape for name, shape in shapes.items()}


def _is_parallel(files: HeadFiles) -> bool:
    architectures = files.config.get("architectures") or [""]
    return "peagle" in str(architectures[0]).lower()


def _num_layers(files: HeadFiles) -> int:
    count = layer_block(files.config)[0].get("num_hidden_layers", 1)
    return count if type(count) is int and count > 0 else 1


def _copies(spec: HeadSpec, there: set[str]) -> tuple[Copy, ...]:
    if spec.embedding == "own" or EMBEDDING_NAME not in there:
        return ()
    return (Copy(EMBEDDING_NAME, TARGET_EMBEDDING, may_be_own=True),)


def _why_not(sizes: Sizes, there: set[str], parts: LayerParts, width: int) -> str:
    layers = {name.split(".")[1] for name in there if name.startswith("layers.")}
    return join_reasons(
        (
            width < sizes.hidden_size,
            f"it is {sizes.hidden_size} wide and reads states of {width}: heads here are no wider "
            "than their target",
        ),
        (parts != PLAIN_LAYER, f"its layer has {parts}, heads of EAGLE-3 here have none"),
        (len(layers) > 1, f"it has {len(layers)} layers, heads of EAGLE-3 here have one"),
        (sizes.rope is None, f"RoPE: {sizes.rope_note}"),
    )


def _facts(
    files: HeadFiles,
    sizes: Sizes,
    sources: LayerSources,
    vocabulary: Vocabulary,
    spec: HeadSpec,
    width: int,
    there: set[str],
) -> tuple[tuple[str, str], ...]:
    streams = ", ".join(map(str, sources.ids)) if sources.ids else "not known"
    drafts = f"all {sizes.vocab_size}"
    if vocabulary.draft is not None:
        drafts = f"{vocabulary.size}; d2t: {vocabulary.draft.convention}"
    narrower = "" if width == sizes.hidden_size else f", {width} wide each"
    return (
        ("reads", f"{sources.count} residual streams S_k of the target{narrower}, k = {streams}"),
        ("norms before fc", spec.fusion_norm),
        ("residual", f"{spec.residual}; recycles {spec.recycle}"),
        *common_facts(files, sizes),
        ("draft vocabulary", drafts),
        ("embedding", "its own copy" if EMBEDDING_NAME in there else "the target's"),
        ("lm_head", "its own" if "lm_head.weight" in there else "missing"),
    )
