"""The 8-GPU script: each command it would run is a valid command of this version."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from mtp_train.cli import COMMANDS
from mtp_train.shorthands import expand_shorthands
from tests.unit.cli.test_commands import compose

SCRIPT = Path(__file__).parents[3] / "launch" / "torchrun_8xh100.sh"
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    assert BASH is not None
    return subprocess.run(
        [BASH, str(SCRIPT), *arguments],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def commands_of(*arguments: str, **variables: str) -> list[list[str]]:
    settings = {
        "TARGET": "/models/my llama",
        "RUN": "mine",
        "SOURCES": "a.jsonl,sharegpt",
        "DRY_RUN": "1",
    }
    done = run_script(*arguments, **(settings | variables))
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def split_command(words: list[str]) -> tuple[str, list[str]]:
    """Name and settings of `mtp NAME …` or `torchrun … -m mtp_train.NAME …`."""
    if words[0] == "mtp":
        return words[1], words[2:]
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words[1:])
    assert given.module
    return given.training_script.removeprefix("mtp_train."), given.training_script_args


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ((), {}),
        (("seed=7", "trainer.epochs=5"), {"CODEC": "fp8", "STORE": "/fast/store", "K": "2"}),
    ],
)
def test_each_command_is_one_of_ours_with_valid_settings(
    arguments: tuple[str, ...], variables: dict[str, str]
) -> None:
    names = []
    known = {command.name for command in COMMANDS}
    for words in commands_of(*arguments, **variables):
        name, settings = split_command(words)
        names.append(name)
        assert name in known
        config = compose(name, expand_shorthands(name, settings))
        assert config.target.path == "/models/my llama"
        assert config.run.name == "mine"
        assert config.validate.k == int(variables.get("K", "3"))
        assert config.features.codec == ("fp8_e4m3" if "CODEC" in variables else "bf16")
        assert config.features.path == variables.get("STORE", "")
        assert config.seed == (7 if arguments else 1234)
        if name == "train":
            assert config.loss.num_unroll_steps == config.validate.k
            assert config.trainer.epochs == (5 if arguments else 2), "own settings come last"
        if name == "data":
            assert config.data.sources == ("a.jsonl", "sharegpt")
            assert config.data.regenerate.enabled
    stages = ["data", "precompute", "train", "validate", "export"]
    assert [name for name in names if name in stages] == stages


def test_the_parallel_stages_run_on_every_gpu() -> None:
    parallel = {
        split_command(words)[0]: words[words.index("--nproc-per-node") + 1]
        for words in commands_of(GPUS="4")
        if words[0] == "torchrun"
    }
    assert parallel == {"precompute": "4", "train": "4"}


def test_an_engine_is_asked_after_the_export_where_there_is_one() -> None:
    *_, before, last = commands_of(VLLM_PYTHON="/envs/vllm/bin/python")
    assert split_command(before)[0] == "export"
    name, settings = split_command(last)
    config = compose(name, settings)
    assert (name, config.validate.rungs) == ("validate", ("P6",))
    assert (config.engine.kind, config.engine.python) == ("vllm", "/envs/vllm/bin/python")


def test_a_missing_variable_is_named() -> None:
    done = run_script(RUN="x", SOURCES="y", DRY_RUN="1")
    assert done.returncode != 0
    assert "TARGET=/models/my-llama" in done.stderr


def test_a_stage_that_fails_stops_the_script(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    script = tmp_path / "launch" / SCRIPT.name
    shutil.copy(SCRIPT, script)
    fake = tmp_path / ".venv" / "bin" / "mtp"
    fake.parent.mkdir(parents=True)
    fake.write_text('#!/bin/sh\n[ "$1" != data ]\n')
    fake.chmod(0o755)
    assert BASH is not None
    done = subprocess.run(
        [BASH, str(script)],
        env={"PATH": os.environ["PATH"], "TARGET": "t", "RUN": "r", "SOURCES": "s"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["doctor", "preflight", "data"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
