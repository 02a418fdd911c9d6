"""Writes an exported directory: whole or not at all, and read back before it appears."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mtp_train.config import ExportFormat
from mtp_train.export.commands import refresh_readme, serving_commands
from mtp_train.export.layouts import find_layout
from mtp_train.export.layouts.base import TargetFacts
from mtp_train.export.reader import check_export, check_target, is_export, read_copies
from mtp_train.export.record import EXPORT_NAME, ExportRecord, hash_tensor
from mtp_train.export.weights import hash_files, write_weights
from mtp_train.run_dir import PARITY_NAME, read_json, write_json_atomic
from mtp_train.serving.job import has_vllm_layout
from mtp_train.serving.target_scope import vllm_layout_for
from runtime.files import STAGED_PREFIX, sync_path
from runtime.head_spec import CONFIG_NAME, load_head
from runtime.models.config import load_config


@dataclass(frozen=True)
class ExportReport:
    """What was written. ``path`` holds ``record`` as ``export.json``."""

    path: Path
    record: ExportRecord
    num_bytes: int


def write_export(
    head_dir: Path,
    out_dir: Path,
    *,
    format: ExportFormat,
    target_dir: Path,
    draft_vocab: Literal["refuse", "drop"] = "refuse",
    unvalidated: bool = False,
    max_length: int = 0,
    max_file_bytes: int = 0,
    cache_dir: Path | None = None,
    verify: Callable[[Path], object] | None = None,
) -> ExportReport:
    """Write ``head_dir`` (native) for serving engines into ``out_dir``, replacing what is there.

    ``target_dir`` is the target's Hugging Face directory. ``unvalidated``: go on without a passing
    ``parity.json`` of exactly these weights beside the head. ``max_length``: tokens of a sequence
    that the configuration allows, at most the target's; 0 is the target's. ``max_file_bytes``:
    weights beyond that are split into shards with an index; 0 is one file. ``verify`` is called
    with the finished directory, which has a temporary name beside ``out_dir``, before it takes its
    place; what it raises is raised here, and nothing is left behind. Raises ``ValueError`` for a
    head that the format cannot carry, that belongs to another target, or that has not been
    validated.
    """
    layout = find_layout(format)
    if is_export(head_dir):
        raise ValueError(f"head={head_dir}: is an exported directory; export the native head")
    layout.refuse_path(out_dir)
    spec, tensors = load_head(head_dir)
    layout.refuse_uncarried(spec, drop_draft_vocab=draft_vocab == "drop")
    check_target(spec, target_dir, cache_dir=cache_dir)
    if max_length > spec.max_position_embeddings:
        raise ValueError(
            f"export.max_length={max_length}: the target has {spec.max_position_embeddings} "
            "positions; use fewer, or 0 for all of them"
        )
    spec = replace(spec, max_position_embeddings=max_length or spec.max_position_embeddings)
    is_validated = has_passed(head_dir)
    if not is_validated and not unvalidated:
        raise ValueError(f"head={head_dir}: {why_unvalidated(head_dir)}")
    target = load_config(target_dir)
    layout = layout.at(target.num_layers)
    copies = read_copies(layout.copied(spec), target_dir, target)
    written = layout.to_layout(spec, tensors) | copies
    stored = next(iter((copies or written).values())).dtype
    dtype = target_dtype_name(target_dir, str(stored))
    facts = TargetFacts(target.num_layers, dtype, str(target_dir))
    overrides: dict[str, Any] = {}
    if has_vllm_layout(format):
        overrides = dict(vllm_layout_for(format, target_dir).hf_overrides)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f"{STAGED_PREFIX}{out_dir.name}-", dir=out_dir.parent))
    try:
        staged.chmod(0o755)
        write_json_atomic(staged / CONFIG_NAME, layout.config(spec, facts))
        write_weights(staged, written, max_file_bytes=max_file_bytes)
        record = ExportRecord(
            format=format,
            head=spec,
            head_sha256=hash_files(head_dir),
            num_target_layers=facts.num_layers,
            dtype=facts.dtype,
            target_name=facts.name,
            quantization=target.quantisation.label if target.quantisation else "",
            hf_overrides=overrides,
            is_validated=is_validated,
            dropped_draft_vocab=layout.drops_draft_vocab(spec),
            files_sha256=hash_files(staged),
            tensors={name: hash_tensor(tensor) for name, tensor in written.items()},
            commands=serving_commands(
                layout,
                target="TARGET",
                head="HEAD",
                k="K",
                k_plus_one="K+1",
                overrides=overrides,
            ),
        )
        record.write(staged / EXPORT_NAME)
        if is_validated:
            write_json_atomic(staged / PARITY_NAME, read_json(head_dir / PARITY_NAME))
        refresh_readme(staged)
        check_export(staged, target_dir=target_dir, cache_dir=cache_dir)
        if verify is not None:
            verify(staged)
        num_bytes = sum(file.stat().st_size for file in staged.iterdir())
        _replace_directory(staged, out_dir)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return ExportReport(path=out_dir, record=record, num_bytes=num_bytes)


def has_passed(head_dir: Path) -> bool:
    """Whether a passing ``parity.json`` of exactly these files lies beside the head."""
    return not why_unvalidated(head_dir)


def why_unvalidated(head_dir: Path) -> str:
    """What is wrong with the head's ``parity.json``; empty when nothing is."""
    file = head_dir / PARITY_NAME
    remedy = "run `mtp validate` first, or say export.unvalidated=true"
    if not file.is_file():
        return f"has no {PARITY_NAME}: it has not been validated; {remedy}"
    parity = read_json(file)
    if parity.get("head_sha256") != hash_files(head_dir):
        return f"{PARITY_NAME} is of other weights: this head has not been validated; {remedy}"
    if parity.get("passed") is not True:
        failed = [name for name, rung in parity.get("rungs", {}).items() if not rung["passed"]]
        return f"validation failed ({', '.join(failed) or 'no rung ran'}); {remedy}"
    return ""


def target_dtype_name(target_dir: Path, stored: str) -> str:
    """``dtype`` of the target's ``config.json``, in either notation; else that of its tensors."""
    raw = json.loads((target_dir / CONFIG_NAME).read_text())
    name = raw.get("dtype") or raw.get("torch_dtype") or stored
    return str(name).removeprefix("torch.")


def _replace_directory(staged: Path, out_dir: Path) -> None:
    """Rename ``staged`` to ``out_dir``; a crash in between leaves no directory, never a mixture."""
    for file in staged.iterdir():
        sync_path(file)
    sync_path(staged)
    old = staged.with_name(staged.name + "-old")
    if out_dir.exists():
        os.replace(out_dir, old)
    os.replace(staged, out_dir)
    sync_path(out_dir.parent)
    shutil.rmtree(old, ignore_errors=True)
