"""A head that others wrote, read strictly and written again as one of ours.

What comes after it (training, the ladder, export) knows native heads only, and nothing is ever
written into the directory that was given. The native directory is named after its content and made
once.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mtp_train.config import BUILT_IN_INITS, Config, ForeignConfig
from mtp_train.export.reader import is_export, read_export
from mtp_train.features.target import cache_directory, target_directory
from mtp_train.foreign.against_target import read_copies
from mtp_train.foreign.contract import quantised_names
from mtp_train.foreign.files import HeadFiles, open_files
from mtp_train.foreign.inspection import FILE_CODES, Inspection, blocking, inspect_head
from mtp_train.foreign.readers import READERS
from mtp_train.foreign.reading import Given, Reading
from mtp_train.foreign.recognise import is_native_config
from mtp_train.foreign.sizes import TargetShape, read_target
from mtp_train.native.reader import is_checkpoint
from mtp_train.run_dir import NATIVE_HEAD, RunDirectory, read_json, write_json_atomic
from runtime.head_spec import CONFIG_NAME, HeadSpec, save_head
from runtime.models.loader import fingerprint_target

logger = logging.getLogger(__name__)

RECORD_NAME = "import.json"


@dataclass(frozen=True)
class ImportedHead:
    """``spec`` and ``tensors`` as :func:`runtime.head_spec.load_head` gives them; what ``mtp
    train`` calls the target's fingerprint is that of the target it was read for.
    """

    spec: HeadSpec
    tensors: Mapping[str, torch.Tensor]
    inspection: Inspection


def is_native(directory: Path) -> bool:
    """Also of a directory without ``config.json``: whoever loads it says what is missing."""
    file = directory / CONFIG_NAME
    return not file.is_file() or is_native_config(read_json(file))


def read_foreign(
    directory: Path, choices: ForeignConfig, *, target_dir: Path, cache_dir: Path
) -> ImportedHead:
    """The head in ``directory`` for the target in ``target_dir``.

    Raises ``ValueError`` naming what is missing, unexpected, of another shape, left open or not
    representable.
    """
    target = read_target(target_dir)
    inspection = inspect_head(directory, choices, target=target)
    format, reading = inspection.format, inspection.reading
    if format is None or reading is None:
        raise ValueError(f"head={directory}: {inspection.findings[0]}")
    where = f"head={directory}: {format.title}"
    if format.not_read:
        raise ValueError(f"{where}: {format.not_read}")
    errors = blocking(inspection.findings)
    if errors and (not reading.why_not or errors[0].code in FILE_CODES):
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        look = f"`mtp inspect {directory}` shows everything"
        raise ValueError(f"{where}: {errors[0]}{more}; {look}")
    if reading.why_not:
        raise ValueError(f"{where}: {reading.why_not}")
    for name in quantised_names(inspection.files):
        raise ValueError(
            f"{where}: its weights are quantised ({name}); heads here are not, de-quantise it"
        )
    for choice in reading.open_choices:
        raise ValueError(f"{where}: its files do not say {choice.question}; say {choice.option}")
    files, reader = inspection.files, READERS[format.key]
    given = Given(target, choices)
    spec = _check_copies(directory, reading, files, target_dir, choices)
    tensors = reader.native_tensors(spec, files, given)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{where}: tensor {name} has {count} values that are not finite")
    spec = _for_target(spec, target, choices)
    fingerprint = fingerprint_target(target_dir, cache_dir=cache_dir)
    return ImportedHead(replace(spec, target_fingerprint=fingerprint), tensors, inspection)


def native_directory(
    directory: Path,
    choices: ForeignConfig,
    *,
    target_dir: Path,
    cache_dir: Path,
    into: Path,
) -> Path:
    """``directory`` itself where it is native or an export of ours, else the native head below
    ``into`` that was made of it, now or before. Raises ``ValueError`` as :func:`read_foreign` does.
    """
    if is_native(directory):
        return directory
    files = open_files(directory)
    made_of: dict[str, Any] = {
        "files": files.sha256(),
        "choices": json.loads(json.dumps(asdict(choices))),
        "target": fingerprint_target(target_dir, cache_dir=cache_dir),
    }
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    place = into / digest[:16]
    record = place / RECORD_NAME
    if record.is_file() and read_json(record)["made_of"] == made_of:
        logger.info("%s: read before, as %s", directory, place)
        return place
    if is_export(directory):
        spec, tensors = read_export(directory)
        save_head(place, spec, tensors)
        write_json_atomic(record, {"directory": str(directory.absolute()), "made_of": made_of})
        return place
    head = read_foreign(directory, choices, target_dir=target_dir, cache_dir=cache_dir)
    save_head(place, head.spec, head.tensors)
    assert head.inspection.format is not None, "it was read"
    write_json_atomic(
        record,
        {
            "directory": str(directory.absolute()),
            "format": head.inspection.format.key,
            "made_of": made_of,
            "notes": [str(f) for f in head.inspection.findings if f.severity != "error"],
        },
    )
    for finding in head.inspection.findings:
        if finding.severity != "note":
            logger.warning("%s: %s", directory, finding)
    logger.warning(
        "%s (%s) says nothing of its target's weights: taken as a head of this one, in %s",
        directory,
        head.inspection.format.title,
        place,
    )
    return place


def with_native_heads(config: Config) -> Config:
    """``config`` with native heads in the place of those that ``head.init``, ``validate.head`` and
    ``generate.head`` name, made below the run's directory where that is needed. Raises
    ``ValueError`` as :func:`read_foreign` does. For one rank.
    """
    named = {
        "head.init": "" if config.head.init in BUILT_IN_INITS else config.head.init,
        "validate.head": config.validate.head,
        "generate.head": config.generate.head,
    }
    native: dict[str, str] = {}
    for key, place in named.items():
        # an export of ours is measured as it is; training goes on from native heads
        is_read_as_it_is = key != "head.init" and is_export(Path(place))
        is_of_a_model = place == NATIVE_HEAD or (key == "head.init" and is_checkpoint(Path(place)))
        if not place or is_read_as_it_is or is_of_a_model:
            continue
        native[key] = str(
            native_directory(
                Path(place),
                config.foreign,
                target_dir=target_directory(config.target),
                cache_dir=cache_directory(config.target),
                into=RunDirectory.from_config(config).root / "imported",
            )
        )
    return replace(
        config,
        head=replace(config.head, init=native.get("head.init", config.head.init)),
        validate=replace(config.validate, head=native.get("validate.head", config.validate.head)),
        generate=replace(config.generate, head=native.get("generate.head", config.generate.head)),
    )


def _check_copies(
    directory: Path,
    reading: Reading,
    files: HeadFiles,
    target_dir: Path,
    choices: ForeignConfig,
) -> HeadSpec:
    """The head with what it keeps of its own."""
    spec = reading.spec
    assert spec is not None, "a reading without a spec says why"
    for copy, is_same in read_copies(reading, files, target_dir):
        if is_same:
            continue
        if choices.vocabulary == "target":
            logger.warning(
                "%s: %s is left out for the target's, as foreign.vocabulary=target says",
                directory,
                copy.name,
            )
            continue
        if copy.may_be_own:
            logger.info(
                "%s: %s is not the target's and stays the head's own, as in vLLM; "
                "foreign.vocabulary=target takes the target's, as SGLang does",
                directory,
                copy.name,
            )
            spec = replace(spec, embedding="own")
            continue
        raise ValueError(
            f"head={directory}: tensor {copy.name} differs from the target's {copy.target_name}, "
            "heads here have no such tensor of their own. foreign.vocabulary=target leaves it out "
            "for the target's; measure what that costs"
        )
    return spec


def _for_target(spec: HeadSpec, target: TargetShape, choices: ForeignConfig) -> HeadSpec:
    rope = target.sizes.rope
    if choices.rope == "target":
        if rope is None:
            raise ValueError(f"foreign.rope=target: {target.sizes.rope_note}")
        return replace(
            spec,
            rope=rope,
            max_position_embeddings=target.sizes.max_position_embeddings,
        )
    return spec
