"""Medusa directories: of the authors, whose heads have an ``lm_head`` each, and in vLLM's names.

Ours draft with the target's ``lm_head``, which a directory may hold a copy of, or with one of the
block's own.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from mtp_train.export.layouts.base import TARGET_LM_HEAD
from mtp_train.foreign.contract import Contract, Shape
from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.findings import Finding
from mtp_train.foreign.reading import Copy, FormatReader, Given, Reading, join_reasons
from mtp_train.foreign.sizes import describe_quantisation
from runtime.head_spec import MEDUSA_FIELDS, HeadSpec, RopeSpec

_VLLM_NAME = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_OLD_NAME = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
_OLD_HEAD = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.weight")
_VLLM_HEAD = re.compile(r"lm_heads?(\.\d+)?\.weight")
_OWN_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
_TOKEN_MAP = "token_map"
# What a head of Medusa does not have, where no target says it.
_NO_LAYER: dict[str, Any] = {
    "intermediate_size": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 1,
    "rope": RopeSpec(theta=1.0),
    "norm_eps": 1e-6,
}


class MedusaReader(FormatReader):
    """A head is blocks of one width; all other sizes of ours are the target's."""

    def read(self, files: HeadFiles, given: Given) -> Reading:
        blocks = _block_names(files)
        heads = tuple(name for name in files.headers if _is_head(name))
        if not blocks:
            return Reading(why_not="it has no residual block that could be read")
        width = _width(files, blocks)
        vocab = _vocab_size(files, heads, given)
        count = 1 + max(int(name.split(".")[1]) for name in blocks)
        depth = 1 + max(int(name.split(".")[3]) for name in blocks)
        own = _own_heads(files, count, given)
        spec = _spec(width, vocab, count, blocks, given, is_own=bool(own))
        blocks |= own
        copies = tuple(name for name in heads if name not in own.values())
        required = {
            blocks.get(name) or _expected_name(name, blocks): shape
            for name, shape in _shapes(spec, depth).items()
        }
        why_not = _why_not(files, depth, given)
        return Reading(
            contract=Contract(
                required,
                dict.fromkeys(copies, (vocab, width)),
                frozenset({_TOKEN_MAP} & set(files.headers)),
            ),
            spec=None if why_not else spec,
            why_not=why_not,
            facts=(
                ("reads", "g of the target, behind its final norm"),
                ("width", str(width)),
                ("blocks", f"{count}, one per drafted token, of {depth} layer(s) each"),
                ("vocabulary", str(vocab) if vocab else "not stated"),
                ("lm_head", f"{len(own)} of its own" if own else "the target's"),
                ("quantisation", describe_quantisation(files.config) or "none of its own"),
            ),
            findings=tuple(_stated(files, count)),
            copies=()
            if given.choices.vocabulary == "target"
            else tuple(Copy(name, TARGET_LM_HEAD) for name in copies),
            reads_width=width,
        )

    def native_tensors(
        self, spec: HeadSpec, files: HeadFiles, given: Given
    ) -> dict[str, torch.Tensor]:
        names = _block_names(files) | _own_heads(files, spec.num_blocks, given)
        return {ours: files.read(theirs) for ours, theirs in names.items()}


def _width(files: HeadFiles, blocks: dict[str, str]) -> int:
    """Columns of the first weight; 0 where there is none."""
    weights = [blocks[name] for name in sorted(blocks) if name.endswith(".weight")]
    shapes = [files.headers[name].shape for name in weights]
    return shapes[0][-1] if shapes else 0


def _block_names(files: HeadFiles) -> dict[str, str]:
    """Native names -> the directory's."""
    names = {}
    for name in files.headers:
        found = _VLLM_NAME.fullmatch(name) or _OLD_NAME.fullmatch(name)
        if found:
            head, layer, what = found.groups()
            names[f"blocks.{head}.layers.{layer}.{what}"] = name
    return names


def _is_head(name: str) -> bool:
    return bool(_VLLM_HEAD.fullmatch(name) or _OLD_HEAD.fullmatch(name))


def _expected_name(name: str, blocks: dict[str, str]) -> str:
    """A missing tensor, named as its neighbours are."""
    _, head, _, layer, what = name.split(".")
    example = next(iter(blocks.values()))
    if _VLLM_NAME.fullmatch(example):
        return name
    prefix = re.match(r"(medusa_heads?\.)?", example)
    return f"{prefix.group(0) if prefix else ''}{head}.{layer}.linear.{what}"


def _vocab_size(files: HeadFiles, heads: tuple[str, ...], given: Given) -> int:
    stated = files.config.get("vocab_size")
    if type(stated) is int:
        return stated
    if heads:
        return files.headers[heads[0]].shape[0]
    return given.target.sizes.vocab_size if given.target else 0


def _own_heads(files: HeadFiles, count: int, given: Given) -> dict[str, str]:
    """Native names of ``lm_head`` weights, one per block, -> the directory's; none where it has
    not one for each, or ``foreign.vocabulary=target`` leaves them out.
    """
    if given.choices.vocabulary == "target":
        return {}
    found = {}
    for name in files.headers:
        match = _OLD_HEAD.fullmatch(name) or _OWN_HEAD.fullmatch(name)
        if match:
            found[f"lm_heads.{match.group(1)}.weight"] = name
    return found if len(found) == count else {}


def _spec(
    width: int, vocab: int, count: int, blocks: dict[str, str], given: Given, *, is_own: bool
) -> HeadSpec:
    fields = dict(_NO_LAYER) | {"target_fingerprint": ""}
    if given.target is not None:
        fields = given.target.sizes.spec_fields()
    fields |= {"hidden_size": width, "vocab_size": vocab or 1}
    return HeadSpec(
        kind="medusa",
        **fields,
        **MEDUSA_FIELDS,
        num_blocks=count,
        lm_head="own" if is_own else "target",
        projection_bias=any(name.endswith(".bias") for name in blocks),
    )


def _shapes(spec: HeadSpec, depth: int) -> dict[str, Shape]:
    shapes = spec.tensor_shapes()
    return {
        name.replace(".layers.0.", f".layers.{layer}."): shape
        for name, shape in shapes.items()
        for layer in range(depth)
    }


def _why_not(files: HeadFiles, depth: int, given: Given) -> str:
    truncated = files.config.get("truncated_vocab_size")
    is_shorter = truncated is not None and truncated != files.config.get("vocab_size")
    has_map = _TOKEN_MAP in files.headers or is_shorter
    rope = given.target.sizes.rope_note if given.target and not given.target.sizes.rope else ""
    return join_reasons(
        (depth != 1, f"its blocks have {depth} layers, those of heads here one"),
        (has_map, "it drafts from a list of tokens (token_map)"),
        (bool(rope), f"RoPE of the target: {rope}"),
    )


def _stated(files: HeadFiles, count: int) -> list[Finding]:
    key = "medusa_num_heads" if "medusa_num_heads" in files.config else "num_heads"
    stated = files.config.get(key)
    if stated is None or stated == count:
        return []
    return [
        Finding(
            "error",
            "block-count",
            key,
            str(stated),
            f"{count}, as there are blocks",
            "correct it; published configurations are known to be wrong here",
        )
    ]
