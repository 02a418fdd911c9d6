from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.chat import ChatFormat
from data_prep.config import DataConfig
from data_prep.pipeline import DataReport, prepare
from data_prep.statistics import mask_spans
from data_prep.token_set import TokenRow, TokenSet, load_token_set
from tests.unit.data_prep.helpers import prompt_ids, tiny_tokenizer, write_sharegpt

TALKS = {
    f"talk{i}_0": [f"question {i}", f"the answer {i} " + "is " * (i % 7), "and", f"more {i}"]
    for i in range(40)
}


def run(
    tmp_path: Path, tiny: Any, config: DataConfig | None = None, *, out: str = "data", **kwargs: Any
) -> tuple[DataReport, TokenSet]:
    source = tmp_path / "talks.json"
    if not source.exists():
        write_sharegpt(source, TALKS)
    config = config or DataConfig(validation_share=0.2)
    if config.sources == ("sharegpt",):
        config = replace(config, sources=(str(source),))
    arguments = {"tokenizer": tiny, "seed": 1} | kwargs
    report = prepare(config, out_dir=tmp_path / out, **arguments)
    return report, load_token_set(report.path)


def all_rows(token_set: TokenSet) -> list[TokenRow]:
    return [*token_set.rows("train"), *token_set.rows("validation")]


def rejects(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]


def test_rows_of_both_splits_hold_every_answer(tmp_path: Path, tiny: Any) -> None:
    report, token_set = run(tmp_path, tiny)
    chat = ChatFormat(tiny)
    answers = {
        chat.decode(row.input_ids[start:end])
        for row in all_rows(token_set)
        for start, end in mask_spans(row.loss_mask)
    }
    recorded = {text + "<|im_end|>" for talk in TALKS.values() for text in talk[1::2]}
    assert answers == recorded
    assert token_set.train.column_names == [
        "sample_id",
        "conversation_id",
        "source",
        "input_ids",
        "loss_mask",
        "cut_off",
    ]
    train, held_out = ({r.conversation_id for r in token_set.rows(s)} for s in report.splits)
    assert len(train) + len(held_out) == len(TALKS)
    assert not train & held_out
    assert held_out


def test_sample_ids_in_the_file_hash_the_tokens(tmp_path: Path, tiny: Any) -> None:
    import hashlib
    import struct

    _, token_set = run(tmp_path, tiny)
    for stored, row in zip(token_set.train, token_set.rows("train"), strict=True):
        packed = struct.pack(f"<{len(row.input_ids)}i", *row.input_ids)
        expected = hashlib.sha256(packed).hexdigest()[:32]
        assert stored["sample_id"] == row.sample_id == expected
        assert prompt_ids(stored) == prompt_ids(row)


def test_a_second_run_does_nothing_and_reports_the_same(tmp_path: Path, tiny: Any) -> None:
    first, _ = run(tmp_path, tiny)
    before = {path: path.stat().st_mtime_ns for path in first.path.rglob("*")}
    second, _ = run(tmp_path, tiny)
    assert first.is_new
    assert not second.is_new
    assert replace(second, is_new=True) == first
    assert {path: path.stat().st_mtime_ns for path in first.path.rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_turns": 1}, "max_turns"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"validation_share": 0.3}, "validation_share"),
        ({"chat_template_kwargs": (("x", "1"),)}, "chat_template"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, tiny: Any, change: dict[str, Any], named: str
) -> None:
    run(tmp_path, tiny)
    with pytest.raises(ValueError, match=rf"other settings: {named} \("):
        run(tmp_path, tiny, replace(DataConfig(validation_share=0.2), **change))


def test_changed_sources_seed_and_tokenizer_are_refused(tmp_path: Path, tiny: Any) -> None:
    run(tmp_path, tiny)
    with pytest.raises(ValueError, match=r"other settings: seed \(1 there, 2 now\)"):
        run(tmp_path, tiny, seed=2)
    other = tiny_tokenizer()
    other.add_tokens(["zebra"])
    with pytest.raises(ValueError, match="other settings: tokenizer"):
        run(tmp_path, other)
    write_sharegpt(tmp_path / "talks.json", {**TALKS, "new_0": ["q", "a"]})
    with pytest.raises(ValueError, match="other settings: sources"):
        run(tmp_path, tiny)


def test_an_unfinished_set_is_made_again(tmp_path: Path, tiny: Any) -> None:
    first, _ = run(tmp_path, tiny)
    (first.path / "fingerprint.json").unlink()
    with pytest.raises(ValueError, match="no finished token set"):
        load_token_set(first.path)
    second, _ = run(tmp_path, tiny)
    assert second.is_new
    assert second.fingerprint == first.fingerprint


def test_the_content_does_not_depend_on_the_order_of_the_source(tmp_path: Path, tiny: Any) -> None:
    config = DataConfig(max_tokens_total=600)
    first, _ = run(tmp_path, tiny, config)
    keys = list(TALKS)
    random.Random(3).shuffle(keys)
    write_sharegpt(tmp_path / "talks.json", {key: TALKS[key] for key in keys})
    second, _ = run(tmp_path, tiny, config, out="other")
    assert second.fingerprint == first.fingerprint


def test_the_fingerprint_sees_the_mask(tmp_path: Path, tiny: Any) -> None:
    ids = tiny("some tokens that are long enough")["input_ids"]
    prints = []
    for index, first in enumerate((2, 3)):
        path = tmp_path / f"{index}.jsonl"
        mask = [i >= first for i in range(len(ids))]
        path.write_text(json.dumps({"input_ids": ids, "loss_mask": mask, "conversation_id": "c"}))
        config = DataConfig(sources=(str(path),), validation_share=0)
        prints.append(run(tmp_path, tiny, config, out=f"out{index}")[0].fingerprint)
    assert prints[0] != prints[1]


@pytest.mark.parametrize("budget", [100, 400, 1000])
def test_the_token_budget_keeps_a_prefix_and_is_never_passed(
    tmp_path: Path, tiny: Any, budget: int
) -> None:
    _, everything = run(tmp_path, tiny, out="all")
    config = DataConfig(validation_share=0.2, max_tokens_total=budget)
    report, token_set = run(tmp_path, tiny, config)
    rows = list(token_set.rows("train"))
    whole = list(everything.rows("train"))
    assert rows == whole[: len(rows)]
    used = sum(len(row.input_ids) for row in rows)
    assert used <= budget < used + len(whole[len(rows)].input_ids)
    assert report.splits["train"].num_tokens == used
    assert report.rejects["token_budget"] > 0


def test_every_record_is_a_row_or_a_listed_reject(tmp_path: Path, tiny: Any) -> None:
    lines = [
        {"id": "good", "messages": [{"role": "user", "content": "q"}, answer("fine answer")]},
        {"id": "long", "messages": [{"role": "user", "content": "q"}, answer("word " * 300)]},
        {"id": "wide", "messages": [{"role": "user", "content": "q " * 300}, answer("a")]},
        {"id": "open", "messages": [{"role": "user", "content": "no answer"}]},
        {"id": "odd", "messages": [{"role": "alien", "content": "q"}]},
        {"id": "rows", "input_ids": [3] * 9, "loss_mask": [0] * 9},
        {"id": "big", "input_ids": [3] * 8 + [999_999], "loss_mask": [0] * 8 + [1]},
        {"id": "short", "input_ids": [3, 4], "loss_mask": [0, 1]},
        {"id": "naked", "input_ids": [3] * 9, "loss_mask": [1] * 9},
        {"id": "twin", "messages": [{"role": "user", "content": "q"}, answer("fine answer")]},
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")
    config = DataConfig(
        sources=(str(path),), validation_share=0, max_prompt_tokens=200, max_answer_tokens=200
    )
    report, token_set = run(tmp_path, tiny, config)
    assert len(all_rows(token_set)) == 1
    assert {item["record_id"]: item["reason"] for item in rejects(report.path)} == {
        "long": "answer_too_long",
        "wide": "prompt_too_long",
        "open": "no_answer",
        "odd": "unknown_role",
        "rows": "no_answer",
        "big": "malformed_tokens",
        "short": "too_short",
        "naked": "no_prompt",
        "twin": "duplicate",
        "line-11": "damaged_record",
    }
    assert sum(report.rejects.values()) == 10


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_long_turn_costs_itself_and_later_prompts_keep_it(tmp_path: Path, tiny: Any) -> None:
    source = tmp_path / "talks.json"
    write_sharegpt(source, {"a_0": ["q1", "word " * 60, "q2", "short answer"]})
    config = DataConfig(validation_share=0, max_answer_tokens=50)
    report, token_set = run(tmp_path, tiny, config)
    (row,) = token_set.rows("train")
    assert tiny.decode(prompt_ids(row)).count("word") == 60
    assert report.rejects == {"answer_too_long": 1}
    assert rejects(report.path)[0]["turn"] == 1


def test_prompts_beyond_the_row_limit_are_not_used(tmp_path: Path, tiny: Any) -> None:
    source = tmp_path / "talks.json"
    write_sharegpt(source, {"a_0": ["q1", "short", "word " * 100, "a2", "q3", "a3"]})
    report, token_set = run(tmp_path, tiny, DataConfig(validation_share=0, max_tokens=100))
    (row,) = token_set.rows("train")
    assert "word" not in tiny.decode(row.input_ids)
    assert report.rejects == {"too_long": 1}


def test_long_answers_are_cut_only_when_asked(tmp_path: Path, tiny: Any) -> None:
    source = tmp_path / "talks.json"
    write_sharegpt(source, {"a_0": ["q1", "word " * 60]})
    config = DataConfig(validation_share=0, max_answer_tokens=50, cut_long_answers=True)
    report, token_set = run(tmp_path, tiny, config)
    (row,) = token_set.rows("train")
    assert row.cut_off
    assert sum(row.loss_mask) == 50
    assert tiny.eos_token_id not in row.input_ids[-50:]
    assert report.splits["train"].num_cut_off == 1


def test_a_prompt_never_lies_in_both_splits_whatever_was_answered(
    tmp_path: Path, tiny: Any
) -> None:
    talks = {
        f"talk{i}-{j}_0": [f"question {i}", f"answer {j}", f"more {j}", "good"]
        for i in range(12)
        for j in range(6)
    }
    source = tmp_path / "talks.json"
    write_sharegpt(source, talks)
    rows = tmp_path / "rows.jsonl"
    lines = [
        {"input_ids": [3 + i] * 4 + [20 + j] * 10, "loss_mask": [0] * 4 + [1] * 10}
        for i in range(12)
        for j in range(6)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in (source, rows):
        config = DataConfig(sources=(str(name),), validation_share=0.5)
        report, token_set = run(tmp_path, tiny, config, out=f"data-{name.stem}")
        train, held_out = (
            {prompt_ids(row) for row in token_set.rows(split)} for split in report.splits
        )
        assert train
        assert held_out
        assert not train & held_out


def test_rows_with_the_same_tokens_are_kept_once(tmp_path: Path, tiny: Any) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"input_ids": list(range(3, 20)), "loss_mask": [0] * 5 + [1] * 12}
    lines = [row | {"conversation_id": name} for name in "abcdefgh"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = DataConfig(sources=(str(path),), validation_share=0.01)
    report, token_set = run(tmp_path, tiny, config)
    assert len(all_rows(token_set)) == 1
    assert report.rejects == {"duplicate_row": 7}


def test_a_rejected_record_may_be_called_anything(tmp_path: Path, tiny: Any) -> None:
    source = tmp_path / "talks.jsonl"
    ask, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer"}
    records = [{"id": "half \ud83d", "messages": [ask]}, {"messages": [ask, answer]}]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(sources=(str(source),), validation_share=0.0)
    prepare(config, out_dir=tmp_path / "out", tokenizer=tiny, seed=1)
    (line,) = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    assert json.loads(line)["record_id"] == "half \ud83d"


def test_prompts_alone_need_regeneration(tmp_path: Path, tiny: Any) -> None:
    path = tmp_path / "p.txt"
    path.write_text("a question\nanother\n")
    with pytest.raises(ValueError, match=r"no_answer 2 .*data.regenerate.enabled=true"):
        run(tmp_path, tiny, DataConfig(sources=(str(path),)))


def test_nothing_to_read_is_refused(tmp_path: Path, tiny: Any) -> None:
    with pytest.raises(ValueError, match=r"data\.sources is empty"):
        run(tmp_path, tiny, DataConfig(sources=()))


def test_a_shared_set_is_checked_and_reported(tmp_path: Path, tiny: Any) -> None:
    first, _ = run(tmp_path, tiny)
    shared = DataConfig(path=str(first.path))
    report = prepare(shared, out_dir=tmp_path / "unused", tokenizer=tiny, seed=9)
    assert report == replace(first, is_new=False)
    assert not (tmp_path / "unused").exists()
    other = tiny_tokenizer()
    other.add_tokens(["zebra"])
    with pytest.raises(ValueError, match="tokenizer"):
        prepare(shared, out_dir=tmp_path / "unused", tokenizer=other, seed=9)
    missing = DataConfig(path=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"data\.path=.*no finished token set"):
        prepare(missing, out_dir=tmp_path / "unused", tokenizer=tiny, seed=9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_turns": -1}, "data.max_turns=-1"),
        ({"max_tokens": 4, "min_tokens": 8}, "data.max_tokens=4"),
        ({"validation_share": 1.0}, "data.validation_share=1.0"),
        ({"cut_long_answers": True}, "data.cut_long_answers"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**values)
