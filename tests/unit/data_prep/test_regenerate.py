from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.answering import Answering, Question, RuntimeAnswers
from data_prep.config import DataConfig, RegenerateConfig
from data_prep.conversation import Message
from data_prep.journal import Journal, JournalRecord
from data_prep.normalise import Split
from data_prep.pipeline import DataReport, prepare
from data_prep.statistics import mask_spans
from data_prep.token_set import TokenRow, load_token_set
from runtime.request import HiddenRows
from tests.unit.data_prep.helpers import (
    FakeEngine,
    plain_answer,
    prompt_ids,
    tiny_tokenizer,
    write_sharegpt,
)
from tests.unit.data_prep.test_chat import ROME, TOOL

REPOSITORY = Path(__file__).resolve().parents[3]
TALKS = {f"talk{i}_0": [f"question {i}", f"recorded {i}", "and then", "more"] for i in range(12)}


def config(source: Path, **options: Any) -> DataConfig:
    return DataConfig(
        sources=(str(source),),
        validation_share=0.2,
        regenerate=RegenerateConfig(enabled=True, **options),
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_sharegpt(tmp_path / "talks.json", TALKS)


def run(
    settings: DataConfig, out: Path, engine: FakeEngine, **kwargs: Any
) -> tuple[DataReport, list[TokenRow]]:
    sink = kwargs.pop("hidden_sink", None)
    arguments = {"seed": 1, "target_fingerprint": "target"} | kwargs
    report = prepare(
        settings,
        out_dir=out,
        tokenizer=engine.tokenizer,
        open_answering=lambda: engine.open(sink),
        **arguments,
    )
    token_set = load_token_set(out)
    return report, [*token_set.rows("train"), *token_set.rows("validation")]


def spans(engine: FakeEngine, row: TokenRow) -> list[str]:
    return [engine.tokenizer.decode(row.input_ids[a:b]) for a, b in mask_spans(row.loss_mask)]


def test_each_answer_follows_the_prompt_a_server_would_feed(
    tmp_path: Path, source: Path, tiny: Any
) -> None:
    engine = FakeEngine(tiny)
    report, rows = run(config(source), tmp_path / "out", engine)
    assert len(rows) == len(TALKS)
    assert len(engine.questions) == 2 * len(TALKS)
    by_id = {question.prompt_ids: question for question in engine.questions}
    for row in rows:
        history: list[dict[str, str]] = []
        question = tiny.decode(prompt_ids(row)).split("\n")[1].removesuffix("<|im_end|>")
        for text, (start, end) in zip(
            (question, "and then"), mask_spans(row.loss_mask), strict=True
        ):
            history.append({"role": "user", "content": text})
            served = tiny.apply_chat_template(
                history, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            assert row.input_ids[:start] == tuple(served)
            answer = plain_answer(tiny.decode(served), by_id[tuple(served)])
            assert tiny.decode(row.input_ids[start:end]) == answer + "<|im_end|>"
            history.append({"role": "assistant", "content": answer})
    assert "recorded" not in json.dumps([tiny.decode(row.input_ids) for row in rows])
    assert report.rejects == {}


def test_sampling_seeds_depend_on_seed_conversation_and_turn_only(
    tmp_path: Path, source: Path, tiny: Any
) -> None:
    def seeds(name: str, seed: int, talks: dict[str, list[str]]) -> dict[tuple[int, ...], int]:
        engine = FakeEngine(tiny)
        write_sharegpt(source, talks)
        run(config(source, temperature=0.7), tmp_path / name, engine, seed=seed)
        return {question.prompt_ids: question.sampling.seed for question in engine.questions}

    whole = seeds("a", 1, TALKS)
    assert len(set(whole.values())) == 2 * len(TALKS)
    part = seeds("b", 1, dict(list(TALKS.items())[3:9]))
    assert part.items() <= whole.items()
    other = seeds("c", 2, TALKS)
    assert not set(other.values()) & set(whole.values())


def test_answers_cut_by_the_limit_are_marked_and_end_the_conversation(
    tmp_path: Path, source: Path, tiny: Any
) -> None:
    engine = FakeEngine(tiny)
    report, rows = run(config(source, max_tokens=3), tmp_path / "out", engine)
    assert all(row.cut_off and sum(row.loss_mask) == 3 for row in rows)
    assert all(tiny.eos_token_id not in row.input_ids[-3:] for row in rows)
    assert len(rows) == len(TALKS)
    assert report.rejects == {"after_cut_off": len(TALKS)}


def test_answers_cut_by_the_limit_can_be_dropped(tmp_path: Path, source: Path, tiny: Any) -> None:
    def respond(prompt: str, question: Question) -> str:
        return "the answer " * 40 if "question 3" in prompt else "short"

    settings = config(source, max_tokens=20, drop_cut_off=True)
    report, rows = run(settings, tmp_path / "out", FakeEngine(tiny, respond))
    assert len(rows) == len(TALKS) - 1
    assert not any(row.cut_off for row in rows)
    assert report.rejects == {"cut_off": 1, "after_cut_off": 1}


def test_a_request_never_asks_for_more_than_the_row_may_hold(
    tmp_path: Path, source: Path, tiny: Any
) -> None:
    engine = FakeEngine(tiny)
    settings = replace(config(source), max_tokens=60, max_answer_tokens=30)
    _, rows = run(settings, tmp_path / "out", engine)
    assert engine.questions
    for question in engine.questions:
        room = 60 - len(question.prompt_ids)
        assert question.sampling.max_tokens == min(room, 30)
    assert max(len(row.input_ids) for row in rows) <= 60


def test_prompts_without_answers_are_answered_in_turn(tmp_path: Path, tiny: Any) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["first?", "second?"]}\n')
    settings = replace(config(path), validation_share=0)
    (row,) = run(settings, tmp_path / "out", FakeEngine(tiny))[1]
    text = tiny.decode(row.input_ids)
    assert text.count("<|im_start|>assistant\nthe answer") == 2
    assert text.index("first?") < text.index("the answer") < text.index("second?")


def test_the_sink_gets_states_and_mask_of_every_row(
    tmp_path: Path, source: Path, tiny: Any
) -> None:
    seen: dict[str, tuple[HiddenRows, TokenRow, Split]] = {}

    def sink(hidden: HiddenRows, row: TokenRow, split: Split) -> None:
        assert row.sample_id not in seen
        seen[row.sample_id] = (hidden, row, split)

    engine = FakeEngine(tiny)
    settings = config(source, capture_features=True)
    run(settings, tmp_path / "out", engine, hidden_sink=sink)
    token_set = load_token_set(tmp_path / "out")
    stored = {
        row.sample_id: (row, split)
        for split in ("train", "validation")
        for row in token_set.rows(split)
    }
    # One row per answer: the states of an answer belong to its own prompt.
    assert len(stored) == 2 * len(TALKS)
    assert {key: (row, split) for key, (_, row, split) in seen.items()} == stored
    for hidden, row, _ in seen.values():
        assert hidden.token_ids == row.input_ids[:-1]
        assert hidden.hidden_TD[:, 0].tolist() == list(row.input_ids[:-1])


@pytest.mark.parametrize("look_ahead", [1, 3, len(TALKS), 256])
def test_a_repeated_run_asks_the_engine_nothing(
    tmp_path: Path, source: Path, tiny: Any, look_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.regenerate._MIN_LOOK_AHEAD", look_ahead)
    out = tmp_path / "out"
    first, rows = run(config(source), out, FakeEngine(tiny, capacity=1))
    (out / "fingerprint.json").unlink()
    engine = FakeEngine(tiny, capacity=1)
    second, again = run(config(source), out, engine)
    assert engine.questions == []
    assert again == rows
    assert second.fingerprint == first.fingerprint


def test_answers_of_another_target_are_refused(tmp_path: Path, source: Path, tiny: Any) -> None:
    out = tmp_path / "out"
    run(config(source), out, FakeEngine(tiny))
    (out / "fingerprint.json").unlink()
    with pytest.raises(ValueError, match=r"other settings \(target\)"):
        run(config(source), out, FakeEngine(tiny), target_fingerprint="another")
    with pytest.raises(ValueError, match=r"other settings \(temperature\)"):
        run(config(source, temperature=0.5), out, FakeEngine(tiny))


def test_an_engine_a_target_and_a_sink_are_demanded(
    tmp_path: Path, source: Path, tiny: Any
) -> None:
    arguments: dict[str, Any] = {"out_dir": tmp_path / "out", "tokenizer": tiny, "seed": 1}
    with pytest.raises(ValueError, match=r"data\.regenerate\.enabled=true needs an engine"):
        prepare(config(source), **arguments)
    with pytest.raises(ValueError, match="capture_features=true needs a sink"):
        prepare(
            config(source, capture_features=True),
            open_answering=FakeEngine(tiny).open,
            target_fingerprint="t",
            **arguments,
        )


# -- tools ----------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def tool_source(tmp_path: Path) -> Path:
    path = tmp_path / "tools.jsonl"
    row = {
        "tools": [json.loads(TOOL)],
        "messages": [
            {"role": "user", "content": "How warm is it?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "function": {"name": ROME.name, "arguments": ROME.arguments}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "21 degrees"},
            {"role": "assistant", "content": "recorded"},
        ],
    }
    path.write_text(json.dumps(row) + "\n")
    return path


def regenerate_tools(
    tmp_path: Path, qwen3: Any, first: str, **options: Any
) -> tuple[DataReport, list[TokenRow], FakeEngine]:
    def respond(prompt: str, question: Question) -> str:
        return "It is 21." if "21 degrees" in prompt else first

    engine = FakeEngine(qwen3, respond)
    settings = replace(config(tool_source(tmp_path), **options), validation_share=0)
    report, rows = run(settings, tmp_path / "out", engine)
    return report, rows, engine


def test_recorded_results_are_spliced_after_a_regenerated_call(tmp_path: Path, qwen3: Any) -> None:
    report, rows, engine = regenerate_tools(tmp_path, qwen3, CALL)
    texts = [text for row in rows for text in spans(engine, row)]
    assert texts == [CALL + "<|im_end|>", "It is 21.<|im_end|>"]
    prompt = qwen3.decode(prompt_ids(rows[-1])) if len(rows) == 2 else ""
    last = qwen3.decode(rows[-1].input_ids)
    assert "Bern" in last
    assert "Rome" not in last + prompt
    assert "<tool_response>\n21 degrees\n</tool_response>" in last
    assert report.rejects == {}


@pytest.mark.parametrize(
    ("first", "options", "reason"),
    [
        (CALL, {"tool_results": "stop"}, "tool_results_not_spliced"),
        ("It is warm.", {}, "tool_calls_differ"),
        (CALL.replace("weather", "maps"), {}, "tool_calls_differ"),
        (CALL + "\n" + CALL, {}, "tool_calls_differ"),
    ],
)
def test_a_row_ends_where_the_recorded_results_do_not_fit(
    tmp_path: Path, qwen3: Any, first: str, options: dict[str, Any], reason: str
) -> None:
    report, rows, engine = regenerate_tools(tmp_path, qwen3, first, **options)
    assert [spans(engine, row) for row in rows] == [[first + "<|im_end|>"]]
    assert report.rejects == {reason: 1}


def test_regenerated_thoughts_leave_the_history_as_the_template_says(
    tmp_path: Path, qwen3: Any
) -> None:
    engine = FakeEngine(
        qwen3, lambda prompt, question: f"<think>\nhm {len(prompt)}\n</think>\n\nyes"
    )
    source = write_sharegpt(tmp_path / "s.json", {"a_0": ["one?", "recorded", "two?", "more"]})
    _, rows = run(replace(config(source), validation_share=0), tmp_path / "out", engine)
    history = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "yes"}]
    history.append({"role": "user", "content": "two?"})
    for row, messages in zip(rows, (history[:1], history), strict=True):
        served = qwen3.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert prompt_ids(row) == tuple(served)
        (text,) = spans(engine, row)
        assert text.startswith("<think>\nhm ")
        assert text.endswith("\n</think>\n\nyes<|im_end|>")


# -- crashes --------------------------------------------------------------------------------------

CRASHING = """
import os, signal, sys
from pathlib import Path
from data_prep import journal
from tests.unit.data_prep.helpers import FakeEngine, tiny_tokenizer
from tests.unit.data_prep.test_regenerate import config, run

source, out, log, left, torn = sys.argv[1:]
left, write = int(left), journal.Journal._write

def answer(prompt, question):
    Path(log).open("a").write(question.key + "\\n")
    from tests.unit.data_prep.helpers import plain_answer
    return plain_answer(prompt, question)

def dying_write(self, values):
    global left
    for value in values:
        if isinstance(value, dict):  # the header
            break
        if left == 0:
            self._stream.write(b'["half a rec' if torn == "torn" else b"")
            self._stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        write(self, [value])
    else:
        return
    write(self, values)

journal.Journal._write = dying_write
run(config(Path(source)), Path(out), FakeEngine(tiny_tokenizer(), answer))
"""


def test_kill_9_loses_and_repeats_no_answer(tmp_path: Path, source: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TOKENIZERS_PARALLELISM": "false"}
    # Answers that are durable before the kill, in this and the earlier runs together.
    for left, torn, durable in (("0", "clean", 0), ("5", "torn", 5), ("9", "torn", 14)):
        command = [sys.executable, "-c", CRASHING, str(source), str(out), str(log), left, torn]
        result = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
        assert result.returncode == -signal.SIGKILL
        lines = (out / "regenerated.jsonl").read_bytes().split(b"\n")
        assert len(lines) - 2 == durable
    engine = FakeEngine(tiny_tokenizer())
    report, rows = run(config(source), out, engine)
    # Each answer that was durable is never asked for again; the four that were not, are (answers
    # come in pairs: a kill costs both or the second).
    asked = log.read_text().split() + [question.key for question in engine.questions]
    assert len(engine.questions) == 2 * len(TALKS) - 14
    assert len(set(asked)) == 2 * len(TALKS)
    assert len(asked) == 2 * len(TALKS) + 4
    clean, wanted = run(config(source), tmp_path / "clean", FakeEngine(tiny_tokenizer()))
    assert rows == wanted
    assert report.fingerprint == clean.fingerprint


def test_a_torn_last_line_is_cut_off_and_a_damaged_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    records = [JournalRecord(key, (1, 2), "stop") for key in "abc"]
    with Journal(path, header={"seed": 1}) as journal:
        journal.append(records[:1])
        journal.append(records[1:])
    whole = path.read_bytes()
    last_line = len(whole.rstrip().split(b"\n")[-1]) + 1
    for torn in range(1, last_line + 1):
        path.write_bytes(whole[:-torn])
        with Journal(path, header={"seed": 1}) as journal:
            assert [journal.get(key) for key in "abc"] == [*records[:2], None]
            journal.append(records[2:])
        assert path.read_bytes() == whole
    path.write_bytes(whole.replace(b'["b"', b'["b'))
    with pytest.raises(ValueError, match="line 3 is damaged"):
        Journal(path, header={"seed": 1})


def test_an_empty_answer_ends_the_conversation(tmp_path: Path, source: Path, tiny: Any) -> None:
    engine = FakeEngine(tiny, lambda prompt, question: "")
    report, rows = run(config(source), tmp_path / "out", engine)
    assert all(spans(engine, row) == ["<|im_end|>"] for row in rows)
    assert report.rejects == {"after_empty_answer": len(TALKS)}
    assert Message("assistant", "").is_empty


# -- the real engine ------------------------------------------------------------------------------


def test_the_engines_answers_and_states_arrive_unchanged(
    tmp_path: Path, source: Path, tiny: Any
) -> None:
    import torch

    from runtime.config import EngineConfig
    from runtime.engine import Engine
    from runtime.models.loader import load_target
    from tests.unit.runtime.model_fixtures import save_llama

    save_llama(tmp_path / "target", vocab_size=len(tiny), eos_token_id=tiny.eos_token_id)
    target = load_target(str(tmp_path / "target"), dtype=torch.float32, device=torch.device("cpu"))
    engine = Engine(
        target.model,
        config=EngineConfig(num_threads=1, max_running=4, num_pages=64, max_model_len=512),
        eos_token_ids=[tiny.eos_token_id],
    )
    seen: dict[str, HiddenRows] = {}

    def sink(hidden: HiddenRows, row: TokenRow, split: Split) -> None:
        assert hidden.token_ids == row.input_ids[:-1]
        seen[row.sample_id] = hidden

    # Sampled, so that a random model ends its turn now and then.
    settings = replace(
        config(source, max_tokens=24, temperature=1.0, capture_features=True), min_tokens=1
    )
    prepare(
        settings,
        out_dir=tmp_path / "out",
        tokenizer=tiny,
        seed=1,
        open_answering=lambda: nullcontext(Answering(RuntimeAnswers(engine), sink)),
        target_fingerprint=target.fingerprint,
    )
    token_set = load_token_set(tmp_path / "out")
    rows = [*token_set.rows("train"), *token_set.rows("validation")]
    assert {row.sample_id for row in rows} == set(seen)
    assert len(rows) >= len(TALKS)
    for row in rows:
        answer = row.input_ids[len(prompt_ids(row)) :]
        assert row.loss_mask == (False,) * len(prompt_ids(row)) + (True,) * len(answer)
        assert row.cut_off == (tiny.eos_token_id not in answer)
        assert len(answer) == 24 if row.cut_off else answer.index(tiny.eos_token_id) + 1
    recomputed = {
        hidden.token_ids: hidden.hidden_TD
        for hidden in engine.forward_hidden([row.input_ids[:-1] for row in rows])
    }
    for hidden in seen.values():
        torch.testing.assert_close(
            hidden.hidden_TD, recomputed[hidden.token_ids], rtol=1e-4, atol=1e-4
        )
