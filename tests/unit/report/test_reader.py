"""Records of a run into facts: what is there, what is missing, what is damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mtp_train.report.parity import read_parity, tau_of_rates
from mtp_train.report.reader import read_run
from tests.unit.report.run_fixture import HOSTILE, SECRET, K, parity, write_run


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    facts = read_run(write_run(tmp_path / "mine"), max_samples=2)
    assert (facts.name, facts.min_drafts) == ("mine", 3000)
    assert [rung.name for rung in facts.parity.rungs] == [f"P{n}" for n in range(7)]
    assert all(rung.passed for rung in facts.parity.rungs)
    assert [(row.prompt_set, row.k) for row in facts.parity.acceptance] == [
        ("mtbench", 1),
        ("mtbench", 3),
        ("humaneval", 3),
    ]
    assert facts.parity.acceptance[1].rates[2].low == pytest.approx(0.10)
    assert {row.dimension for row in facts.parity.breakdown} == {"task", "context", "token_kind"}
    assert facts.parity.draft_kv_bytes == 768
    assert [(row.dtype, row.k) for row in facts.parity.served] == [("float32", 1), ("bfloat16", 3)]
    assert facts.parity.served[1].rates[0] == pytest.approx(3810 / 6480)
    assert facts.parity.served[0].tau.value == pytest.approx(1.62)
    names = [figure.name for figure in facts.parity.rungs[6].figures]
    assert "engine" in names
    assert not [name for name in names if name.startswith(("sets", "inputs"))]
    assert next(package.versions for package in facts.stores.packages) == ("2.13.0", "2.14.0")
    assert [store.num_bytes // store.num_tokens for store in facts.stores.features] == [585, 585]
    assert facts.stores.exports[0].commands[0][0] == "vllm"
    assert facts.stores.rejects == (("answer too long", 338),)
    assert facts.stores.beyond_limits == (("token budget", 81_234),)
    assert len(facts.texts.samples) == 2
    assert [token.position for token in facts.texts.samples[0].tokens][:4] == [0, 1, 2, 3]


def test_paths_lose_their_folders(tmp_path: Path) -> None:
    settings = dict(read_run(write_run(tmp_path / "r"), max_samples=0).stores.settings)
    assert settings["data.sources"] == "chats.jsonl"
    assert "/models" not in settings["target.path"]


def test_no_texts_are_read_unless_asked_for(tmp_path: Path) -> None:
    facts = read_run(write_run(tmp_path / "r"), max_samples=0)
    assert SECRET not in repr(facts.texts.samples) + repr(facts.texts.training_row)
    assert facts.texts.samples == ()
    assert facts.texts.training_row is None


@pytest.mark.parametrize(
    "name",
    [
        "parity.json",
        "samples.json",
        "versions.json",
        "events.jsonl",
        "config.yaml",
        "data/statistics.json",
        "features/train/manifest.json",
        "export/mimo/export.json",
    ],
)
def test_any_record_may_be_missing(tmp_path: Path, name: str) -> None:
    root = write_run(tmp_path / "r")
    (root / name).unlink()
    read_run(root, max_samples=3)


@pytest.mark.parametrize("name", ["parity.json", "samples.json", "config.yaml"])
def test_a_damaged_record_is_named(tmp_path: Path, name: str) -> None:
    root = write_run(tmp_path / "r")
    (root / name).write_text("{ torn")
    with pytest.raises(ValueError, match=name):
        read_run(root, max_samples=3)


def test_a_run_that_does_not_exist_is_refused_even_where_its_folder_does(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.name=nothing: there is no run"):
        read_run(tmp_path / "nothing", max_samples=0)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "error.log").touch()  # what the refusal above leaves
    with pytest.raises(ValueError, match="there is no run"):
        read_run(tmp_path / "nothing", max_samples=0)


def test_what_a_resumed_run_did_again_counts_once(tmp_path: Path) -> None:
    """The killed attempt's steps after the checkpoint (with a loss above 100) are gone."""
    logbook = read_run(write_run(tmp_path / "r"), max_samples=0).logbook
    assert [point.step for point in logbook.steps] == list(range(1, 101))
    assert max(point.loss for point in logbook.steps) < 20
    assert [point.step for point in logbook.validations] == [25, 50, 75, 100]


def test_what_lies_behind_the_checkpoint_is_gone_at_once(tmp_path: Path) -> None:
    def line(event: str, step: int) -> str:
        head = {"time": "2026-01-01T00:00:00+00:00", "stage": "train", "event": event}
        return json.dumps(head | {"step": step, "loss": 1.0, "tau": 1.1, "rates": []}) + "\n"

    lines = [line("start", 0), *(line("step", step) for step in (1, 2, 3)), line("validation", 3)]
    (tmp_path / "events.jsonl").write_text("".join([*lines, line("start", 1)]))
    logbook = read_run(tmp_path, max_samples=0).logbook
    assert [point.step for point in logbook.steps] == [1]
    assert logbook.validations == ()


def test_what_was_out_of_the_ordinary_is_told_and_nothing_else(tmp_path: Path) -> None:
    logbook = read_run(write_run(tmp_path / "r"), max_samples=0).logbook
    assert [item.what for item in logbook.happenings] == [
        "1 sample of train quarantined: hidden states not finite",
        "started again: the attempt before did not finish",
        "resumed after step 50 of 100",
        "step 88 skipped: gradients not finite",
        "endpoint_retry attempt=2",  # numbers of an unknown event, never its texts
    ]
    assert logbook.num_skipped == 1
    train = next(stage for stage in logbook.stages if stage.name == "train")
    assert (train.num_attempts, train.is_finished) == (2, True)


def test_a_torn_line_and_foreign_lines_of_the_log_are_left_out(tmp_path: Path) -> None:
    root = write_run(tmp_path / "r")
    with (root / "events.jsonl").open("a") as file:
        file.write('{"time": "yesterday", "stage": "train", "event": "step", "step": 7}\n')
        file.write('{"event": "step"}\n["list"]\n{"time": "2026-01-01T')
    assert len(read_run(root, max_samples=0).logbook.steps) == 100


def test_the_prediction_is_that_of_the_low_precision_and_counts_from_one(tmp_path: Path) -> None:
    prediction = read_run(write_run(tmp_path / "r"), max_samples=0).parity.prediction
    assert prediction is not None
    assert (prediction.dtype, prediction.k, prediction.num_prompts) == ("bfloat16", K, 80)
    assert prediction.predicted_tau.value == 2.021
    assert prediction.predicted_tau.low == 1.995
    assert prediction.measured_tau.value == pytest.approx(1 + 0.59 + 0.59 * 0.51 * 1.4)
    assert prediction.measured_tau.low is None  # an older ladder did not write it
    assert prediction.undecided == (3,)


def test_tau_is_the_sum_of_what_is_reached() -> None:
    assert tau_of_rates((0.5, 0.5)) == 1.75
    assert tau_of_rates(()) == 1.0


def test_rows_of_an_older_ladder_take_their_latencies_from_the_rung(tmp_path: Path) -> None:
    content = parity()
    row = content["speed"][0]
    for name in ("plain", "predicted", "emitted_per_step", "c", "v", "context_len"):
        del row[name]
    row["prompt_set"] = "mtbench/context512"
    content["rungs"]["P5"]["figures"] |= {
        "batch1_context512_k1": {"predicted_speedup": 1.11, "inter_token_p50_ms": 9.0},
        "batch1_context512_plain": {"inter_token_p50_ms": 8.0},
        "batch1_context512_cost": {"c": 0.2, "v": 0.3},
    }
    (tmp_path / "parity.json").write_text(json.dumps(content))
    cell = read_parity(tmp_path / "parity.json", tmp_path).speed[0]
    assert (cell.prompt_set, cell.context_len, cell.predicted) == ("mtbench", 512, 1.11)
    assert (cell.draft_cost, cell.verify_cost) == (0.2, 0.3)
    assert cell.plain.inter_token_p50_ms == 8.0


def test_values_that_are_no_numbers_are_absent(tmp_path: Path) -> None:
    content = parity()
    content["acceptance"][0] |= {"tau": "nan", "rates": ["inf"], "tau_interval": None}
    content["speed"][0] |= {"speedup": "nan"}
    (tmp_path / "parity.json").write_text(json.dumps(content))
    read = read_parity(tmp_path / "parity.json", tmp_path)
    assert math.isnan(read.acceptance[0].tau.value)
    assert read.acceptance[0].rates == ()
    assert math.isnan(read.speed[0].speedup.value)


def test_another_head_than_the_measured_one_is_noticed(tmp_path: Path) -> None:
    root = write_run(tmp_path / "r")
    content = parity() | {"head_sha256": {"config.json": "00"}}
    (root / "parity.json").write_text(json.dumps(content))
    assert not read_run(root, max_samples=0).parity.is_stale  # there is none to compare with
    (root / "head" / "config.json").write_text("{}")
    assert read_run(root, max_samples=0).parity.is_stale


def test_bounds_stand_beside_the_figures_of_the_same_name(tmp_path: Path) -> None:
    rung = read_run(write_run(tmp_path / "r"), max_samples=0).parity.rungs[0]
    assert HOSTILE in rung.note
    assert [(figure.name, figure.value, figure.bound) for figure in rung.figures] == [
        ("float32_steps", 264, None),
        ("nested · max_gap", 4.2e-05, 1e-4),
        ("float32_steps_that_differ", None, 0),
    ]
