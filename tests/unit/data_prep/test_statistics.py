from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data_prep.chat import ChatFormat
from data_prep.config import DataConfig
from data_prep.pipeline import prepare
from data_prep.statistics import (
    Lengths,
    StatisticsCounter,
    mask_spans,
    preview,
    script_shares,
    statistics_tables,
)
from data_prep.token_set import TokenRow
from tests.unit.data_prep.helpers import write_sharegpt


def row(tiny: Any, prompt: str, answer: str, **kwargs: Any) -> TokenRow:
    ids = [tiny(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer)]
    mask = (False,) * len(ids[0]) + (True,) * len(ids[1])
    return TokenRow("c", "s", tuple(ids[0] + ids[1]), mask, **kwargs)


def test_figures_equal_a_hand_count(tiny: Any) -> None:
    counter = StatisticsCounter(ChatFormat(tiny))
    for index in range(1, 11):
        mask = (False,) * 5 + (True,) * index + (False,) * 2 + (True,) * 3
        source = "a" if index <= 7 else "b"
        counter.add(TokenRow(f"c{index // 2}", source, (5,) * len(mask), mask, index == 1))
    result = counter.result()
    assert result.num_rows == 10
    assert result.num_conversations == 6
    assert result.num_tokens == sum(10 + index for index in range(1, 11))
    assert result.num_masked_tokens == sum(3 + index for index in range(1, 11))
    assert result.masked_share == 85 / 155
    assert result.num_cut_off == 1
    assert result.row_lens == Lengths(p50=15, p90=19, p99=20, max=20)
    assert result.prompt_lens == Lengths(5, 5, 5, 5)
    # Twenty answers: 1 to 10 and ten times 3.
    assert result.answer_lens == Lengths(p50=3, p90=8, p99=10, max=10)
    assert result.sources == {"a": 7, "b": 3}


def test_scripts_count_letters_under_the_mask(tiny: Any) -> None:
    counter = StatisticsCounter(ChatFormat(tiny))
    counter.add(row(tiny, "абв only in the prompt", "ab 12, 漢字 かな 한국 αβ"))
    assert counter.result().scripts == {
        script: pytest.approx(0.2) for script in ("Latin", "Han", "Hiragana", "Hangul", "Greek")
    }
    assert script_shares({"1": 3}) == {}


@pytest.mark.parametrize(
    ("mask", "spans"),
    [("", []), ("0", []), ("1", [(0, 1)]), ("0110010", [(1, 3), (5, 6)]), ("11", [(0, 2)])],
)
def test_spans_are_the_runs_of_the_mask(mask: str, spans: list[tuple[int, int]]) -> None:
    assert mask_spans([flag == "1" for flag in mask]) == spans


def test_the_preview_colours_exactly_the_generated_tokens(tiny: Any) -> None:
    console = Console(width=80, record=True, force_terminal=True, color_system="truecolor")
    shown = row(tiny, "the prompt ", "answer 👍 ok", cut_off=True)
    console.print(preview([shown], ChatFormat(tiny)))
    html = console.export_html(inline_styles=True)
    coloured = "".join(
        part.split(">", 1)[1].split("<")[0] for part in html.split("<span") if "background" in part
    )
    assert coloured.strip("\n") == "answer 👍 ok"
    assert "cut off" in html


def test_the_tables_show_what_was_not_used_of_a_source(tmp_path: Path, tiny: Any) -> None:
    talks = {f"t{i}_0": [f"question {i}", f"reply {i}"] for i in range(5)}
    path = write_sharegpt(tmp_path / "s.json", talks | {"odd_0": ["unanswered"]})
    config = DataConfig(sources=(str(path),), validation_share=0)
    report = prepare(config, out_dir=tmp_path / "o", tokenizer=tiny, seed=1)
    console = Console(width=120, record=True)
    console.print(statistics_tables(report.splits, report.rejects))
    assert "no_answer" in console.export_text()
    assert any("validation split is empty" in note for note in report.notes)


def test_rows_beyond_the_budget_are_no_rejects() -> None:
    console = Console(width=120, record=True)
    console.print(statistics_tables({}, {"token_budget": 81_234, "too_long": 7}))
    lines = console.export_text().splitlines()
    (titles,) = [line for line in lines if "rejects" in line]
    at = titles.index("beyond the limits")
    assert "too_long" in "".join(line[:at] for line in lines)
    assert "81,234" not in "".join(line[:at] for line in lines)
    assert "token_budget │ 81,234" in "".join(line[at - 12 :] for line in lines)
