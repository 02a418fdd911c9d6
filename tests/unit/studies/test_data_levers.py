"""The committed figures of docs/data_levers.md are those of its record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mtp_train.events import to_jsonable
from mtp_train.learning_curve.facts import LearningCurve, SizedRun
from mtp_train.learning_curve.fit import fit_curve
from mtp_train.learning_curve.panel import curve_table, describe_curve
from mtp_train.report import formats
from mtp_train.report.facts import Figure
from mtp_train.studies.data_levers import draw, main, read_curve

DOCS = Path(__file__).parents[3] / "docs"


def make_curve() -> LearningCurve:
    sizes, taus = (100, 200, 400, 800), (1.1, 1.16, 1.21, 1.27)
    runs = tuple(
        SizedRun(f"r{s}", s, Figure(t, t - 0.02, t + 0.02), Figure(t - 1, 0.0, 0.5))
        for s, t in zip(sizes, taus, strict=True)
    )
    fit = fit_curve(np.array(sizes), np.array(taus), np.tile(taus, (50, 1)))
    return LearningCurve(runs, 1.0, fit, fit)


def test_a_curve_comes_back_from_json_and_is_drawn_whole(tmp_path: Path) -> None:
    curve = make_curve()
    comparison = tmp_path / "compare.json"
    content = {"condition": {}, "curve": to_jsonable(curve), "answers": [], "runs": ["/secret"]}
    comparison.write_text(json.dumps(content))
    record, figure = tmp_path / "a.json", tmp_path / "a.svg"
    main([str(comparison), str(record), str(figure)])
    assert read_curve(json.loads(record.read_text())) == curve
    assert "secret" not in record.read_text()
    assert figure.read_text() == draw(curve)
    assert draw(curve).count('class="mark s0"') == 4


def test_a_comparison_without_a_fit_is_refused(tmp_path: Path) -> None:
    content = {"condition": None, "curve": to_jsonable(LearningCurve(refusal="no")), "answers": []}
    (tmp_path / "c.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit):
        main([str(tmp_path / name) for name in ("c.json", "a.json", "a.svg")])
    assert not (tmp_path / "a.json").exists()


def test_the_page_states_what_its_record_says() -> None:
    content = json.loads((DOCS / "data_levers.json").read_text())
    curve = read_curve(content)
    page = (DOCS / "data_levers.md").read_text(encoding="utf-8")
    assert (DOCS / "data_levers.svg").read_text() == draw(curve)
    assert describe_curve(curve) in " ".join(page.split())
    for run in curve.runs:
        measured = f"{formats.decimal(run.tau.value)} {formats.interval(run.tau)}"
        assert f"| {run.num_tokens:,} | {measured} |" in page
    for row in curve_table(curve).rows:
        assert row[-1] in page
    for pair in content["answers"]:
        assert f"{pair['num_tokens'][0]:,}" in page
        assert formats.signed(pair["difference"]["tau"]["value"], 3) in page
