"""The figures of docs/recipes.md and of the recipes' own comments are those of `mtp plan`."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from mtp_train.app import CONF_DIR
from mtp_train.features.estimate import format_bytes
from mtp_train.plan.bill import Plan
from mtp_train.plan.command import plan_for
from tests.unit.cli.test_commands import RECIPES, compose

DOCUMENT = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in DOCUMENT.splitlines()
    if line.startswith("| `")
]
NOT_RUN = [row for row in ROWS if "H100" in row[2]]
TARGETS = {
    "llama32_1b": "Llama-3.2-1B",
    "llama31_8b": "Llama-3.1-8B",
    "llama33_70b": "Llama-3.3-70B",
}


@functools.cache
def plan_of(recipe: str, num_gpus: int) -> Plan:
    target = f"target.path={TARGETS[recipe]}"
    return plan_for(
        compose("plan", [f"experiment={recipe}", target, f"plan.hardware={num_gpus}xh100"])
    )


def test_every_recipe_that_has_not_been_run_stands_in_the_table() -> None:
    assert {row[0].strip("`") for row in NOT_RUN} == set(TARGETS)
    assert {row[0].strip("`") for row in ROWS} | {"sharegpt_full"} == set(RECIPES)


@pytest.mark.parametrize("row", NOT_RUN, ids=lambda row: f"{row[0]} {row[2]}")
def test_a_row_states_what_the_plan_says(row: list[str]) -> None:
    made = plan_of(row[0].strip("`"), int(row[2].split()[0]))
    assert row[3] == f"{made.num_head_weights / 1e6:.1f}M"
    assert row[4] == f"{made.num_tokens / 1e6:.0f}M"
    assert row[5] == format_bytes(made.feature_bytes)
    hours = [f"{made.hours(stage):.1f}" for stage in ("answers", "dump", "training")]
    assert row[6:9] == hours
    assert row[9] == f"{made.steps:,}"
    assert row[10].endswith("not run")


@pytest.mark.parametrize("recipe", sorted(TARGETS))
def test_a_recipe_says_at_its_top_that_it_has_not_been_run_and_what_it_costs(recipe: str) -> None:
    lines = (CONF_DIR / "experiment" / f"{recipe}.yaml").read_text().splitlines()
    comment = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    assert comment.split("@package _global_ ")[1].startswith("NOT RUN")
    for row in (row for row in NOT_RUN if row[0] == f"`{recipe}`"):
        made = plan_of(recipe, int(row[2].split()[0]))
        assert format_bytes(made.feature_bytes) in comment
        total = sum(made.hours(stage) for stage in ("answers", "dump", "training"))
        assert f"{total:.1f} h" in comment
        low, high = re.findall(r"\d\.\d", row[10])
        assert f"{low} to {high} (a guess)" in comment
