"""`mtp reproduce RUN`: the commands that recreate a run, from its own records.

A command says what is not the default, and nothing else; each is composed again and compared with
the record before it is shown. What cannot be the same is said in comments: versions, settings that
are gone, settings that were not there yet.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.app import CONF_DIR, Stage, config_values, refuse, run_command
from mtp_train.config import Config, ReproduceConfig
from mtp_train.overrides import leaves, override, overrides_between
from mtp_train.recorded import RecordedStage, recorded_stages
from mtp_train.settings import ConfigError, known_keys, load_config

_NOT_SHOWN = ("compare", "reproduce")  # sections of commands that make nothing
_ANSWERS_BEFORE_RUN = {"-h", "--help", "--cfg", "-c", "--hydra-help"}


@dataclass(frozen=True)
class Recreation:
    """Commands in the order in which the stages ran first, and what will not be the same."""

    run: str
    commands: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        """A shell script."""
        return "\n".join([f"# {self.run}", *(f"# {note}" for note in self.notes), *self.commands])


def take_run(stage: Callable[..., int], arguments: Sequence[str]) -> tuple[Stage, list[str]]:
    """``RUN`` and ``--json`` as the settings that they stand for. Exits with 2 without a run."""
    found = ["reproduce.json=true" if a == "--json" else a for a in arguments]
    if found and not found[0].startswith("-") and _is_run(found[0]):
        found[0] = override("reproduce.run", found[0])
    elif not _ANSWERS_BEFORE_RUN & set(found) and not _names_run(found):
        refuse("reproduce: no run; name its directory first, as in mtp reproduce runs/mine")
    return stage, found


def run_reproduce(config: Config) -> int:
    """Print the commands to standard output."""
    from mtp_train.console import make_console

    out = make_console()
    try:
        recreation = recreate(config.reproduce)
    except ValueError as error:
        refuse(str(error), code=1)
    if config.reproduce.json:
        values = {
            "run": recreation.run,
            "commands": [shlex.split(line) for line in recreation.commands],
            "notes": recreation.notes,
        }
        out.file.write(json.dumps(values, ensure_ascii=False) + "\n")
    else:
        out.file.write(recreation.text + "\n")
    return 0


def recreate(settings: ReproduceConfig) -> Recreation:
    """Raises ``ValueError`` when there is no such run, or when its records are damaged."""
    root = Path(settings.run)
    if not root.is_dir():
        raise ValueError(f"{root}: there is no such run directory")
    stages = recorded_stages(root)
    if not stages:
        raise ValueError(
            f"{root}: events.jsonl names no stage that ran; this is no run directory, or nothing "
            "was done in it"
        )
    if not all(stage.settings for stage in stages):
        raise ValueError(f"{root}: neither events.jsonl nor config.yaml holds the settings")
    commands: list[str] = []
    about: dict[str, list[str]] = {}  # what there is to say, and of which stages
    for stage in stages:
        line, notes = _command(stage, settings)
        commands.append(line)
        for note in notes:
            about.setdefault(note, []).append(stage.stage)
    said = [f"{', '.join(dict.fromkeys(names))}: {note}" for note, names in about.items()]
    return Recreation(
        str(root),
        tuple(dict.fromkeys(commands)),
        (*_about_records(stages), *said, *_about_versions(root)),
    )


def command_words(
    stage: RecordedStage, wanted: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """The words of the command that runs ``stage`` with the settings ``wanted``."""
    name = stage.stage.replace("-", "_")
    if stage.num_ranks > 1:
        start = ["torchrun", "--nproc-per-node", str(stage.num_ranks), "-m", f"mtp_train.{name}"]
    else:
        start = ["mtp", stage.stage]
    return [*start, *overrides_between(defaults, wanted)]


def compose_values(stage: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What `mtp <stage> <overrides>` starts from, as nested values; not validated."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    name = f"mtp_{stage.replace('-', '_')}"
    if not (CONF_DIR / f"{name}.yaml").is_file():
        raise ValueError(f"events.jsonl names a stage {stage!r}, for which there is no command now")
    if GlobalHydra.instance().is_initialized():
        raw = hydra.compose(config_name=name, overrides=list(overrides))
    else:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            raw = hydra.compose(config_name=name, overrides=list(overrides))
    values = OmegaConf.to_container(raw, resolve=True)
    assert isinstance(values, dict), "a configuration is a mapping"
    return {str(key): value for key, value in values.items()}


def _command(stage: RecordedStage, settings: ReproduceConfig) -> tuple[str, list[str]]:
    wanted, notes = _present_settings(stage)
    run = dict(wanted["run"]) if isinstance(wanted.get("run"), Mapping) else {}
    run |= {"name": settings.name or run.get("name"), "root": settings.root or run.get("root")}
    wanted["run"] = run
    words = command_words(stage, wanted, compose_values(stage.stage))
    given = [word for word in words if "=" in word or word.startswith("~")]
    try:
        again = config_values(load_config(compose_values(stage.stage, given)))
    except ConfigError as error:
        notes.append(f"these settings are refused now: {error}")
    else:
        there = dict(leaves(again))
        changed = [key for key, value in leaves(wanted) if there.get(key) != value]
        if changed:
            notes.append(f"cannot be written as a command: {', '.join(changed)}")
    return shlex.join(words), notes


def _present_settings(stage: RecordedStage) -> tuple[dict[str, Any], list[str]]:
    """The recorded settings that exist now, and what became of the others."""
    now = set(known_keys())
    recorded = dict(leaves(stage.settings))
    gone = [key for key in recorded if key not in now]
    sections = {key.rpartition(".")[0] for key in now}
    added = [
        key
        for key in known_keys()
        if key not in recorded and key not in sections and key.partition(".")[0] not in _NOT_SHOWN
    ]
    notes = []
    if gone:
        notes.append(f"left out, for there is no such setting now: {_list(gone)}")
    if added:
        notes.append(f"not recorded, takes its default: {_list(added)}")
    wanted: dict[str, Any] = {}
    for key, value in recorded.items():
        if key not in now or key.partition(".")[0] in _NOT_SHOWN:
            continue
        *sections_of, last = key.split(".")
        place = wanted
        for name in sections_of:
            place = place.setdefault(name, {})
        place[last] = value
    return wanted, notes


def _about_records(stages: Sequence[RecordedStage]) -> list[str]:
    notes = []
    if not all(stage.is_own for stage in stages):
        notes.append(
            "recorded by a version that kept the settings of the last command only: every command "
            "has those"
        )
    notes += [f"{stage.stage} did not finish" for stage in stages if not stage.is_finished]
    return notes


def _about_versions(root: Path) -> list[str]:
    """Packages, Python and commit that are other ones now, each with the stages that had them."""
    from mtp_train.run_dir import describe_machine, git_revision, installed_packages, read_json

    file = root / "versions.json"
    recorded = read_json(file) if file.is_file() else {}
    commit = git_revision(Path(__file__).parent)
    now = {
        **installed_packages(),
        "Python": describe_machine()["python"],
        "commit": _commit(commit),
    }
    then: dict[tuple[str, str], list[str]] = {}
    for stage, entry in recorded.items():
        if not isinstance(entry, Mapping):
            continue
        packages, machine, git = (entry.get(name) for name in ("packages", "machine", "git"))
        versions = dict(packages) if isinstance(packages, Mapping) else {}
        if isinstance(machine, Mapping):
            versions["Python"] = machine.get("python")
        if isinstance(git, Mapping):
            versions["commit"] = _commit(git)
        for name, version in versions.items():
            if version != now.get(name):
                then.setdefault((name, str(version)), []).append(stage)
    notes = [
        f"{name} {version} ({', '.join(stages)}), now {now.get(name) or 'not installed'}"
        for (name, version), stages in then.items()
    ]
    return notes if recorded else ["versions.json is missing: versions are not known"]


def _commit(git: Mapping[str, Any]) -> str:
    commit = str(git.get("commit") or "unknown")[:10]
    return f"{commit} with local changes" if git.get("dirty") is True else commit


def _list(keys: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(keys[:most])
    return shown if len(keys) <= most else f"{shown} and {len(keys) - most} more"


def _is_run(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    known = {*known_keys(), "name", "root", "json", "experiment", "recipe"}
    return not equals or key.lstrip("+~") not in known


def _names_run(arguments: Sequence[str]) -> bool:
    return any(argument.startswith("reproduce.run=") for argument in arguments)


def main() -> None:
    import sys

    stage, sys.argv[1:] = take_run(run_reproduce, sys.argv[1:])
    run_command("reproduce", stage)


if __name__ == "__main__":
    main()
