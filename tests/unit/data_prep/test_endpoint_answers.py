"""Answers from servers of every kind: the same rows as in this process, or a reason why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.pipeline import prepare
from tests.serving.openai_server import (
    Complete,
    Fault,
    Manner,
    OpenAIServer,
    engine_answers,
    serve,
)
from tests.unit.data_prep.endpoint_helpers import (
    TALKS,
    clean_rows,
    config_for,
    journal_lines,
    regenerate,
    rows_of,
)


def test_greedy_answers_equal_those_of_the_engine_in_this_process(
    tmp_path: Path, source: Path, tiny: Any
) -> None:
    import contextlib

    import torch

    from data_prep.answering import Answering, RuntimeAnswers
    from runtime.config import EngineConfig
    from runtime.engine import Engine
    from runtime.models.loader import load_target
    from tests.unit.runtime.model_fixtures import save_llama

    save_llama(tmp_path / "target", vocab_size=len(tiny), eos_token_id=tiny.eos_token_id)
    target = load_target(str(tmp_path / "target"), dtype=torch.float32, device=torch.device("cpu"))

    def new_engine() -> Engine:
        settings = EngineConfig(num_threads=1, max_running=4, num_pages=64, max_model_len=512)
        return Engine(target.model, config=settings, eos_token_ids=[tiny.eos_token_id])

    settings = replace(config_for(source, max_tokens=24), min_tokens=1)
    prepare(
        settings,
        out_dir=tmp_path / "here",
        tokenizer=tiny,
        seed=1,
        open_answering=lambda: contextlib.nullcontext(Answering(RuntimeAnswers(new_engine()))),
        target_fingerprint="target",
    )
    with serve(engine_answers(new_engine()), tiny) as server:
        there = replace(config_for(source, server, max_tokens=24), min_tokens=1)
        report, rows = regenerate(there, tmp_path / "there", tiny)
    assert rows == rows_of(tmp_path / "here")
    assert len(rows) == len(TALKS)
    assert sum(item.num_cut_off for item in report.splits.values()) == sum(r.cut_off for r in rows)
    for body in server.asked():
        assert isinstance(body["prompt"][0], int)
        assert (body["temperature"], body["top_k"], body["repetition_penalty"]) == (0.0, -1, 1.0)
        assert "seed" not in body


@pytest.mark.parametrize(
    ("manner", "note"),
    [
        (Manner(), ""),
        (Manner(keeps_end=False), ""),
        (Manner(gives_ids=False), "prompt as token ids, answer as text"),
        (Manner(gives_ids=False, counts_end=False), "prompt as token ids, answer as text"),
        (Manner(gives_ids=False, takes_extensions=False), "the server's own"),
        (Manner(takes_ids=False), "messages in, text out"),
        (Manner(has_completions=False, takes_extensions=False), "messages in, text out"),
        (Manner(has_completions=False, has_usage=False), "it counts no tokens"),
    ],
)
def test_every_kind_of_server_gives_the_same_rows_and_inexact_ones_are_named(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete, manner: Manner, note: str
) -> None:
    wanted = clean_rows(source, tmp_path / "clean", tiny, answers)
    with serve(answers, tiny, manner=manner) as server:
        report, rows = regenerate(config_for(source, server), tmp_path / "out", tiny)
    assert rows == wanted
    assert report.rejects == {}
    notes = " ".join(report.notes)
    assert "nothing here can prove" in notes
    assert note in notes
    assert ("24 of 24 answers came as text" in notes) == bool(note)
    assert (not note) == all(len(line) == 3 for line in journal_lines(tmp_path / "out"))


def test_sampling_is_passed_on(tmp_path: Path, source: Path, tiny: Any, answers: Complete) -> None:
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_tokens": 50}
    with serve(answers, tiny) as server:
        regenerate(config_for(source, server, **options), tmp_path / "out", tiny)
    seeds = {body["seed"] for body in server.asked()}
    assert len(seeds) == 2 * len(TALKS)
    assert all(0 <= seed < 2**31 for seed in seeds)
    for body in server.asked():
        assert (body["temperature"], body["top_k"], body["top_p"]) == (0.7, 5, 0.9)
        assert (body["max_tokens"], body["stop_token_ids"]) == (50, [tiny.eos_token_id])


def spelled(tokenizer: Any) -> Complete:
    """Answers in single letters, as a model may write them and the tokenizer never would."""

    def complete(ids: Any, body: Any) -> tuple[list[int], str]:
        letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "the"]
        output = [*letters, tokenizer.eos_token_id]
        limit = body["max_tokens"]
        return (output[:limit], "stop" if len(output) <= limit else "length")

    return complete


def test_ids_that_the_tokenizer_would_not_choose_are_kept_or_rejected_never_replaced(
    tmp_path: Path, source: Path, tiny: Any
) -> None:
    with serve(spelled(tiny), tiny) as server:
        _, rows = regenerate(config_for(source, server), tmp_path / "ids", tiny)
    assert all(row.input_ids[-4:] == tuple(spelled(tiny)([], {"max_tokens": 9})[0]) for row in rows)
    (reencoded,) = [tiny("the", add_special_tokens=False)["input_ids"]]
    assert len(reencoded) == 1
    for manner in (Manner(gives_ids=False), Manner(has_completions=False)):
        out = tmp_path / f"text{manner.has_completions}"
        with (
            serve(spelled(tiny), tiny, manner=manner) as server,
            pytest.raises(ValueError, match="retokenised_differently 12"),
        ):
            regenerate(config_for(source, server), out, tiny)
        # Asked once and remembered: another attempt would bring the same.
        assert len(server.asked("/v1/chat/completions") + server.asked()) == len(TALKS)
        assert {line[3]["fault"] for line in journal_lines(out)} == {"retokenised_differently"}


def test_answers_cut_by_the_limit_are_marked_and_counted(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    for name, manner in {"ids": Manner(), "text": Manner(gives_ids=False)}.items():
        with serve(answers, tiny, manner=manner) as server:
            config = config_for(source, server, max_tokens=3)
            report, rows = regenerate(config, tmp_path / name, tiny)
        assert all(row.cut_off and sum(row.loss_mask) == 3 for row in rows)
        assert sum(item.num_cut_off for item in report.splits.values()) == len(TALKS)


def test_an_answer_ends_at_its_end_of_turn_even_where_the_server_went_on(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    def babbling(ids: Any, body: Any) -> tuple[list[int], str]:
        output, _ = answers(ids, body)
        return [*output, *output][: body["max_tokens"]], "length"

    wanted = clean_rows(source, tmp_path / "clean", tiny, answers)
    with serve(babbling, tiny) as server:
        assert regenerate(config_for(source, server), tmp_path / "out", tiny)[1] == wanted


def changed(**choice: Any) -> Fault:
    """The right reply, but for this."""

    def change(reply: dict[str, Any]) -> dict[str, Any]:
        usage = {"prompt_tokens": reply["usage"]["prompt_tokens"]}
        return reply | {"choices": [reply["choices"][0] | choice], "usage": usage}

    return Fault(change=change)


HALF = "half a \ud83d"
IDS, TEXT, CHAT = Manner(), Manner(gives_ids=False), Manner(has_completions=False)


@pytest.mark.parametrize(
    ("manner", "fault", "reason"),
    [
        (IDS, changed(token_ids=[], finish_reason="length"), "no_answer"),
        (TEXT, changed(text="", finish_reason="length"), "no_answer"),
        (CHAT, changed(message={"content": ""}, finish_reason="length"), "no_answer"),
        (IDS, changed(token_ids=[-1, 2]), "malformed_tokens"),
        (TEXT, changed(text=HALF), "bad_encoding"),
        (CHAT, changed(message={"content": HALF}), "malformed_message"),
        (CHAT, changed(message={"content": "", "reasoning_content": HALF}), "malformed_message"),
        (TEXT, changed(stop_reason=5), "no_end_of_turn"),
        (TEXT, changed(text="the " * 200, finish_reason="length"), "retokenised_differently"),
        (CHAT, changed(message={"content": [{"type": "text"}]}), "malformed_message"),
        (
            CHAT,
            changed(message={"tool_calls": [{"function": {"name": None, "arguments": "{}"}}]}),
            "malformed_message",
        ),
        (
            CHAT,
            changed(message={"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}),
            "malformed_message",
        ),
        (CHAT, changed(message={"tool_calls": {"function": {}}}), "malformed_message"),
        (IDS, changed(finish_reason="content_filter \ud83d"), "refused_by_server"),
    ],
)
def test_an_answer_that_cannot_be_used_is_rejected_and_the_run_goes_on(
    tmp_path: Path,
    source: Path,
    tiny: Any,
    answers: Complete,
    manner: Manner,
    fault: Fault,
    reason: str,
) -> None:
    with serve(
        answers, tiny, manner=manner, fault=lambda number, *_: fault if number == 5 else None
    ) as server:
        config = config_for(source, server, max_tokens=64)
        report, rows = regenerate(config, tmp_path / "out", tiny)
    assert report.rejects == {reason: 1}
    assert all(any(row.loss_mask) for row in rows)
    assert len(rows) in (len(TALKS), len(TALKS) - 1)


def test_the_server_of_these_tests_counts(tiny: Any, answers: Complete) -> None:
    """The helpers above look at what it recorded."""
    import httpx

    with serve(answers, tiny) as server:
        assert isinstance(server, OpenAIServer)
        base = server.url.removesuffix("/v1")
        assert httpx.get(base + "/metrics").text == "answered_total 0\n"
        body = {"model": "tiny", "prompt": [5], "max_tokens": 4, "temperature": 0}
        reply = httpx.post(server.url + "/completions", json=body).json()
        assert reply["choices"][0]["finish_reason"] == "length"
        assert httpx.get(base + "/metrics").text == "answered_total 1\n"
        assert len(server.asked()) == 1
