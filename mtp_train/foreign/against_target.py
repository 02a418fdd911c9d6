"""A head beside the target that it shall draft for: what has to be the same, and what is not.

Shape legend: V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from mtp_train.export.layouts.base import TARGET_EMBEDDING, TARGET_LM_HEAD
from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.findings import Finding
from mtp_train.foreign.reading import Copy, Reading
from mtp_train.foreign.sizes import TargetShape, describe_rope
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import load_config
from runtime.models.loader import fingerprint_target


def check_against(reading: Reading, target: TargetShape, *, scope: str = "") -> list[Finding]:
    """By sizes, RoPE and quantisation, as both ``config.json`` state them. ``scope``: the head's
    own quantisation; empty without one.
    """
    findings: list[Finding] = []
    sizes, wanted = reading.sizes, target.sizes
    if reading.reads_width and reading.reads_width != wanted.hidden_size:
        findings.append(
            _differs(
                "hidden_size",
                reading.reads_width,
                wanted.hidden_size,
                "it was made for another target: no engine can run it with this one",
            )
        )
    if target.quantisation and not scope:
        findings.append(
            Finding(
                "warning",
                "target-quantisation",
                "quantization_config",
                "missing",
                f"a scope of its own, as the target is quantised ({target.quantisation})",
                "vLLM may build the head's linears as the target's: load errors, or other values",
            )
        )
    ids = reading.spec.layer_ids if reading.spec is not None else ()
    if ids and max(ids) > target.num_layers:
        findings.append(
            _differs(
                "layer ids",
                max(ids),
                f"at most {target.num_layers}",
                "the target has no such layer",
            )
        )
    if sizes is None:
        return findings
    if sizes.vocab_size != wanted.vocab_size:
        findings.append(
            _differs(
                "vocab_size",
                sizes.vocab_size,
                wanted.vocab_size,
                "tokens would not be the target's; a resized embedding needs the head retrained",
            )
        )
    if sizes.rope is not None and wanted.rope is not None and sizes.rope != wanted.rope:
        findings.append(
            Finding(
                "warning",
                "target-rope",
                "RoPE",
                describe_rope(sizes),
                describe_rope(wanted),
                "EAGLE heads run with the first, MiMo's in vLLM with the second; acceptance falls "
                "with length where it is not what the head was trained with",
            )
        )
    if sizes.max_position_embeddings < wanted.max_position_embeddings:
        findings.append(
            Finding(
                "warning",
                "target-length",
                "max_position_embeddings",
                str(sizes.max_position_embeddings),
                str(wanted.max_position_embeddings),
                "SGLang drafts no further than it says; vLLM raises it for plain RoPE only",
            )
        )
    if sizes.norm_eps != wanted.norm_eps:
        findings.append(
            Finding(
                "note",
                "target-eps",
                "rms_norm_eps",
                f"{sizes.norm_eps:g}",
                f"{wanted.norm_eps:g}",
                "keep what the head was trained with",
            )
        )
    return findings


def check_fingerprint(recorded: str, directory: Path, *, cache_dir: Path) -> list[Finding]:
    """``recorded``: empty where the head says nothing of the target's weights."""
    if not recorded:
        return [
            Finding(
                "note",
                "fingerprint",
                "target",
                "not recorded",
                "",
                "whether these are the weights that it was trained for cannot be told; measure it",
            )
        ]
    found = fingerprint_target(directory, cache_dir=cache_dir)
    if recorded == found:
        return []
    return [
        Finding(
            "warning",
            "fingerprint",
            "target_fingerprint",
            recorded[:12],
            f"{found[:12]}, this target's",
            "it was trained for other weights; mtp validate says whether to train it again",
        )
    ]


def read_copies(reading: Reading, files: HeadFiles, directory: Path) -> Iterator[tuple[Copy, bool]]:
    """Each tensor that ought to be the target's, and whether it is.

    The target's is cast to the directory's dtype first: a copy in another dtype is one. Reads
    nothing where the runtime does not know the target's architecture.
    """
    try:
        config = load_config(directory)
        checkpoint = Checkpoint.of(directory, config)
    except ValueError:
        return
    for copy in reading.copies:
        own_VD = files.read(copy.name)
        is_tied = config.tie_word_embeddings and copy.target_name == TARGET_LM_HEAD
        theirs_VD = checkpoint.read_stored(TARGET_EMBEDDING if is_tied else copy.target_name)
        is_same = own_VD.shape == theirs_VD.shape and torch.equal(
            theirs_VD.to(own_VD.dtype), own_VD
        )
        yield copy, is_same


def describe_copies(reading: Reading, files: HeadFiles, directory: Path) -> list[Finding]:
    """The copies that are none."""
    return [
        Finding(
            "warning",
            "copy-differs",
            copy.name,
            "differs from the target's",
            f"the target's {copy.target_name}",
            "vLLM keeps an EAGLE head's own embedding; SGLang, and both of an MTP head's, take the "
            "target's; import it with foreign.vocabulary=target and measure",
        )
        for copy, is_same in read_copies(reading, files, directory)
        if not is_same
    ]


def _differs(field: str, found: object, wanted: object, action: str) -> Finding:
    code = f"target-{field.replace('_', '-').replace(' ', '-')}"
    return Finding("error", code, field, str(found), f"{wanted}, the target's", action)
