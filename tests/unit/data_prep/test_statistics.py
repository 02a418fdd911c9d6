from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data_prep.chat import ChatFormat
from data_prep.config import DataConfig
from data_prep.coverage import Origin, Part, largest_parts, record_domain
from data_prep.pipeline import prepare
from data_prep.scripts import main_script, script_shares
from data_prep.statistics import (
    Lengths,
    StatisticsCounter,
    mask_spans,
    preview,
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
        row = TokenRow(f"c{index // 2}", source, (5,) * len(mask), mask, index == 1)
        counter.add(row, Origin(source, "maths" if index % 2 else "", "q" if index < 3 else "問 q"))
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
    # Answers have 3 + index tokens.
    assert result.domains == {
        "a: maths": Part(4, 4 * 3 + 1 + 3 + 5 + 7),
        "a": Part(3, 3 * 3 + 2 + 4 + 6),
        "b": Part(2, 2 * 3 + 8 + 10),
        "b: maths": Part(1, 3 + 9),
    }
    assert result.prompt_scripts == {
        "Han": Part(8, 8 * 3 + sum(range(3, 11))),
        "Latin": Part(2, 2 * 3 + 1 + 2),
    }


def test_scripts_count_letters_under_the_mask(tiny: Any) -> None:
    counter = StatisticsCounter(ChatFormat(tiny))
    shown = row(tiny, "абв only in the prompt", "ab 12, 漢字 かな 한국 αβ")
    counter.add(shown, Origin("s"))
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


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello 漢", "Latin"),
        ("漢字 abc", "Latin"),
        ("漢字か b", "Han"),
        ("12 + 3 = ?", "no letters"),
        ("", "no letters"),
    ],
)
def test_the_main_script_is_that_of_most_letters(text: str, script: str) -> None:
    assert main_script(text) == script


@pytest.mark.parametrize(
    ("record", "domain"),
    [
        ({"category": "coding", "task": "x"}, "coding"),
        ({"domain1": "Law  and\nOrder"}, "Law and Order"),
        ({"category": 7, "subset": "s"}, "s"),
        ({"category": " "}, ""),
        ({"prompt": "domain"}, ""),
        ({"domain": "x" * 100}, "x" * 60),
    ],
)
def test_a_domain_is_what_the_record_names(record: dict[str, Any], domain: str) -> None:
    assert record_domain(record) == domain


def test_small_parts_are_summed_and_none_is_lost() -> None:
    parts = {f"d{index}": Part(index, 10 * index) for index in range(1, 6)}
    assert largest_parts(parts, most=2) == {
        "d5": Part(5, 50),
        "d4": Part(4, 40),
        "others": Part(6, 60),
    }


def test_a_set_counts_its_rows_by_what_their_records_say(tmp_path: Path, tiny: Any) -> None:
    talk = lambda q, a: [{"from": "human", "value": q}, {"from": "gpt", "value": a}]  # noqa: E731
    rows = [
        {"conversations": talk("вопрос первый", "reply one"), "category": "coding"},
        {"conversations": talk("second question", "reply two"), "category": "coding"},
        {"conversations": talk("third question", "reply three")},
    ]
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    config = DataConfig(sources=(str(path),), validation_share=0, min_tokens=1)
    report = prepare(config, out_dir=tmp_path / "o", tokenizer=tiny, seed=1)
    train = report.splits["train"]
    assert {label: part.num_rows for label, part in train.domains.items()} == {
        f"{path}: coding": 2,
        str(path): 1,
    }
    assert {label: part.num_rows for label, part in train.prompt_scripts.items()} == {
        "Latin": 2,
        "Cyrillic": 1,
    }
    answers = sum(part.num_answer_tokens for part in train.domains.values())
    assert answers == train.num_masked_tokens
    # What was written comes back, and a set of an older version has no coverage.
    again = prepare(config, out_dir=tmp_path / "o", tokenizer=tiny, seed=1)
    assert again.splits["train"] == train
    file = tmp_path / "o" / "statistics.json"
    saved = json.loads(file.read_text())
    del saved["splits"]["train"]["domains"]
    file.write_text(json.dumps(saved))
    old = prepare(config, out_dir=tmp_path / "o", tokenizer=tiny, seed=1)
    assert old.splits["train"].domains == {}
    console = Console(width=160, record=True)
    console.print(statistics_tables(report.splits, report.rejects))
    text = console.export_text()
    assert "script of the prompt" in text
    assert "66.7%" in text
