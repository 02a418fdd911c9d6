"""The commands of the documents are valid settings of commands that exist; links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep
from hydra.errors import HydraException

from mtp_train.cli import COMMANDS, find_command
from mtp_train.config import Config
from mtp_train.shorthands import expand_shorthands
from tests.unit.cli.test_commands import compose
from tests.unit.cli.test_readme import unknown_commands

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BY_NAME = {command.name: command for command in COMMANDS}


def shell_lines(text: str) -> Iterator[str]:
    """Commands in fenced blocks, continued lines joined."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
        if language in ("", "bash"):
            yield from block.replace("\\\n", " ").splitlines()


def commands_of(text: str) -> list[tuple[str, list[str]]]:
    """Name and settings of each `mtp NAME …`, with the variables set above it filled in."""
    variables: dict[str, str] = {}
    found = []
    for line in shell_lines(text):
        assigned = re.match(r'([A-Z]+)="([^"]*)"$', line)
        if assigned:
            variables[assigned.group(1)] = assigned.group(2)
            continue
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        if line.startswith("mtp "):
            words = shlex.split(line, comments=True)
            command, rest = find_command(words[1:])
            found.append((command.name if command else words[1], rest))
    return found


def first_member(arguments: list[str]) -> list[str]:
    """Of a sweep: its first values, without what launcher and sweeper are told."""
    if "-m" not in arguments:
        return arguments
    found = []
    for argument in arguments:
        if argument == "-m" or argument.startswith("hydra"):
            continue
        override = OverridesParser.create().parse_override(argument)
        value = override.value()
        if isinstance(value, ChoiceSweep):
            argument = f"{override.key_or_group}={value.list[0]}"
        elif isinstance(value, IntervalSweep):
            argument = f"{override.key_or_group}={value.start}"
        found.append(argument)
    return found


def parse(name: str, arguments: list[str]) -> Config:
    command = BY_NAME[name]
    _, settings = command.prepare(command.stage, first_member(arguments))
    return compose(name, expand_shorthands(name, settings))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_of_a_document_is_valid(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("mine", "long"):  # what members of a sweep share
        (tmp_path / "runs" / run / "data").mkdir(parents=True)
    (tmp_path / "heads" / "theirs").mkdir(parents=True)  # trained elsewhere
    monkeypatch.chdir(tmp_path)
    text = document.read_text(encoding="utf-8")
    assert unknown_commands(text) == []
    for name, arguments in commands_of(text):
        if not {"--help", "--version"} & set(arguments):
            parse(name, arguments)


def test_the_walk_goes_through_every_stage() -> None:
    text = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    stages = ["data", "precompute", "train", "validate", "export"]
    given = [(name, parse(name, rest)) for name, rest in commands_of(text) if name in stages]
    assert list(dict.fromkeys(name for name, _ in given)) == stages
    assert len({(config.run, config.target, config.runtime) for _, config in given}) == 1
    with_features = ("precompute", "train", "validate")
    assert len({config.features.codec for name, config in given if name in with_features}) == 1


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (document.parent / link).exists(), link


@pytest.mark.parametrize(
    "line", ["mtp train run.name=a target.path=m trainer.epoch=3", "mtp data $T data.sources=[x]"]
)
def test_a_wrong_command_would_be_found(line: str) -> None:
    ((name, arguments),) = commands_of(f"```bash\n{line}\n```")
    with pytest.raises(HydraException):
        parse(name, arguments)
