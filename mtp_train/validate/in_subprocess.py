"""Validation in a process of its own, on a checkpoint: for a target that does not fit beside
training.

The leader writes the gathered head to ``validation/step-…``, starts
``python -m mtp_train.validate.in_subprocess`` without torchrun's variables, and broadcasts the
figures it
wrote. The process loads the target itself and is gone afterwards; the other ranks wait.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mtp_train.config import Config
from mtp_train.distributed import (
    ProcessGroup,
    init_process_group,
    run_alone,
    run_on_leader,
)
from mtp_train.run_dir import RunDirectory, write_json_atomic
from mtp_train.validate.in_training import ValidationResult, build_validator
from runtime.head_spec import HeadSpec, load_head, save_head

_MODULE = "mtp_train.validate.in_subprocess"
_RESULT_NAME = "validation.json"
_CONFIG_NAME = "settings.yaml"


class SubprocessValidator:
    """The same call and the same figures as :class:`RuntimeValidator`, from another process."""

    def __init__(self, config: Config, *, group: ProcessGroup) -> None:
        self._config = config
        self._group = group
        self._folder = RunDirectory.from_config(config).root / "validation"

    def __call__(
        self, step: int, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> ValidationResult:
        """A collective. Raises :class:`StageRefusedError` with the process's last words."""
        return run_on_leader(self._group, lambda: self._validate(step, spec, tensors))

    def _validate(
        self, step: int, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> ValidationResult:
        from mtp_train.app import dump_config

        self._folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f"step-{step:06d}-", dir=self._folder))
        try:
            save_head(place, spec, tensors)
            (place / _CONFIG_NAME).write_text(dump_config(self._config))
            run_alone(_MODULE, str(place), str(step), work=f"validation of step {step}")
            return _read_result(place / _RESULT_NAME)
        finally:
            shutil.rmtree(place, ignore_errors=True)
            if not any(self._folder.iterdir()):
                self._folder.rmdir()


def validate_directory(place: Path, step: int) -> ValidationResult:
    """The process's work: settings and head from ``place``, figures into it."""
    import yaml

    from mtp_train.settings import load_config
    from mtp_train.targets import open_target
    from runtime.cpu import set_threads

    config = load_config(yaml.safe_load((place / _CONFIG_NAME).read_text()))
    group = init_process_group(device=config.target.device)
    if group.device.type == "cpu":
        set_threads(config.runtime.num_threads)
    target = open_target(config.target, device=group.device, runtime=config.runtime)
    spec, tensors = load_head(place)
    result = build_validator(config, target=target, group=group)(step, spec, tensors)
    write_json_atomic(place / _RESULT_NAME, dataclasses.asdict(result))
    return result


def _read_result(path: Path) -> ValidationResult:
    raw: dict[str, Any] = json.loads(path.read_text())
    for name in ("rates", "conditional_rates"):
        raw[name] = tuple(raw[name])
    return ValidationResult(**raw)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    validate_directory(Path(sys.argv[1]), int(sys.argv[2]))
