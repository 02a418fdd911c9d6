"""Coverage in the report: shares that add up, acceptance beside them, and no folders."""

from __future__ import annotations

import json
from pathlib import Path

from mtp_train.report.coverage_panels import coverage_panels
from mtp_train.report.facts import Breakdown, Figure
from mtp_train.report.page import render
from mtp_train.report.reader import read_run
from tests.unit.report.run_fixture import write_run


def breakdown(dimension: str, label: str, num_prompts: int, *, k: int = 3) -> Breakdown:
    tau = Figure(1.5, 1.4, 1.6)
    return Breakdown(dimension, label, "mtbench", k, 0.0, 90, num_prompts, tau, (0.3, 0.1, 0.1))


def write_covered(root: Path) -> None:
    write_run(root)
    file = root / "data" / "statistics.json"
    content = json.loads(file.read_text())
    content["splits"]["train"] |= {
        "domains": {
            "/home/customer/chats.jsonl: coding": {"num_rows": 30, "num_answer_tokens": 900},
            "sharegpt": {"num_rows": 10, "num_answer_tokens": 100},
        },
        "prompt_scripts": {"Latin": {"num_rows": 40, "num_answer_tokens": 1000}},
    }
    file.write_text(json.dumps(content))


def test_training_stands_beside_the_prompt_sets_with_their_acceptance(tmp_path: Path) -> None:
    write_covered(tmp_path / "run")
    facts = read_run(tmp_path / "run", max_samples=0)
    rows = [
        breakdown("task", "writing", 30),
        breakdown("task", "maths", 10),
        breakdown("task", "maths", 10, k=1),  # the largest K alone is shown
        breakdown("script", "Latin", 40),
    ]
    domains, scripts = coverage_panels(facts.stores.coverage, rows)
    assert domains.table is not None
    assert [row[:5] for row in domains.table.rows] == [
        ("training", "chats.jsonl: coding", "75.0\u202f%", "90.0\u202f%", "–"),
        ("training", "sharegpt", "25.0\u202f%", "10.0\u202f%", "–"),
        ("MT-Bench", "writing", "75.0\u202f%", "–", "1.500"),
        ("MT-Bench", "maths", "25.0\u202f%", "–", "1.500"),
    ]
    assert scripts.table is not None
    assert [row[1] for row in scripts.table.rows] == ["Latin", "Latin"]


def test_the_page_shows_coverage_without_folders(tmp_path: Path) -> None:
    write_covered(tmp_path / "run")
    text = render(read_run(tmp_path / "run", max_samples=0), shows_texts=False)
    assert "chats.jsonl: coding" in text
    assert "customer" not in text
    assert "What more data brings" in text


def test_older_records_have_no_coverage_and_say_so(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    facts = read_run(tmp_path / "run", max_samples=0)
    assert facts.stores.coverage == ()
    measured, _ = coverage_panels((), [breakdown("task", "writing", 30)])
    assert "Training is not counted" in measured.lead
    for panel in coverage_panels((), ()):
        assert panel.is_empty
        assert "not recorded" in panel.absent
