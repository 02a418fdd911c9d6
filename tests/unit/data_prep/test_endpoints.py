"""Regeneration through servers: the same answers as in this process, whatever goes wrong."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.config import DataConfig, RegenerateConfig
from data_prep.endpoints.pool import EndpointPool, EndpointsDownError
from data_prep.pipeline import prepare
from tests.serving.openai_server import (
    Complete,
    Fault,
    Manner,
    OpenAIServer,
    engine_answers,
    serve,
    text_answers,
)
from tests.unit.data_prep.endpoint_helpers import (
    PATIENCE,
    config_for,
    first_words,
    journal_lines,
    regenerate,
    rows_of,
)
from tests.unit.data_prep.helpers import write_sharegpt

REPOSITORY = Path(__file__).resolve().parents[3]
TALKS = {f"talk{i}_0": [f"question {i}", f"recorded {i}", "and then", "more"] for i in range(12)}


def words(prompt: str, body: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return f"the answer {digest[: 4 + int(digest[0], 16)]}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_sharegpt(tmp_path / "talks.json", TALKS)


@pytest.fixture
def answers(tiny: Any) -> Complete:
    return text_answers(tiny, words)


def clean_rows(source: Path, folder: Path, tiny: Any, answers: Complete) -> list[Any]:
    with serve(answers, tiny) as server:
        return regenerate(config_for(source, server), folder, tiny)[1]


# -- what comes back ------------------------------------------------------------------------------


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
        (Manner(has_completions=False, has_usage=False), "messages in, text out"),
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


# -- what goes wrong ------------------------------------------------------------------------------


def shorter(reply: dict[str, Any]) -> dict[str, Any]:
    reply["choices"][0]["token_ids"] = reply["choices"][0]["token_ids"][:-2]
    return reply


def without_choices(reply: dict[str, Any]) -> dict[str, Any]:
    return {"model": reply["model"], "choices": []}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=429, retry_after="0.2"),
        Fault(status=500),
        Fault(status=503),
        Fault(reset=True),
        Fault(truncate=True),
        Fault(change=shorter),
        Fault(change=without_choices),
        Fault(delay_s=0.6),
    ],
    ids=["429", "500", "503", "reset", "truncated", "wrong length", "no choices", "slow"],
)
def test_a_failure_costs_time_and_no_answer(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete, fault: Fault
) -> None:
    wanted = clean_rows(source, tmp_path / "clean", tiny, answers)
    patience = replace(PATIENCE, timeout_s=0.3)

    def sometimes(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        return fault if number in (3, 11) else None

    started = time.monotonic()
    with serve(answers, tiny, fault=sometimes) as server:
        config = config_for(source, server)
        report, rows = regenerate(config, tmp_path / "out", tiny, patience=patience)
    assert rows == wanted
    assert report.rejects == {}
    keys = [line[0] for line in journal_lines(tmp_path / "out")]
    assert len(set(keys)) == len(keys) == 2 * len(TALKS)
    assert len(server.asked()) >= 2 * len(TALKS) + 2
    if fault.retry_after:
        assert time.monotonic() - started >= 0.4, "the server asked for two rests of 0.2 s"


def test_a_dead_endpoint_is_set_aside_and_the_rest_go_on(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = clean_rows(source, tmp_path / "clean", tiny, answers)

    def dying(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        bad.is_down = number >= 3
        return None

    with serve(answers, tiny) as good, serve(answers, tiny, fault=dying) as bad:
        config = config_for(source, bad, good)
        report, rows = regenerate(config, tmp_path / "out", tiny)
    assert rows == wanted
    assert "4 failures in a row" in caplog.text
    (note,) = [note for note in report.notes if "was set aside" in note]
    assert note.startswith(bad.url)
    assert good.asked()


def test_an_endpoint_that_was_never_there_does_not_stop_the_others(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    with serve(answers, tiny) as gone:
        pass
    with serve(answers, tiny) as good:
        report, rows = regenerate(config_for(source, gone, good), tmp_path / "out", tiny)
    assert len(rows) == len(TALKS)
    assert any("was set aside" in note for note in report.notes)


def test_without_any_endpoint_left_the_run_stops_clearly_and_goes_on_later(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    wanted = clean_rows(source, tmp_path / "clean", tiny, answers)
    out = tmp_path / "out"

    def dying(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        bad.is_down = bad.num_answered >= 7
        return None

    with serve(answers, tiny, fault=dying) as bad:
        with pytest.raises(EndpointsDownError, match="no endpoint answers any more") as caught:
            regenerate(config_for(source, bad), out, tiny)
        assert bad.url in str(caught.value)
        assert "go on" in str(caught.value)
    kept = {line[0] for line in journal_lines(out)}
    assert len(kept) >= 7
    with serve(answers, tiny) as good:
        _, rows = regenerate(config_for(source, good), out, tiny)
    assert rows == wanted
    assert len(good.asked()) == 2 * len(TALKS) - len(kept)


def test_a_question_that_always_fails_is_given_up_alone(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    def poison(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        return Fault(status=500) if "question 7" in first_words(body, tiny) else None

    def refuse(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        is_long = "question 7" in first_words(body, tiny)
        return Fault(status=400, text="longer than 8 tokens") if is_long else None

    for reason, fault in (("endpoint_error", poison), ("refused_by_server", refuse)):
        with serve(answers, tiny, fault=fault) as server:
            report, rows = regenerate(config_for(source, server), tmp_path / reason, tiny)
        assert report.rejects == {reason: 1}
        assert len(rows) == len(TALKS) - 1
    assert "longer than 8 tokens" in (tmp_path / reason / "rejects.jsonl").read_text()


def test_a_server_that_fails_every_question_is_not_asked_for_ever(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    with (
        serve(answers, tiny, fault=lambda *_: Fault(status=500)) as server,
        pytest.raises(EndpointsDownError, match="HTTP 500: no luck"),
    ):
        regenerate(config_for(source, server), tmp_path / "out", tiny)
    assert len(server.asked()) <= 4 * (PATIENCE.retries + 1)


def test_a_server_restarted_with_another_model_is_noticed(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    def renamed(reply: dict[str, Any]) -> dict[str, Any]:
        return reply | {"model": "another"}

    with (
        serve(answers, tiny, fault=lambda *_: Fault(change=renamed)) as server,
        pytest.raises(EndpointsDownError, match="answers come from model another now, not tiny"),
    ):
        regenerate(config_for(source, server), tmp_path / "out", tiny)


@pytest.mark.parametrize(
    ("manner", "model", "message"),
    [
        (Manner(models=("a", "b")), "", r"set data\.regenerate\.model to one of .*: a, b"),
        (Manner(), "other", "it serves tiny, not other"),
        (Manner(prefix_ids=(0,)), "", "`mtp data check-render` shows the difference"),
        (Manner(template="{{ messages[0]['content'] }}", has_completions=False), "", "template"),
    ],
)
def test_a_server_that_cannot_serve_the_target_is_refused_at_once(
    tmp_path: Path,
    source: Path,
    tiny: Any,
    answers: Complete,
    manner: Manner,
    model: str,
    message: str,
) -> None:
    with serve(answers, tiny, manner=manner) as server:
        config = config_for(source, server, model=model)
        with pytest.raises(EndpointsDownError, match=message):
            regenerate(config, tmp_path / "out", tiny)
        assert server.asked() + server.asked("/v1/chat/completions") == []


def test_endpoints_must_serve_one_model(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    with (
        serve(answers, tiny) as one,
        serve(answers, tiny, manner=Manner(model="two")) as other,
        pytest.raises(ValueError, match=r"different models .* serves tiny, .* serves two"),
    ):
        regenerate(config_for(source, one, other), tmp_path / "out", tiny)


def test_the_key_is_sent_and_shown_nowhere(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "sk-secret-123"
    with serve(answers, tiny, manner=Manner(api_key=key)) as server:
        config = config_for(source, server, retries=0)
        _, rows = regenerate(config, tmp_path / "out", tiny, api_key=key)
        with pytest.raises(EndpointsDownError, match="HTTP 401: bad key: Bearer") as caught:
            regenerate(config, tmp_path / "wrong", tiny, api_key="sk-other-456")
    assert len(rows) == len(TALKS)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in (key, "sk-other-456"):
        assert secret not in caplog.text + str(caught.value)
        assert not any(secret.encode() in content for content in written)


# -- how much at once -----------------------------------------------------------------------------


def test_the_window_slides_past_a_slow_answer(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    def slow_first(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        num_answered.append(server.num_answered)
        return Fault(delay_s=0.8) if number == 0 else Fault(delay_s=0.01)

    num_answered: list[int] = []
    with serve(answers, tiny, fault=slow_first) as server:
        regenerate(config_for(source, server, concurrency=3), tmp_path / "out", tiny)
    assert server.most_open == 3
    # All but the slow conversation's second answer were there before the first came back.
    assert max(num_answered) == 2 * len(TALKS) - 1


# -- records --------------------------------------------------------------------------------------


def test_a_finished_set_needs_no_server_and_says_whose_answers_it_holds(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    out = tmp_path / "out"
    with serve(answers, tiny) as server:
        config = config_for(source, server)
        first, _ = regenerate(config, out, tiny)
    pools: list[EndpointPool] = []
    elsewhere = replace(
        config.regenerate, url=("http://localhost:1/v1",), concurrency=9, retries=1, model="tiny"
    )
    again, _ = regenerate(replace(config, regenerate=elsewhere), out, tiny, pools=pools)
    assert not again.is_new
    assert pools == []
    assert again.fingerprint == first.fingerprint
    assert first.notes == again.notes
    other = replace(config.regenerate, model="another")
    with pytest.raises(ValueError, match=r'answered_by .*"tiny".*"another"'):
        regenerate(replace(config, regenerate=other), out, tiny)
    here = replace(config.regenerate, url=(), model="")
    with pytest.raises(ValueError, match="answered_by"):
        regenerate(replace(config, regenerate=here), out, tiny)


def test_answers_of_another_model_are_not_mixed(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    out = tmp_path / "out"
    clean_rows(source, out, tiny, answers)
    (out / "fingerprint.json").unlink()
    with (
        serve(answers, tiny, manner=Manner(model="two")) as server,
        pytest.raises(ValueError, match=r"other settings \(answered_by\)"),
    ):
        regenerate(config_for(source, server), out, tiny)


KILLED = """
import sys
from pathlib import Path
from tests.serving.openai_server import OpenAIServer
from tests.unit.data_prep.endpoint_helpers import config_for, regenerate
from tests.unit.data_prep.helpers import tiny_tokenizer

source, out, url = sys.argv[1:]
regenerate(config_for(Path(source), OpenAIServer(url)), Path(out), tiny_tokenizer())
"""


def test_kill_9_in_the_middle_loses_and_repeats_no_answer(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    wanted = clean_rows(source, tmp_path / "clean", tiny, answers)
    out = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TOKENIZERS_PARALLELISM": "false"}

    def slow(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        return Fault(delay_s=0.05 if number < 9 else 3600.0)

    with serve(answers, tiny, fault=slow) as server:
        command = [sys.executable, "-c", KILLED, str(source), str(out), server.url]
        with subprocess.Popen(command, cwd=REPOSITORY, env=environment) as process:
            deadline = time.monotonic() + 60
            while not (out / "regenerated.jsonl").is_file() or len(journal_lines(out)) < 9:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    kept = {line[0] for line in journal_lines(out)}
    assert len(kept) == 9
    with serve(answers, tiny) as server:
        _, rows = regenerate(config_for(source, server), out, tiny)
    assert rows == wanted
    assert len(server.asked()) == 2 * len(TALKS) - 9
    keys = [line[0] for line in journal_lines(out)]
    assert len(keys) == len(set(keys)) == 2 * len(TALKS)


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enabled": False}, r"data\.regenerate\.url needs data\.regenerate\.enabled=true"),
        ({"capture_features": True}, r"capture_features=true with data\.regenerate\.url"),
        ({"url": ("localhost:8000",)}, r"data\.regenerate\.url='localhost:8000': expected an addr"),
        ({"url": ("http://me:key@host/v1",)}, "no user or password in the address"),
        ({"url": ("http://a/v1", "http://a/v1")}, "the same endpoint twice"),
        ({"concurrency": 0}, "concurrency=0: must be at least 1"),
        ({"retries": -1}, "retries=-1: must not be negative"),
        ({"request_timeout_s": 0.0}, "must be greater than 0"),
    ],
)
def test_impossible_settings_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"enabled": True, "url": ("http://localhost:8000/v1",)} | options
    with pytest.raises(ValueError, match=message) as caught:
        RegenerateConfig(**given)
    assert "me:key" not in str(caught.value)


def test_a_run_in_this_process_has_the_fingerprint_it_always_had(source: Path, tiny: Any) -> None:
    from data_prep.chat import ChatFormat
    from data_prep.fingerprints import fingerprint_inputs

    config = DataConfig(sources=(str(source),), regenerate=RegenerateConfig(enabled=True))
    chat = ChatFormat(tiny)
    inputs = fingerprint_inputs(config, chat, seed=1, target_fingerprint="t")
    assert sorted(inputs["regenerate"]) == [
        "capture_features",
        "drop_cut_off",
        "enabled",
        "max_tokens",
        "temperature",
        "tool_results",
        "top_k",
        "top_p",
    ]


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
