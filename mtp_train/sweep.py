"""Members of a Hydra sweep: which run each of them is, and what a sweeper is told about it.

A member may run in another process (launchers such as joblib or submitit), so that nothing it
leaves in memory comes back: it returns the objective, or raises :class:`MemberFailedError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mtp_train.config import Config
from mtp_train.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_NOT_IN_NAMES = ("run.root", "run.group")
_MEASURES: Mapping[str, str] = MappingProxyType(
    {"train": "checkpoints/train.json", "validate": "parity.json", "demo": "parity.json"}
)


class MemberFailedError(Exception):
    """One member ended with an exit code other than 0; it has said why already."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def member_config(config: Config, raw: DictConfig, given: Sequence[str]) -> Config:
    """``config`` with a run of its own for this member, and the sweep's name as its group.

    ``given``: the command line. Both come from the settings that the sweep varies, wherever those
    are written: on the command line, or in the sweeper's configuration.
    """
    swept = _swept_keys(given)
    if "run.name" in swept:
        return config
    name = _member_name(config, raw, swept)
    group = config.run.group or config.run.name
    return replace(config, run=replace(config.run, name=name, group=group))


def objective(command: str, config: Config) -> float | None:
    """Tokens per step as the command measured them; ``None`` for one that measures nothing.

    `mtp train`: the best validation, on held-out rows. `mtp validate` and `mtp demo`: the first
    prompt set of ``validate.sets`` at ``validate.k``. Raises :class:`ConfigError` when a sweeper
    that searches would get no figure.
    """
    value = _measured_tau(command, config)
    if value is None and _searching_direction() is not None:
        raise ConfigError(
            f"mtp {command} measured no tokens per step for the sweeper: search with mtp train and "
            "trainer.validate_every above 0, or with mtp validate or mtp demo"
        )
    return value


def check_direction() -> None:
    """Raises :class:`ConfigError` for a sweeper that would look for the worst head."""
    direction = _searching_direction()
    if direction not in (None, "maximize"):
        raise ConfigError(
            f"hydra.sweeper.direction={direction}: the objective is tokens per step, and more of "
            "them are better; set hydra.sweeper.direction=maximize"
        )


def _measured_tau(command: str, config: Config) -> float | None:
    from mtp_train.run_dir import RunDirectory, read_json

    if command not in _MEASURES:
        return None
    file = RunDirectory.from_config(config).root / _MEASURES[command]
    if not file.is_file():
        return None
    content = read_json(file)
    if command == "train":
        best = content.get("outputs", {}).get("best")
        return float(best["tau"]) if best else None
    wanted = {
        "prompt_set": config.validate.sets[0],
        "k": config.validate.k,
        "temperature": config.validate.temperature,
    }
    rows: list[Mapping[str, Any]] = content.get("acceptance", [])
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            return float(row["tau"])
    return None


def _searching_direction() -> str | None:
    """``minimize`` or ``maximize`` of a sweeper that looks for an optimum; else ``None``."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    if not HydraConfig.initialized():
        return None
    sweeper: Any = HydraConfig.get().sweeper
    direction = OmegaConf.select(sweeper, "direction")
    return None if direction is None else str(getattr(direction, "name", direction))


def _member_name(config: Config, raw: DictConfig, swept: frozenset[str]) -> str:
    """The sweep's name, and what is different about this member."""
    from omegaconf import OmegaConf

    parts = []
    for key in sorted(swept):
        if key in _NOT_IN_NAMES:
            continue
        value = OmegaConf.select(raw, key)
        if OmegaConf.is_dict(value):  # a group was swept: its options differ in content, not name
            value = _group_choice(key)
        elif OmegaConf.is_list(value):
            value = "+".join(map(str, value))
        parts.append(f"{key.rpartition('.')[2]}={re.sub(r'[^A-Za-z0-9._+-]+', '-', str(value))}")
    return "-".join([config.run.name, *parts])


def _group_choice(group: str) -> str:
    from hydra.core.hydra_config import HydraConfig

    return str(HydraConfig.get().runtime.choices[group])


def _swept_keys(given: Sequence[str]) -> frozenset[str]:
    """Keys of this member that the command line does not fix. Hydra's own are none."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    fixed: set[str] = set()
    varied: set[str] = set()
    for argument in given:
        if argument.startswith("-"):
            continue
        try:
            override = parser.parse_override(argument)
        except HydraException:
            continue  # the value of an option
        kind = varied if override.is_sweep_override() else fixed
        kind.add(override.key_or_group)
    own = {parser.parse_override(text).key_or_group for text in HydraConfig.get().overrides.task}
    return frozenset(own - (fixed - varied))
