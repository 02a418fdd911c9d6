"""The arithmetic of the norm experiment, against slow references, and what its page shows."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_train.run_dir import read_json, write_json_atomic
from mtp_train.studies.norms import read_run, walk
from mtp_train.studies.norms_page import (
    ALL,
    FREE,
    Cell,
    collect,
    figure,
    loss_difference,
    main,
    rate_difference,
    rate_table,
    table,
)

DOCS = Path(__file__).parents[3] / "docs"


def row(head: str = ALL, seed: int = 1, **changes: Any) -> dict[str, Any]:
    random = np.random.default_rng((seed, len(head)))
    drafts = random.integers(20, 40, 6)
    counts = {
        "drafts": drafts.tolist(),
        "accepted": (drafts * (0.3 if head == ALL else 0.1)).astype(int).tolist(),
    }
    loss = 5.0 if head == ALL else 6.0
    return {
        "name": f"{head}-{seed}",
        "head": head,
        "init": "random",
        "prompts": "short_chats",
        "scale": 1.0,
        "num_outliers": 0,
        "outlier_scale": 1.0,
        "seed": seed,
        "learning_rate": 1e-3,
        "losses": [10.0] * 6 + [loss + 0.1 * seed * (head == FREE)] * 2,
        "acceptance": {"mtbench": counts, "long_prompts": counts},
    } | changes


def cells(*rows: dict[str, Any]) -> dict[str, Cell]:
    (found,) = collect({"runs": list(rows)}).values()
    return found


def test_a_walk_counts_what_a_step_by_step_reader_counts() -> None:
    output = [5, 6, 7, 8, 9]
    # 6 is right: on to 8; 8 is wrong: on to 9; 9 is right
    assert walk(output, [6, 0, 1, 9]) == (3, 2)
    assert walk(output, [6, 7, 8, 9]) == (2, 2)  # a right draft leaves the next token to the target
    assert walk(output, [0, 0, 0, 0]) == (4, 0)
    assert walk([5], []) == (0, 0)


def test_a_difference_of_rates_is_the_pooled_one_inside_its_interval() -> None:
    found = cells(*(row(head, seed) for head in (ALL, FREE) for seed in (1, 2, 3)))
    gap = rate_difference(found[FREE], found[ALL], "mtbench")
    assert gap.value == pytest.approx(found[FREE].rate("mtbench") - found[ALL].rate("mtbench"))
    assert gap.interval is not None
    assert gap.interval.low < gap.value < gap.interval.high < 0
    same = rate_difference(found[ALL], found[ALL], "mtbench")
    assert (same.value, same.interval.low, same.interval.high) == (0, 0, 0)  # paired resamples


def test_the_interval_of_rates_covers_the_spread_of_a_plain_bootstrap() -> None:
    found = cells(*(row(head, seed) for head in (ALL, FREE) for seed in (1, 2, 3)))
    gap = rate_difference(found[FREE], found[ALL], "mtbench")
    random, values = np.random.default_rng(5), []
    for _ in range(3000):
        seeds, prompts = random.integers(0, 3, 3), random.integers(0, 6, 6)
        rates = []
        for name in (FREE, ALL):
            drafts, accepted = (
                [counts["mtbench"][s, p] for s in seeds for p in prompts]
                for counts in (found[name].drafts, found[name].accepted)
            )
            rates.append(sum(accepted) / sum(drafts))
        values.append(rates[0] - rates[1])
    low, high = np.quantile(values, [0.025, 0.975])
    assert gap.interval is not None
    assert gap.interval.low == pytest.approx(low, abs=2e-3)
    assert gap.interval.high == pytest.approx(high, abs=2e-3)


def test_a_difference_of_losses_is_paired_by_seed_and_has_students_interval() -> None:
    found = cells(*(row(head, seed) for head in (ALL, FREE) for seed in (3, 1, 2)))
    gap = loss_difference(found[FREE], found[ALL])
    assert gap.value == pytest.approx(1.2)  # gaps 1.1, 1.2, 1.3
    assert gap.interval is not None
    assert gap.interval.low == pytest.approx(1.2 - 4.303 * 0.1 / 3**0.5)
    assert gap.interval.high == pytest.approx(1.2 + 4.303 * 0.1 / 3**0.5)
    unpaired = cells(row(ALL, 2), row(ALL, 1), row(FREE, 2))
    single = loss_difference(unpaired[FREE], unpaired[ALL])
    assert (single.value, single.interval) == (pytest.approx(1.2), None)


def test_seeds_may_differ_by_a_step() -> None:
    found = cells(row(losses=[8.0, 6.0, 4.0, 2.0, 2.0]), row(seed=2, losses=[6.0, 4.0, 4.0, 4.0]))
    assert found[ALL].curve.tolist() == [7.0, 5.0, 4.0, 3.0]
    assert found[ALL].final_losses.tolist() == [2.0, 4.0]


def test_conditions_and_starts_are_kept_apart_and_a_seed_counts_once() -> None:
    found = collect(
        {
            "runs": [
                row(),
                row(init="target_norm"),
                row(FREE),
                row(scale=8.0),
                row(scale=8.0, num_outliers=6, outlier_scale=64.0),
            ]
        }
    )
    assert [condition.conditioning for condition in found] == ["×1", "×8", "×8, 6 channels ×512"]
    assert list(next(iter(found.values()))) == [ALL, "all, target's", FREE]
    with pytest.raises(ValueError, match="seed given twice"):
        collect({"runs": [row(), row()]})


def test_other_learning_rates_are_a_table_of_their_own() -> None:
    slow = row(FREE, name="slow", learning_rate=3e-4, losses=[10.0] * 6 + [9.0] * 2)
    results = {"runs": [row(), row(FREE), row(FREE, 2), slow]}
    assert collect(results)[next(iter(collect(results)))][FREE].seeds == (1, 2)
    lines = rate_table(results).splitlines()
    assert lines[0] == "| trained on | D | norms | 0.0003 | 0.001 |"
    assert lines[2:] == ["| short chats | ×1 | none (EAGLE) | 9.000 | 6.100 |"]


def test_a_run_that_has_not_finished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has not finished"):
        read_run(tmp_path)


def test_the_page_keeps_its_text_and_gets_table_and_figure(tmp_path: Path) -> None:
    results, page, drawing = tmp_path / "r.json", tmp_path / "p.md", tmp_path / "f.svg"
    write_json_atomic(results, {"runs": [row(), row(FREE), row(FREE, 2)]})
    page.write_text(
        "before\n<!-- norms: begin -->old<!-- norms: end -->\nbetween\n"
        "<!-- rates: begin -->old<!-- rates: end -->\nafter\n"
    )
    for _ in range(2):
        main([str(results), str(page), str(drawing)])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("| short chats | ×1 | none (EAGLE) | 2 |") == 1
    ElementTree.fromstring(drawing.read_text())
    page.write_text("nothing to replace")
    with pytest.raises(SystemExit):
        main([str(results), str(page), str(drawing)])


def test_the_committed_page_is_made_of_the_committed_results() -> None:
    made = collect(read_json(DOCS / "norms.json"))
    page = (DOCS / "norms.md").read_text(encoding="utf-8")
    assert table(made) in page
    assert rate_table(read_json(DOCS / "norms.json")) in page
    assert figure(made) == (DOCS / "norms.svg").read_text(encoding="utf-8")
