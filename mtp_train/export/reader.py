"""Exported directories, read back strictly: nothing missing, nothing unknown, nothing changed.

A loader of an engine skips, invents or leaves uninitialised what does not fit; that it loaded
proves nothing. What is read here is what an engine computes: the projection stays hidden-first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mtp_train.export.layouts.base import TARGET_EMBEDDING, TARGET_LM_HEAD, check_config
from mtp_train.export.record import EXPORT_NAME, ExportRecord, hash_tensor
from mtp_train.export.weights import read_weights
from mtp_train.run_dir import read_json
from runtime.files import sha256_file
from runtime.head_spec import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    HeadSpec,
    check_tensor_list,
    load_head,
)
from runtime.layer_parts import ExpertSpec
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import ModelConfig, load_config
from runtime.models.loader import default_cache_dir, fingerprint_target


def is_export(directory: Path) -> bool:
    """Whether the directory was written by :func:`write_export`."""
    return (directory / EXPORT_NAME).is_file()


def load_any_head(directory: Path) -> tuple[HeadSpec, dict[str, torch.Tensor]]:
    """A native or an exported head, under native names. Raises ``ValueError``, see there."""
    if is_export(directory):
        return read_export(directory)
    config = directory / CONFIG_NAME
    if config.is_file() and "architectures" in read_json(config):
        raise ValueError(
            f"head={directory}: {CONFIG_NAME} is that of a serving engine, but {EXPORT_NAME}, "
            "which `mtp export` writes beside it, is missing; as head.init, "
            "validate.head and generate.head, heads of others are read into runs/<name>/imported"
        )
    return load_head(directory)


def read_export(directory: Path) -> tuple[HeadSpec, dict[str, torch.Tensor]]:
    """The head as an engine computes it from the directory, under native names.

    Raises ``ValueError`` naming the file, key or tensor that differs from what was written.
    """
    record, written = _read_checked(directory)
    layout = record.layout
    return layout.served_spec(record.head), layout.from_layout(record.head, written)


def check_export(directory: Path, *, target_dir: Path, cache_dir: Path | None = None) -> None:
    """:func:`read_export`, and every value that must be the target's compared with the target.

    ``target_dir`` is a Hugging Face directory. Raises ``ValueError`` naming the tensor or key.
    """
    record, written = _read_checked(directory)
    record.layout.refuse_path(directory)
    check_target(record.head, target_dir, cache_dir=cache_dir, may_be_shorter=True)
    target = load_config(target_dir)
    if record.num_target_layers != target.num_layers:
        raise ValueError(
            f"{directory / CONFIG_NAME}: num_hidden_layers={record.num_target_layers}, the target "
            f"has {target.num_layers}"
        )
    copies = read_copies(record.layout.copied(record.head), target_dir, target)
    for name, tensor in copies.items():
        if written[name].dtype != tensor.dtype or not torch.equal(written[name], tensor):
            raise ValueError(
                f"{directory / WEIGHTS_NAME}: tensor {name} is not a copy of the target's"
            )


def check_target(
    spec: HeadSpec,
    target_dir: Path,
    *,
    cache_dir: Path | None = None,
    may_be_shorter: bool = False,
) -> None:
    """Raise ``ValueError`` naming the first way in which the head is not one of this target.

    Engines take sizes, norms and RoPE of an MTP head from the target or from the directory, by
    layout: they must be the same. Those of an EAGLE head are always its own. ``may_be_shorter``:
    but for the length, as ``export.max_length`` sets it.
    """
    target = load_config(target_dir)
    length, longest = spec.max_position_embeddings, target.max_position_embeddings
    is_eagle = spec.kind in ("eagle", "eagle3")
    may_be_shorter = may_be_shorter or is_eagle
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("target_hidden_size", spec.target_width, target.hidden_size),
        ("vocab_size", spec.vocab_size, target.vocab_size),
        ("max_position_embeddings", max(length, longest) if may_be_shorter else length, longest),
    )
    own: tuple[tuple[str, Any, Any], ...] = (
        ("intermediate_size", spec.intermediate_size, target.intermediate_size),
        ("num_attention_heads", spec.num_heads, target.num_heads),
        ("num_key_value_heads", spec.num_kv_heads, target.num_kv_heads),
        ("head_dim", spec.head_dim, target.head_dim),
        ("rms_norm_eps", spec.norm_eps, target.norm_eps),
        ("rope_theta", spec.rope.theta, target.rope.theta),
        ("rope_parameters", spec.rope, target.rope),
        ("latent attention", spec.latent, spec.latent and target.latent),
        ("experts", spec.experts, spec.experts and _experts_only(target)),
    )
    for key, ours, theirs in pairs if is_eagle else (*pairs, *own):
        if ours != theirs:
            raise ValueError(f"head {key}={ours}: the target {target_dir} has {theirs}")
    fingerprint = fingerprint_target(target_dir, cache_dir=cache_dir or default_cache_dir())
    if spec.target_fingerprint != fingerprint:
        raise ValueError(
            f"head target_fingerprint={spec.target_fingerprint[:12]}: the target {target_dir} is "
            f"{fingerprint[:12]}; a head drafts for the model that it was trained with only"
        )


def _experts_only(target: ModelConfig) -> ExpertSpec | None:
    return target.experts and replace(target.experts, dense_layers=())


def read_copies(
    copied: Mapping[str, str], target_dir: Path, target: ModelConfig
) -> dict[str, torch.Tensor]:
    """What a layout copies of the target (:meth:`Layout.copied`), as stored there, under the
    layout's names; each in memory of its own. A quantised ``lm_head`` becomes plain, in the
    embedding's dtype.
    """
    checkpoint = Checkpoint.of(target_dir, target)
    copies = {}
    for name, source in copied.items():
        is_tied = source == TARGET_LM_HEAD and target.tie_word_embeddings
        if checkpoint.scheme_of(source) is not None:
            dtype = checkpoint.read_stored(TARGET_EMBEDDING).dtype
            copies[name] = checkpoint.read(source, dtype=dtype, device=torch.device("cpu"))
            continue
        # safetensors refuses two names for one storage.
        stored = checkpoint.read_stored(TARGET_EMBEDDING if is_tied else source)
        copies[name] = stored.clone() if is_tied else stored
    return copies


def _read_checked(directory: Path) -> tuple[ExportRecord, dict[str, torch.Tensor]]:
    for name in (EXPORT_NAME, CONFIG_NAME):
        if not (directory / name).is_file():
            raise ValueError(
                f"export={directory}: {name} is missing; expected a directory written by mtp export"
            )
    record = ExportRecord.read(directory / EXPORT_NAME)
    record.layout.refuse_uncarried(record.head, drop_draft_vocab=record.dropped_draft_vocab)
    config_file = directory / CONFIG_NAME
    expected = record.layout.config(record.head, record.target_facts)
    check_config(read_json(config_file), expected, source=str(config_file))
    written = read_weights(directory)
    check_tensors(record, written, source=str(directory / WEIGHTS_NAME))
    for name, digest in record.files_sha256.items():
        if not (directory / name).is_file():
            raise ValueError(f"export={directory}: {name} is missing; it was written")
        if sha256_file(directory / name) != digest:
            raise ValueError(f"{directory / name}: is not the file that was written (sha256)")
    return record, written


def check_tensors(
    record: ExportRecord, written: Mapping[str, torch.Tensor], *, source: str
) -> None:
    """Raise ``ValueError`` naming the first tensor that is not what ``record`` says."""
    shapes = record.layout.tensor_shapes(record.head)
    check_tensor_list(shapes, written, source=source)
    for name in shapes:
        tensor = written[name]
        if not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{source}: tensor {name} has {count} values that are not finite")
    record.layout.check_values(record.head, written, source=source)
    for name in shapes:
        if hash_tensor(written[name]) != record.tensors.get(name):
            change = _describe_change(record, name, written[name])
            raise ValueError(f"{source}: tensor {name} {change}")


def _describe_change(record: ExportRecord, name: str, tensor: torch.Tensor) -> str:
    def matches(values: torch.Tensor) -> bool:
        return hash_tensor(values) == record.tensors.get(name)

    known = record.layout.explain_change(name, tensor, matches)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return known or f"({dtype}) is not what was written (sha256)"
