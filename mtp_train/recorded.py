"""What a run directory says about how it was made: the settings of every stage that ran.

Each start of a stage is an event with the whole configuration, so that a later command with other
settings takes nothing away. Runs of older versions have ``config.yaml`` only, which is that of the
latest command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_train.events import read_events

# Which stage's settings decide a section; the next ones stand in for a stage that ran elsewhere.
_DECIDED_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "target": ("train", "precompute", "data"),
        "data": ("data", "precompute", "train"),
        "features": ("precompute", "train"),
        "seed": ("train",),
        "head": ("train",),
        "loss": ("train",),
        "trainer": ("train",),
        "deepspeed": ("train",),
        "validate": ("validate",),
        "runtime": ("validate", "precompute"),
        "engine": ("validate",),
        "export": ("export",),
        "hot_vocab": ("hot-vocab",),
    }
)
_ENGINE_RUNG = ["P6"]  # climbed by itself: says nothing about the ladder


@dataclass(frozen=True)
class RecordedStage:
    """One stage and the settings (nested values) that it ran with.

    ``is_own``: recorded by the stage itself, not taken from the run's ``config.yaml``.
    """

    stage: str
    settings: Mapping[str, Any] = field(repr=False)
    num_ranks: int = 1
    is_finished: bool = False
    is_own: bool = True


def read_settings(root: Path) -> dict[str, Any]:
    """``config.yaml`` of a run; empty where there is none. Raises ``ValueError`` naming a damaged
    one.
    """
    file = root / "config.yaml"
    if not file.is_file():
        return {}
    values = read_yaml(file)
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected settings, got {type(values).__name__}")
    return values


def read_yaml(file: Path) -> Any:
    """The content of a YAML file. Raises ``ValueError`` naming a damaged one."""
    import yaml

    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid YAML ({error})") from error


def recorded_stages(root: Path) -> tuple[RecordedStage, ...]:
    """Stages in order of their first start, each once per set of settings; refused ones are none.

    Raises ``ValueError`` naming a damaged ``config.yaml``.
    """
    fallback = read_settings(root)
    found: dict[tuple[str, str], RecordedStage] = {}
    latest: dict[str, tuple[str, str]] = {}
    for event in read_events(root / "events.jsonl"):
        stage, kind = str(event.get("stage")), event.get("event")
        if kind == "stage_started":
            own = event.get("settings")
            settings = own if isinstance(own, dict) else fallback
            key = (stage, json.dumps(settings, sort_keys=True))
            latest[stage] = key
            started = RecordedStage(
                stage,
                settings,
                num_ranks=_whole(event.get("world_size")),
                is_own=isinstance(own, dict),
            )
            known = found.get(key)
            found[key] = replace(known, num_ranks=started.num_ranks) if known else started
        elif kind == "stage_refused" and stage in latest:
            key = latest[stage]
            if key in found and not found[key].is_finished:
                del found[key]
        elif kind == "stage_finished" and latest.get(stage) in found:
            key = latest[stage]
            found[key] = replace(found[key], is_finished=True)
    return tuple(found.values())


def deciding_settings(root: Path) -> dict[str, Any]:
    """The settings that the run's head and figures depend on: each section as the stage had it
    that works with it. Sections that decide nothing are left out.
    """
    stages = recorded_stages(root)
    by_stage = {stage.stage: stage.settings for stage in stages if not _is_engine_only(stage)}
    fallback = read_settings(root)
    found: dict[str, Any] = {}
    for section, names in _DECIDED_BY.items():
        sources = [by_stage[name] for name in names if name in by_stage]
        for source in (*sources, fallback):
            if section in source:
                found[section] = source[section]
                break
    return found


def _is_engine_only(stage: RecordedStage) -> bool:
    validate = stage.settings.get("validate")
    rungs = validate.get("rungs") if isinstance(validate, Mapping) else None
    return stage.stage == "validate" and rungs == _ENGINE_RUNG


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1
