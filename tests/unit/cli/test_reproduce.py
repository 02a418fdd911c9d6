"""`mtp reproduce`: what it prints recreates the run."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mtp_train import app, cli
from mtp_train.app import config_values
from mtp_train.config import Config, ReproduceConfig
from mtp_train.events import EventLog
from mtp_train.overrides import leaves, override
from mtp_train.recorded import deciding_settings, recorded_stages
from mtp_train.reproduce import compose_values, recreate
from mtp_train.run_dir import RunDirectory
from mtp_train.settings import load_config
from mtp_train.stages import run_data
from tests.unit.cli.byte_target import save_byte_target
from tests.unit.cli.test_commands import compose
from tests.unit.cli.test_stages import make_config

TEXTS = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=12)
VALUES = st.one_of(TEXTS, st.booleans(), st.integers(-9, 9), st.floats(-1e6, 1e6, width=32))


def record(
    root: Path, stage: str, config: Config | None, *, finished: bool = True, **more: Any
) -> None:
    with EventLog(root / "events.jsonl", stage=stage) as events:
        own = {} if config is None else {"settings": config_values(config)}
        events.write("stage_started", **({"world_size": 1} | own | more))
        if finished:
            events.write("stage_finished", wall_s=1.0)


def run_of(root: Path, **changes: Any) -> Config:
    values = {"run": {"name": root.name, "root": str(root.parent)}, "target": {"path": "/m"}}
    return load_config(values | changes)


def again(root: Path, /, **new: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    recreation = recreate(ReproduceConfig(run=str(root), **new))
    return recreation.commands, recreation.notes


@given(value=st.one_of(VALUES, st.lists(VALUES, max_size=4)))
@settings(max_examples=300, deadline=None)
def test_hydra_reads_every_value_back_unchanged(value: Any) -> None:
    parsed = OverridesParser.create().parse_override(override("key", value))
    read = OmegaConf.to_container(OmegaConf.create({"key": _plain(parsed.value())}), resolve=True)
    assert isinstance(read, dict)
    assert read["key"] == value
    assert type(read["key"]) is type(value)


def _plain(value: Any) -> Any:
    """As Hydra hands values on: quoted texts lose their quotes."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return getattr(value, "text", value)


@pytest.mark.parametrize(
    "text",
    [
        "1e-3",
        "true",
        "null",
        "a b",
        "it's",
        "${run.name}",
        "C:\\x\\",
        "",
        "a=b,c",
        "[1]",
        "nan",
        "ü",
        "~x",
        "*",
    ],
)
def test_texts_that_look_like_something_else_stay_texts(text: str) -> None:
    config = compose(
        "train", ["run.name=x", "target.path=m", override("data.regenerate.model", text)]
    )
    assert config.data.regenerate.model == text


def test_a_command_says_only_what_is_not_the_default(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    record(
        root,
        "train",
        run_of(root, trainer={"learning_rate": 0.003}, head={"norms": {"final": False}}),
    )
    (command,), _ = again(root)
    assert shlex.split(command) == [
        *("mtp", "train", "run.name=mine", f"run.root={tmp_path}", "target.path=/m"),
        *("head.norms.final=false", "trainer.learning_rate=0.003"),
    ]


def test_stages_come_in_the_order_in_which_they_ran_and_once_per_settings(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    first, other = run_of(root), run_of(root, validate={"k": 2})
    for stage, config in (
        ("data", first),
        ("train", first),
        ("train", first),
        ("validate", first),
        ("validate", other),
    ):
        record(root, stage, config)
    commands, notes = again(root)
    assert [line.split()[1] for line in commands] == ["data", "train", "validate", "validate"]
    assert "validate.k=2" in commands[3]
    assert not any("did not finish" in note for note in notes)


def test_a_refused_start_is_not_part_of_the_run(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    record(root, "train", run_of(root))
    with EventLog(root / "events.jsonl", stage="train") as events:
        events.write("stage_started", settings=config_values(run_of(root, seed=7)))
        events.write("stage_refused")
    assert len(again(root)[0]) == 1


def test_several_ranks_and_names_with_hyphens_are_started_as_they_were(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    record(root, "train", run_of(root), world_size=4, finished=False)
    record(root, "hot-vocab", run_of(root))
    commands, notes = again(root)
    assert commands[0].startswith("torchrun --nproc-per-node 4 -m mtp_train.train run.name=mine")
    assert commands[1].startswith("mtp hot-vocab run.name=mine")
    assert "train did not finish" in notes


def test_free_mappings_are_given_entry_by_entry(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    config = run_of(
        root, data={"sources": ["a b.jsonl"], "chat_template_kwargs": {"enable_thinking": "false"}}
    )
    record(root, "data", config)
    (command,), notes = again(root)
    assert not any("cannot be written" in note or "refused" in note for note in notes)
    words = shlex.split(command)
    assert "+data.chat_template_kwargs.enable_thinking='false'" in words
    assert compose("data", words[2:]) == config


def test_the_run_can_be_given_another_place(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    record(root, "data", run_of(root))
    (command,), _ = again(root, name="again", root="elsewhere")
    assert "run.name=again run.root=elsewhere" in command


def test_settings_that_are_gone_or_new_are_named(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    values = config_values(run_of(root))
    values["trainer"]["momentum"] = 0.9
    del values["head"]["norms"]
    with EventLog(root / "events.jsonl", stage="train") as events:
        events.write("stage_started", settings=values)
    (command,), notes = again(root)
    assert "momentum" not in command
    assert "train: left out, for there is no such setting now: trainer.momentum" in notes
    assert any(
        n.startswith("train: not recorded, takes its default: head.norms.enorm") for n in notes
    )


def test_versions_that_are_others_now_are_named_with_their_stages(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    config = run_of(root)
    run = RunDirectory.from_config(config)
    for stage in ("data", "train"):
        record(root, stage, config)
        run.record_versions(stage)
    assert again(root)[1] == ()
    versions = json.loads(run.versions_file.read_text())
    torch = versions["train"]["packages"]["torch"]
    versions["data"]["packages"]["torch"] = versions["train"]["packages"]["torch"] = "1.0"
    versions["train"]["git"] = {"commit": "f" * 40, "dirty": True}
    run.versions_file.write_text(json.dumps(versions))
    notes = again(root)[1]
    assert notes[0] == f"torch 1.0 (data, train), now {torch}"
    assert notes[1].startswith("commit ffffffffff with local changes (train), now ")


def test_a_run_of_an_older_version_has_the_settings_of_its_last_command(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    record(root, "data", None)
    record(root, "train", None)
    (root / "config.yaml").write_text(app.dump_config(run_of(root, seed=5)))
    commands, notes = again(root)
    assert [line.split()[1] for line in commands] == ["data", "train"]
    assert all("seed=5" in line for line in commands)
    assert notes[0].startswith("recorded by a version that kept the settings of the last command")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: None, "there is no such run directory"),
        (lambda root: root.mkdir(), "names no stage that ran"),
        (lambda root: record(root, "train", None), "neither events.jsonl nor config.yaml"),
        (
            lambda root: (record(root, "train", None), (root / "config.yaml").write_text(": [")),
            "config.yaml: not valid YAML",
        ),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, prepare: Any, message: str) -> None:
    prepare(tmp_path / "mine")
    with pytest.raises(ValueError, match=message):
        again(tmp_path / "mine")


def test_a_section_is_that_of_the_stage_which_works_with_it(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    record(root, "data", run_of(root, data={"min_tokens": 3}))
    record(root, "train", run_of(root, trainer={"epochs": 5}))
    record(root, "validate", run_of(root, validate={"k": 2}))
    record(
        root,
        "validate",
        run_of(
            root, validate={"k": 3, "rungs": ["P6"]}, engine={"kind": "vllm", "url": "http://h:1"}
        ),
    )
    found = dict(leaves(deciding_settings(root)))
    assert found["data.min_tokens"] == 3
    assert found["trainer.epochs"] == 5
    assert (found["validate.k"], found["engine.kind"]) == (2, "none")
    assert "report.samples" not in found


def test_the_printed_command_recreates_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stage really runs twice: once by hand, once by what was printed."""
    target = save_byte_target(tmp_path / "target")
    config = make_config(tmp_path, target, max_tokens=96)
    assert run_data(config) == 0
    capsys.readouterr()
    run = RunDirectory.from_config(config)
    monkeypatch.setattr(sys, "argv", ["mtp", "reproduce", str(run.root), "name=again", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    ((program, command, *overrides),) = json.loads(capsys.readouterr().out)["commands"]
    assert (program, command) == ("mtp", "data")
    recreated = compose("data", overrides)
    assert recreated == replace(config, run=replace(config.run, name="again"))
    assert run_data(recreated) == 0
    there, here = (
        yaml.safe_load((run.root.parent / n / "config.yaml").read_text()) for n in ("tiny", "again")
    )
    assert here.pop("run")["name"] == "again"
    assert there.pop("run")["name"] == "tiny"
    assert here == there
    digests = [
        json.loads((run.root.parent / n / "data/fingerprint.json").read_text())["fingerprint"]
        for n in ("tiny", "again")
    ]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_the_printed_script_recreates_a_whole_run(tmp_path: Path) -> None:
    """data, precompute and train as a shell runs them; the same weights come out."""
    target = save_byte_target(tmp_path / "target")
    config = make_config(tmp_path, target)
    config = replace(
        config,
        trainer=replace(
            config.trainer,
            max_steps=2,
            tokens_per_step=64,
            validate_every=0,
            dtype="float32",
            wandb="disabled",
            tensorboard=False,
        ),
    )
    defaults = compose_values("train")
    script = tmp_path / "bin" / "mtp"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mtp_train.cli "$@"\n')
    script.chmod(0o755)

    def shell(text: str) -> str:
        import os

        environment = dict(os.environ, PYTHONPATH=str(app.CONF_DIR.parent))
        environment["PATH"] = f"{script.parent}:{environment['PATH']}"
        done = subprocess.run(
            ["sh", "-e"],
            input=text,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    from mtp_train.overrides import overrides_between

    words = shlex.join(overrides_between(defaults, config_values(config)))
    shell("".join(f"mtp {stage} {words}\n" for stage in ("data", "precompute", "train")))
    runs = tmp_path / "runs"
    printed = shell("mtp reproduce runs/tiny name=again\n")
    assert [stage.stage for stage in recorded_stages(runs / "tiny")] == [
        "data",
        "precompute",
        "train",
    ]
    shell(printed)
    for name in ("config.yaml", "head/model.safetensors"):
        there, here = ((runs / run / name).read_bytes() for run in ("tiny", "again"))
        assert here.replace(b"name: again", b"name: tiny") == there, name


def test_the_running_command_composes_with_its_own_search_path(tmp_path: Path) -> None:
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(app.CONF_DIR)):
        assert compose_values("train") == compose_values("train", [])
