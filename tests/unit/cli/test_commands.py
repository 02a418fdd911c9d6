"""The commands as a user starts them: help, settings, sweeps, refusals."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mtp_train import app, cli
from mtp_train.bench.command import take_lists
from mtp_train.config import Config
from mtp_train.errors import StageRefusedError
from mtp_train.settings import load_config
from mtp_train.shorthands import expand_shorthands

NAMES = [command.name for command in cli.COMMANDS]
RECIPES = sorted(path.stem for path in (app.CONF_DIR / "experiment").iterdir())
TYPED = {command.name: command.typed for command in cli.COMMANDS}


def run_mtp(
    *arguments: str, cwd: Path, rank: int | None = None
) -> subprocess.CompletedProcess[str]:
    import os

    environment = dict(os.environ, PYTHONPATH=str(app.CONF_DIR.parent), COLUMNS="120")
    if rank is not None:
        environment["RANK"] = str(rank)
    return subprocess.run(
        [sys.executable, "-m", "mtp_train.cli", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def help_examples(command: str) -> list[list[str]]:
    """Argument lists of every `mtp …` line in a command's help."""
    header = yaml.safe_load((app.CONF_DIR / f"mtp_{command}.yaml").read_text())["hydra"]["help"][
        "header"
    ]
    lines = header.partition("Examples")[2].replace("\\\n", " ").splitlines()
    commands = [shlex.split(line.strip()) for line in lines if not line.strip().startswith("#")]
    return [words for words in commands if words]


def test_overview_lists_every_command(tmp_path: Path) -> None:
    done = run_mtp(cwd=tmp_path)
    assert done.returncode == 0
    for name in NAMES:
        assert f"mtp {TYPED[name]}" in done.stdout
    assert run_mtp("--help", cwd=tmp_path).stdout == done.stdout


def test_unknown_command_is_refused_with_the_close_one(tmp_path: Path) -> None:
    done = run_mtp("trian", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "mtp: trian: unknown command; did you mean train?\n",
    )


@pytest.mark.parametrize("name", NAMES)
def test_help_teaches_by_example_and_starts_fast(name: str, tmp_path: Path) -> None:
    started = time.monotonic()
    done = run_mtp(*TYPED[name].split(), "--help", cwd=tmp_path)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    assert f"Usage: mtp {TYPED[name]}" in done.stdout
    assert len(help_examples(name)) >= 2
    assert "\n  # " in done.stdout
    assert f"experiment: {', '.join(RECIPES)}" in " ".join(done.stdout.split())
    assert seconds < 10, "heavy imports crept in"  # 0.4 s on an idle core
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_example_of_the_help_is_a_valid_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "mine" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for words in help_examples(name):
        arguments = [w for w in words if "=" in w and not w.startswith("-")]
        if words[0] == "torchrun":
            assert f"mtp_train.{name}" in words
        else:
            typed = TYPED[name].split()
            assert words[: 1 + len(typed)] == ["mtp", *typed]
        arguments = [re.sub(r"^(trainer\.learning_rate=[^,]+),.*", r"\1", a) for a in arguments]
        if name == "bench":
            _, arguments = take_lists(lambda config: 0, arguments)
        compose(name, expand_shorthands(name, arguments))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_valid_configuration(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("norms-short_chats", "long"):  # whose token sets norms and learning_curve share
        (tmp_path / "runs" / run / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config = compose("train", [f"experiment={recipe}", "target.path=/models/llama"])
    assert config.run.name == recipe


@pytest.mark.parametrize(
    "option",
    [
        f"{folder.name}={file.stem}"
        for folder in sorted(app.CONF_DIR.iterdir())
        if folder.is_dir() and folder.name != "experiment"
        for file in sorted(folder.iterdir())
    ],
)
def test_every_option_is_a_valid_configuration(option: str) -> None:
    needs = {
        "engine=vllm": ["engine.python=python3"],
        "head=eagle3": ["loss=eagle3"],
        "head=medusa": ["loss=medusa"],
    }
    given = [option, "run.name=x", "target.path=/m", "data.sources=[x]"]
    compose("train", [*given, *needs.get(option, [])])


def test_demo_recipe_stays_within_its_token_budget() -> None:
    config = compose("demo", [])
    assert config.run.name == "demo"
    assert 0 < config.data.max_tokens_total <= 250_000
    assert config.features.codec == "fp8_e4m3"
    assert config.validate.sets[0] == "mtbench"
    assert config.validate.max_prompts == 0 or config.validate.max_prompts >= 80, (
        "MT-Bench is whole"
    )
    assert 0 < config.validate.max_further_prompts <= 40


def test_cfg_job_prints_settings_and_writes_nothing(tmp_path: Path) -> None:
    done = run_mtp("train", "experiment=demo", "trainer.epochs=9", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert printed["trainer"]["epochs"] == 9
    assert printed["run"]["name"] == "demo"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.epoch=3"], "mtp: trainer.epoch: unknown key; did you mean trainer.epochs?\n"),
        (
            ["run.name=x", "target.path=m", "trainer.epochs=x"],
            "mtp: trainer.epochs='x': expected a whole number, got text\n",
        ),
        (
            ["run.name=x", "target.path=m", "+new=1"],
            "mtp: new: unknown key; the configuration has run, ",
        ),
        (["run.name=x"], "mtp: target.path: not set; "),
        (
            ["experiment=dem"],
            "mtp: In 'config': Could not find 'experiment/dem'\n\nAvailable options",
        ),
        (
            ["data.chat_template_kwargs={a:b}"],
            "mtp: data.chat_template_kwargs: add entries one by one, as in +data.",
        ),
    ],
)
def test_a_wrong_setting_costs_one_message_and_exit_code_two(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    done = run_mtp("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr + done.stdout
    assert "Config search path" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_rank_complains(tmp_path: Path) -> None:
    done = run_mtp("train", "trainer.epoch=3", cwd=tmp_path, rank=1)
    assert (done.returncode, done.stderr) == (2, "")


def test_a_sweep_gives_every_member_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, _ = _sweep(tmp_path, monkeypatch, "loss=hot,full", "trainer.learning_rate=1e-3,2e-3")
    assert sorted(names) == [
        "x-loss=full-learning_rate=0.001",
        "x-loss=full-learning_rate=0.002",
        "x-loss=hot-learning_rate=0.001",
        "x-loss=hot-learning_rate=0.002",
    ]


def test_a_sweep_over_run_names_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, _ = _sweep(tmp_path, monkeypatch, "run.name=a,b")
    assert names == ["a", "b"]


def test_a_sweep_goes_on_after_a_failure_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names, code = _sweep(tmp_path, monkeypatch, "run.name=bad,good")
    assert (names, code) == (["bad", "good"], 1)
    assert "mtp: bad: no such model" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ValueError, StageRefusedError])
def test_a_refusal_on_the_way_is_one_message_with_the_traceback_on_disk(
    kind: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names, code = _start(monkeypatch, tmp_path, ["run.name=bad", "target.path=m"], kind)
    assert (names, code) == (["bad"], 1)
    error = capsys.readouterr().err
    assert error == "mtp: no such model (details: runs/bad/error.log)\n"
    assert "Traceback" in (tmp_path / "runs" / "bad" / "error.log").read_text()


def compose(command: str, arguments: list[str]) -> Config:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, open_dict

    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(app.CONF_DIR)):
        raw = hydra.compose(
            config_name=f"mtp_{command}", overrides=arguments, return_hydra_config=True
        )
    HydraConfig.instance().set_config(raw)  # what ${hydra:...} reads in a command
    with open_dict(raw):
        del raw["hydra"]
    values = OmegaConf.to_container(raw, resolve=True)
    assert isinstance(values, dict)
    return load_config({str(key): value for key, value in values.items()})


def test_the_sweep_flag_may_stand_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["target.path=m", "run.name=a,b", "-m"]
    assert _start(monkeypatch, tmp_path, arguments) == (["a", "b"], 0)


def test_a_wrong_value_costs_a_sweep_one_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names, code = _sweep(tmp_path, monkeypatch, "run.name=x", "trainer.learning_rate=abc,0.001")
    assert len(names) == 1
    assert code == 2
    assert "trainer.learning_rate" in capsys.readouterr().err


def _sweep(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[list[str], int | str | None]:
    given = ["-m", "run.name=x", "target.path=m", *arguments]
    if any(a.startswith("run.name=") for a in arguments):
        given.remove("run.name=x")
    return _start(monkeypatch, cwd, given)


def _start(
    monkeypatch: pytest.MonkeyPatch,
    cwd: Path,
    arguments: list[str],
    kind: type[Exception] = ValueError,
) -> tuple[list[str], int | str | None]:
    names: list[str] = []

    def stage(config: Config) -> int:
        names.append(config.run.name)
        if config.run.name == "bad":
            raise kind("no such model")
        return 0

    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["mtp train", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.run_command("train", stage)
    return names, ended.value.code
