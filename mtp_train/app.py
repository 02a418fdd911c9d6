"""One command = one Hydra app: compose, validate, then run a stage on the frozen configuration.

Exit codes: 0 done; 1 the stage refused (bad input found on the way, a rung failed); 2 the
configuration is wrong; 130 interrupted. The first two of these show one message, and keep the
traceback in the run directory.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mtp_train.config import Config
from mtp_train.errors import StageRefusedError
from mtp_train.settings import ConfigError, known_keys, load_config, unknown_key_message
from mtp_train.shorthands import expand_shorthands
from mtp_train.sweep import MemberFailedError, check_direction, member_config, objective

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
Stage = Callable[[Config], int]


def run_command(command: str, stage: Stage) -> NoReturn:
    """Run ``stage`` as the Hydra app ``conf/mtp_<command>.yaml`` on ``sys.argv``; never returns.

    ``stage`` takes the validated configuration and returns an exit code. It runs once, or once
    per member of a sweep (``--multirun``); a sweep goes on after a failing member and returns the
    highest code, of members in other processes the first that is not 0.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    sys.argv[1:] = _sweep_flag_first(expand_shorthands(command, sys.argv[1:]))
    is_sweep = bool({"-m", "--multirun"} & set(sys.argv[1:]))
    given = tuple(sys.argv[1:])
    codes: list[int] = []  # of members that ran in this process

    def job(raw: DictConfig) -> float | None:
        if not is_sweep:
            codes.append(_run_stage(_validated(raw, refuse), stage, in_sweep=False))
            return None
        config = member_config(_validated(raw, fail_member), raw, given)
        try:
            check_direction()
            code = _run_stage(config, stage, in_sweep=True)
            if not code:
                codes.append(0)
                return objective(command, config)
        except ConfigError as error:
            fail_member(str(error))
        codes.append(code)
        raise MemberFailedError(code)

    def fail_member(message: str) -> NoReturn:
        _tell(message)
        codes.append(2)
        raise MemberFailedError(2)

    app = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=f"mtp_{command}")
    try:
        with _errors_reach_us():
            app(job)()
    except MemberFailedError as error:  # the first one; the others ran as well
        codes.append(error.code)
    except (HydraException, OmegaConfBaseException) as error:
        refuse(_explain(error))
    except BrokenPipeError:  # `mtp train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(max(codes, default=0))


def refuse(message: str, *, code: int = 2) -> NoReturn:
    """Print one message (on the first rank only) and exit."""
    _tell(message)
    sys.exit(code)


def _tell(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"mtp: {message}\n")


def _sweep_flag_first(arguments: list[str]) -> list[str]:
    """``-m`` in front: Hydra's parser takes no option after the first override."""
    flags = [a for a in arguments if a in ("-m", "--multirun")]
    return flags + [a for a in arguments if a not in flags]


def config_values(config: Config) -> dict[str, Any]:
    """The configuration as plain nested values, which ``load_config`` takes."""
    from mtp_train.events import to_jsonable

    values: dict[str, Any] = to_jsonable(config)
    values["data"]["chat_template_kwargs"] = dict(values["data"]["chat_template_kwargs"])
    values["engine"]["args"] = dict(values["engine"]["args"])
    return values


def dump_config(config: Config) -> str:
    """The configuration as YAML that ``--config-dir``/overrides can give back."""
    import yaml

    return yaml.safe_dump(config_values(config), sort_keys=False, allow_unicode=True)


def _validated(raw: DictConfig, fail: Callable[[str], NoReturn]) -> Config:
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(raw, resolve=True)
    try:
        return load_config(values)
    except ConfigError as error:
        fail(str(error))


def _run_stage(config: Config, stage: Stage, *, in_sweep: bool) -> int:
    from mtp_train.run_dir import RunDirectory

    try:
        return stage(config)
    except KeyboardInterrupt:
        refuse("interrupted; the same command goes on from here", code=130)
    except (ValueError, StageRefusedError) as error:
        log = RunDirectory.from_config(config).error_file
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc())
        message = f"{error} (details: {log})"
        if not in_sweep:
            refuse(message, code=1)
        sys.stderr.write(f"mtp: {config.run.name}: {message}\n")
        return 1


@contextmanager
def _errors_reach_us() -> Iterator[None]:
    """Hydra prints composition errors its own way unless this variable is set; then it raises."""
    name = "HYDRA_FULL_ERROR"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _explain(error: BaseException) -> str:
    """Hydra's complaint in our words where the user mistyped a key, else Hydra's own."""
    text = str(error).partition("\nConfig search path:")[0].strip()
    unknown = re.match(r"Could not override '([^']+)'\.\s+(?:To append|No match)", text)
    if not unknown:
        return text
    key = unknown.group(1)
    if key in known_keys():  # a mapping with free keys is closed to Hydra
        return f"{key}: add entries one by one, as in +{key}.name=value"
    return unknown_key_message(key)
