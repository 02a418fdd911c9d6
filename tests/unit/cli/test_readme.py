"""The README's commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtp_train.cli import COMMANDS

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def code_of(text: str) -> str:
    """Fenced blocks without what programs print, and code spans."""
    fences = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines = [line for fence in fences for line in fence.splitlines()]
    return "\n".join(line for line in [*lines, *spans] if not line.startswith("mtp:"))


def unknown_commands(text: str) -> list[str]:
    """``mtp`` commands, modules and ``make`` targets in code that do not exist."""
    code = code_of(text)
    names = {word for c in COMMANDS for word in (c.name, c.typed.split()[0])}
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, flags=re.M))
    used = re.findall(r"\bmtp ([a-z]+(?:-[a-z]+)*)|\bmtp_train\.([a-z_]+)(?=[ `\n])", code)
    modules = {path.stem for path in (ROOT / "mtp_train").glob("*.py")}
    wrong = [f"mtp {name}" for name, _ in used if name and name not in names]
    wrong += [f"mtp_train.{name}" for _, name in used if name and name not in names | modules]
    made = re.findall(r"\bmake ([a-z]+)", code)
    return wrong + [f"make {name}" for name in made if name not in targets]


def test_every_command_of_the_readme_exists() -> None:
    assert "mtp validate" in code_of(README)
    assert "make demo" in code_of(README)
    assert unknown_commands(README) == []
    for command in COMMANDS:
        assert f"| `mtp {command.typed}` |" in README


@pytest.mark.parametrize(
    "text",
    [
        "```\nmtp evaluate run.name=a\n```",
        "`make interp`",
        "```bash\nmake tset\n```",
        "```\npython -m mtp_train.nothing --help\n```",
    ],
)
def test_an_unknown_command_would_be_found(text: str) -> None:
    assert len(unknown_commands(text)) == 1


def test_paths_of_the_readme_exist() -> None:
    tree = next(
        block
        for block in re.findall(r"^```\n(.*?)^```", README, flags=re.M | re.S)
        if "conf/" in block
    )
    folder = ROOT
    for line in tree.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else ROOT / name
        assert ((folder if line.startswith(" ") else ROOT) / name).exists(), name
