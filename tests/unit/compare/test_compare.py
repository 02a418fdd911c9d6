"""Run directories beside each other: complete, honest about what is missing, safe to pass on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mtp_train import cli
from mtp_train.compare.build import compare
from mtp_train.compare.command import take_runs
from mtp_train.compare.page import render
from mtp_train.compare.tables import missing_lines, settings_table, to_json
from mtp_train.config import CompareConfig
from tests.unit.report.run_fixture import parity, write_run
from tests.unit.report.test_page import Outline

PROMPTS = [f"{index:016x}" for index in range(80)]


def write(root: Path, *, gain: int = 0, with_counts: bool = True, **settings: Any) -> Path:
    """A measured run whose first position accepts ``gain`` more drafts of every prompt."""
    write_run(root)
    content = parity()
    row = content["acceptance"][1]
    row["drafts"], row["accepted"] = 8000, [4000 + 80 * gain, 2000, 800]
    row["rates"] = [count / 8000 for count in row["accepted"]]
    row["tau"] = 1 + sum(row["rates"])
    row["tau_interval"] = [row["tau"] - 0.03, row["tau"] + 0.03]
    content["head_sha256"] = {"model.safetensors": root.name}
    (root / "parity.json").write_text(json.dumps(content))
    save_file(
        {"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)},
        root / "head/model.safetensors",
    )
    if with_counts:
        counts = [[100, 50 + gain + 20 * (-1) ** index, 25, 10] for index in range(80)]
        entry = {
            name: row[name]
            for name in ("prompt_set", "k", "temperature", "draft_mode", "max_tokens")
        }
        entry |= {"prompts": PROMPTS, "counts": counts}
        (root / "prompt_counts.json").write_text(
            json.dumps({"head_sha256": content["head_sha256"], "rows": [entry]})
        )
    if settings:
        known = json.loads((root / "config.yaml").read_text())
        known["trainer"] |= settings
        (root / "config.yaml").write_text(json.dumps(known))
    return root


def runs(*roots: Path, **settings: Any) -> CompareConfig:
    return CompareConfig(runs=tuple(map(str, roots)), **settings)


def test_a_gain_on_every_prompt_is_a_paired_difference(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", gain=2)
    first, second = compare(runs(a, b, k=3)).runs
    assert first.is_baseline
    assert first.difference is None
    assert second.difference is not None
    assert second.difference.kind == "paired"
    # The same gain on every prompt: nothing is left to chance, though prompts differ by 40 points.
    assert second.difference.tau.low == pytest.approx(0.02)
    assert second.difference.tau.high == pytest.approx(0.02)


def test_without_counts_by_prompt_the_difference_is_unpaired_and_says_why(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", gain=2, with_counts=False)
    comparison = compare(runs(a, b, k=3))
    gap = comparison.runs[1].difference
    assert gap is not None
    assert gap.kind == "unpaired"
    assert gap.tau.low == pytest.approx(0.02 - 0.03 * 2**0.5)
    assert "b: unpaired, for no counts by prompt of b" in missing_lines(comparison)


def test_counts_of_another_head_are_not_taken(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    content = json.loads((b / "prompt_counts.json").read_text())
    content["head_sha256"] = {"model.safetensors": "before"}
    (b / "prompt_counts.json").write_text(json.dumps(content))
    gap = compare(runs(a, b, k=3)).runs[1].difference
    assert gap is not None
    assert gap.kind == "unpaired"


def test_cost_is_read_from_the_records(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    lines = (root / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        if event["event"] == "step":
            event["num_tokens"] = 10
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    cost = compare(runs(root)).runs[0].records.cost
    assert cost.trained_tokens == 1000  # steps that a resumed run did twice count once
    assert (cost.steps, cost.head_params) == (100, 17)
    assert (cost.data_tokens, cost.feature_tokens, cost.codec) == (249954, 900, "fp8_e4m3")
    assert cost.seconds["data"] == 60.0


def test_only_settings_that_differ_are_shown(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    b = write(tmp_path / "b", learning_rate=0.004)
    table = settings_table(compare(runs(a, b)))
    assert table.rows == (("trainer.learning_rate", "0.002", "0.004"),)


def test_settings_are_those_of_the_stage_that_used_them(tmp_path: Path) -> None:
    """A later command with other settings changes config.yaml, and nothing about the head."""
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    settings = json.loads((b / "config.yaml").read_text())
    own = settings | {"trainer": {"learning_rate": 0.009, "epochs": 3}}
    event = {"time": "2026-01-01T03:00:00+00:00", "stage": "train", "event": "stage_started"}
    with (b / "events.jsonl").open("a") as file:
        file.write(json.dumps(event | {"settings": own}) + "\n")
    table = settings_table(compare(runs(a, b)))
    assert table.rows == (("trainer.learning_rate", "0.002", "0.009"),)


def test_a_shared_token_set_says_itself_how_it_was_made(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    shared = tmp_path / "shared"
    shared.mkdir()
    inputs = {
        "chat_template": "2aca",
        "max_turns": 1,
        "sources": {"sharegpt": "00"},
        "regenerate": {"enabled": True},
    }
    (shared / "fingerprint.json").write_text(json.dumps({"inputs": inputs | {"seed": 7}}))
    own = {
        "path": "",
        "chat_template": "",
        "max_turns": 1,
        "sources": ["sharegpt"],
        "regenerate": {"enabled": False},
    }
    for root, data in ((a, own), (b, own | {"path": str(shared), "max_turns": 0, "sources": []})):
        settings = json.loads((root / "config.yaml").read_text())
        (root / "config.yaml").write_text(json.dumps(settings | {"data": data}))
    keys = [row[0] for row in settings_table(compare(runs(a, b))).rows]
    assert sorted(keys) == ["data.path", "data.regenerate.enabled"]


def test_what_a_run_lacks_is_named_and_the_run_stays(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text((a / "config.yaml").read_text())
    comparison = compare(runs(a, bare))
    assert [one.label for one in comparison.runs] == ["a", "bare"]
    lines = "\n".join(missing_lines(comparison))
    for what in ("acceptance", "head/", "features", "no training steps"):
        assert re.search(f"bare: no .*{what}|bare: {what}", lines), what
    assert comparison.runs[1].records.verdict == "not run"


def test_a_run_measured_otherwise_says_what_it_has(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / name) for name in "abc")
    content = json.loads((c / "parity.json").read_text())
    content["acceptance"] = content["acceptance"][:1]
    (c / "parity.json").write_text(json.dumps(content))
    comparison = compare(runs(a, b, c, k=3))
    assert comparison.runs[2].row is None
    assert "c: no this measurement" not in (lines := "\n".join(missing_lines(comparison)))
    assert "c: not measured so; it has mtbench at K=1" in lines


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda root: (root / "parity.json").write_text("{"), "damaged: parity.json: not valid"),
        (lambda root: (root / "config.yaml").write_text(": ["), "damaged: config.yaml: not valid"),
        (
            lambda root: (root / "prompt_counts.json").write_text(
                (root / "prompt_counts.json").read_text().replace("[100, ", "[", 1)
            ),
            "damaged: prompt_counts.json",
        ),
        (
            lambda root: (root / "head/model.safetensors").write_bytes(
                b"\x05" + bytes(7) + b"what?"
            ),
            "damaged: head/model.safetensors: not a safetensors file",
        ),
    ],
)
def test_a_damaged_run_is_an_error_that_names_the_file(
    tmp_path: Path, damage: Any, why: str
) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    damage(b)
    comparison = compare(runs(a, b))
    assert [one.label for one in comparison.runs] == ["a"]
    (unreadable,) = comparison.unreadable
    assert unreadable.path == str(b)
    assert unreadable.why.startswith(why)
    assert unreadable.is_error


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    (tmp_path / "multirun.yaml").write_text("")
    comparison = compare(
        runs(a, *(tmp_path / n for n in ("empty", "other", "gone", "multirun.yaml")))
    )
    found = {Path(one.path).name: (one.why, one.is_error) for one in comparison.unreadable}
    assert found["empty"] == ("an empty directory", True)
    assert found["gone"] == ("there is no such directory", True)
    assert found["multirun.yaml"] == ("a file, not a run directory", False)
    assert found["other"][0].startswith("no run: ")
    with pytest.raises(ValueError, match=r"no run to compare: .*an empty directory"):
        compare(runs(tmp_path / "empty"))


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    roots = [write(tmp_path / place / "demo") for place in ("x", "y")]
    assert [one.label for one in compare(runs(*roots)).runs] == ["x/demo", "y/demo"]


def test_the_page_is_whole_and_asks_nothing_of_anybody(tmp_path: Path) -> None:
    roots = [write(tmp_path / f"run{index}", gain=index) for index in range(3)]
    text = render(compare(runs(*roots, tmp_path / "gone", k=3)))
    outline = Outline()
    outline.feed(text)
    assert outline._open == []
    assert "svg" in outline.tags
    for tag, name, value in outline.attributes:
        assert not (name in ("src", "href") and "//" in value), (tag, name, value)
    assert "url(" not in text
    assert "<script>alert" not in text
    for wanted in ("run2", "+0.020 [+0.020, +0.020]", "baseline", "there is no such directory"):
        assert wanted in outline.text


def test_many_runs_are_drawn_without_names(tmp_path: Path) -> None:
    roots = [write(tmp_path / f"run{index:02}", gain=index) for index in range(14)]
    comparison = compare(runs(*roots, k=3))
    assert render(comparison).count("run13") >= 3  # tables and tips
    assert settings_table(comparison).rows == ()


def test_the_command_prints_json_writes_the_page_and_fails_for_what_it_could_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b-learning_rate=0.1", gain=1)
    page = tmp_path / "out.html"
    monkeypatch.chdir(tmp_path)

    def start(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["mtp", "compare", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    code, out = start(a.name, b.name, "baseline=best", f"html={page}", "--json", "k=3")
    values = json.loads(out)
    assert code == 0
    assert [run["is_baseline"] for run in values["runs"]] == [False, True]
    assert values["runs"][0]["difference"]["tau"]["value"] == pytest.approx(-0.01)
    assert page.read_text().startswith("<!doctype html>")
    code, out = start("a", "gone")
    assert code == 1
    assert "tokens per step" in out
    assert "gone: NOT COMPARED, there is no such directory" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", b.name, "out.html"]


def test_directories_with_equals_signs_are_runs_and_settings_are_settings(tmp_path: Path) -> None:
    stage = lambda config: 0  # noqa: E731
    _, rest = take_runs(stage, ["runs/x-lr=0.1", "k=3", "--json", "hydra/launcher=joblib"])
    assert rest == [
        "k=3",
        "compare.json=true",
        "hydra/launcher=joblib",
        "compare.runs=['runs/x-lr=0.1']",
    ]
    with pytest.raises(SystemExit):
        take_runs(stage, ["k=3"])


def test_json_is_strict(tmp_path: Path) -> None:
    json.dumps(to_json(compare(runs(write(tmp_path / "a")))), allow_nan=False)
