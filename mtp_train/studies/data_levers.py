"""Record and figure of ``docs/data_levers.md``, from what `mtp compare` says of its runs.

    mtp compare runs/curve-* --json > compare.json
    python -m mtp_train.studies.data_levers compare.json docs/data_levers.json docs/data_levers.svg

The record keeps the curve and the pairs of answers, no paths and no settings.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mtp_train.learning_curve.facts import CurveFit, LearningCurve, SizedRun
from mtp_train.learning_curve.panel import plot_curve
from mtp_train.report.facts import Figure
from mtp_train.run_dir import read_json, write_json_atomic, write_text_atomic

_KEPT = ("condition", "curve", "answers")
_WIDTH = 560
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.tick{fill:#666;font-size:11px}.grid{stroke:#ddd}"
    ".line{fill:none;stroke-width:1.6}.line,.whisker{stroke:currentColor}.mark{fill:currentColor}"
    ".hollow{fill:#fff;stroke:currentColor;stroke-width:1.8}.hit{fill:none}"
    ".s0{color:#1b6ca8}.s1{color:#8a5a00}"
)


def read_curve(record: Mapping[str, Any]) -> LearningCurve:
    """The learning curve of a comparison's JSON."""
    values = dict(record["curve"])
    values["runs"] = tuple(
        SizedRun(**{**run, "tau": Figure(**run["tau"]), "first": Figure(**run["first"])})
        for run in values["runs"]
    )
    for name in ("tau", "first"):
        values[name] = None if values[name] is None else _fit(values[name])
    return LearningCurve(**values)


def draw(curve: LearningCurve) -> str:
    """The picture as a file of its own, on white."""
    picture = plot_curve(curve, _WIDTH)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} 300" width="{_WIDTH}" '
        f'height="300"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{picture}</svg>\n"
    )


def _fit(values: Mapping[str, Any]) -> CurveFit:
    plain = {field.name: values[field.name] for field in fields(CurveFit)}
    plain["parameters"] = tuple(plain["parameters"])
    for name in ("gain", "doubled"):
        plain[name] = Figure(**plain[name])
    return CurveFit(**plain)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both files; refuses a comparison without a fit."""
    parser = argparse.ArgumentParser(prog="python -m mtp_train.studies.data_levers")
    parser.add_argument("comparison", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("figure", type=Path)
    given = parser.parse_args(arguments)
    content = read_json(given.comparison)
    curve = read_curve(content)
    if curve.tau is None:
        parser.error(f"{given.comparison}: {curve.refusal}")
    write_json_atomic(given.record, {key: content[key] for key in _KEPT})
    write_text_atomic(given.figure, draw(curve))


if __name__ == "__main__":
    main()
