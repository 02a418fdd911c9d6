"""Servers that fail: no answer is lost, none is believed that should not be."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.endpoints.endpoint import Patience
from data_prep.endpoints.pool import EndpointsDownError
from tests.serving.openai_server import (
    Complete,
    Fault,
    Manner,
    OpenAIServer,
    serve,
)
from tests.unit.data_prep.endpoint_helpers import (
    PATIENCE,
    TALKS,
    clean_rows,
    config_for,
    first_words,
    journal_lines,
    regenerate,
)

REPOSITORY = Path(__file__).resolve().parents[3]


def wait_until(holds: Callable[[], bool]) -> bool:
    """Whether it held within 20 s."""
    deadline = time.monotonic() + 20
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def shorter(reply: dict[str, Any]) -> dict[str, Any]:
    reply["choices"][0]["token_ids"] = reply["choices"][0]["token_ids"][:-2]
    return reply


def without_choices(reply: dict[str, Any]) -> dict[str, Any]:
    return {"model": reply["model"], "choices": []}


def twice(reply: dict[str, Any]) -> dict[str, Any]:
    """Another answer first, without a count that would show it."""
    other = reply["choices"][0] | {"token_ids": [5, 6, 2], "index": 1}
    return {"model": reply["model"], "choices": [other, *reply["choices"]]}


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
        Fault(change=twice),
        Fault(headers={"Content-Encoding": "gzip"}),
        Fault(delay_s=0.6),
        Fault(drip_s=0.05),
    ],
    ids=[
        *("429", "500", "503", "reset", "truncated", "wrong length", "no choices", "two choices"),
        *("not gzip", "slow", "dripping"),
    ],
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

    def waiting(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        wait_until(lambda: "4 failures in a row" in caplog.text)
        return None

    with (
        serve(answers, tiny, fault=waiting) as good,
        serve(answers, tiny, fault=dying) as bad,
    ):
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


def test_the_window_slides_past_a_slow_answer(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    def slow_first(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        if number == 0:  # all of the other conversations go on meanwhile
            waited.append(wait_until(lambda: server.num_answered == 2 * len(TALKS) - 2))
        return Fault(delay_s=0.01)

    waited: list[bool] = []
    with serve(answers, tiny, fault=slow_first) as server:
        regenerate(config_for(source, server, concurrency=3), tmp_path / "out", tiny)
    assert server.most_open == 3
    assert waited == [True]


# -- who is late, silent or shut ------------------------------------------------------------------


@contextmanager
def silent() -> Iterator[tuple[str, socket.socket]]:
    """The address of a server that takes connections and never says a word, and its socket."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1", listening


def test_an_endpoint_that_never_answers_does_not_hold_up_the_others(
    tmp_path: Path,
    source: Path,
    tiny: Any,
    answers: Complete,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("data_prep.endpoints.pool._GRACE_S", 0.2)
    patience = replace(PATIENCE, timeout_s=600.0)
    started = time.monotonic()
    with silent() as (url, _), serve(answers, tiny) as good:
        config = config_for(source, OpenAIServer(url), good)
        _, rows = regenerate(config, tmp_path / "out", tiny, patience=patience)
    assert len(rows) == len(TALKS)
    assert time.monotonic() - started < 60


def test_an_endpoint_that_is_late_and_serves_another_model_gives_no_answers(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    """Named first, up last: the answers are those of the model that was there at the start."""

    def waking(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        late.is_down = number < 2
        return Fault(delay_s=0.05)

    patience = Patience(retries=9, timeout_s=5.0, backoff_s=0.01, max_backoff_s=0.02)
    with (
        serve(answers, tiny, manner=Manner(model="two")) as late,
        serve(answers, tiny, fault=waking) as good,
    ):
        late.is_down = True
        config = config_for(source, late, good, retries=9)
        report, rows = regenerate(config, tmp_path / "out", tiny, patience=patience)
    assert late.asked() == []
    assert len(rows) == len(TALKS)
    assert any("it serves two, the others tiny" in note for note in report.notes)


@pytest.mark.parametrize("retry_after", ["86400", "inf", "1e400"])
def test_a_server_that_wants_to_be_left_alone_for_long_is_not_waited_for(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete, retry_after: str
) -> None:
    busy = Fault(status=429, retry_after=retry_after)
    with (
        serve(answers, tiny, fault=lambda *_: busy) as server,
        pytest.raises(EndpointsDownError, match="HTTP 429: no luck; to be asked again in"),
    ):
        regenerate(config_for(source, server), tmp_path / "out", tiny)


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ({"data": 5}, "models it serves: none"),
        ({"data": [{"id": 5}, "x", {}]}, "models it serves: none"),
        ({}, "models it serves: none"),
    ],
)
def test_a_strange_list_of_models_is_refused(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete, listing: Any, message: str
) -> None:
    with (
        serve(answers, tiny, manner=Manner(listing=listing)) as server,
        pytest.raises(EndpointsDownError, match=message),
    ):
        regenerate(config_for(source, server), tmp_path / "out", tiny)


def test_a_wrong_key_is_not_tried_again(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    patience = replace(PATIENCE, backoff_s=60.0, max_backoff_s=60.0)
    with (
        serve(answers, tiny, manner=Manner(api_key="right")) as server,
        pytest.raises(EndpointsDownError, match="HTTP 401: bad key"),
    ):
        regenerate(
            config_for(source, server),
            tmp_path / "out",
            tiny,
            patience=patience,
            api_key="wrong",
        )


def test_a_question_that_is_forbidden_is_given_up_alone(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    def moderated(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        return (
            Fault(status=403, text="flagged") if "question 7" in first_words(body, tiny) else None
        )

    with serve(answers, tiny, fault=moderated) as server:
        report, rows = regenerate(config_for(source, server), tmp_path / "out", tiny)
    assert report.rejects == {"endpoint_error": 1}
    assert len(rows) == len(TALKS) - 1


def test_what_a_server_says_can_always_be_written_down(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    def refuse(number: int, path: str, body: Mapping[str, Any]) -> Fault | None:
        bad = "question 7" in first_words(body, tiny)
        return Fault(status=400, text="half \ud83d, \x1b[31mred") if bad else None

    with serve(answers, tiny, fault=refuse) as server:
        report, _ = regenerate(config_for(source, server), tmp_path / "out", tiny)
    assert report.rejects == {"refused_by_server": 1}
    (line,) = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    assert json.loads(line)["detail"].endswith("half ?, ?[31mred")


def test_half_an_answer_is_not_quoted_but_a_page_is(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    """Reasons end up in the log and in the run's records, where nobody's text belongs."""
    for fault, words in (
        (Fault(truncate=True, change=lambda reply: reply | {"text": "private"}), "broken"),
        (Fault(page="<html>Sign in</html>"), "no JSON: <html>Sign in</html>"),
    ):
        with (
            serve(answers, tiny, fault=lambda *_, fault=fault: fault) as server,
            pytest.raises(EndpointsDownError, match=words) as caught,
        ):
            regenerate(config_for(source, server), tmp_path / words[:2], tiny)
        assert "choices" not in str(caught.value)
        assert "private" not in str(caught.value)


def test_a_reply_that_is_an_error_is_quoted(
    tmp_path: Path, source: Path, tiny: Any, answers: Complete
) -> None:
    broken = Fault(change=lambda reply: {"model": reply["model"], "error": {"message": "full"}})
    with (
        serve(answers, tiny, fault=lambda *_: broken) as server,
        pytest.raises(EndpointsDownError, match=r'no choices in the reply: .*"full"'),
    ):
        regenerate(config_for(source, server), tmp_path / "out", tiny)


def test_interrupted_while_nobody_answers_it_ends_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TOKENIZERS_PARALLELISM": "false"}
    with silent() as (url, listening):
        process = subprocess.Popen(
            [*command, url],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with listening.accept()[0]:  # it asks
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
    assert said == "interrupted\n"


WAITING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
from data_prep.chat import ChatFormat
from data_prep.endpoints.endpoint import Patience
from data_prep.endpoints.pool import EndpointPool
from data_prep.endpoints.routes import Dialect
from tests.unit.data_prep.helpers import tiny_tokenizer

chat = ChatFormat(tiny_tokenizer())
dialect = Dialect("", chat, chat.end_of_turn_ids)
try:
    with EndpointPool([sys.argv[1]], dialect, concurrency=2, patience=Patience(3, 600.0)):
        pass
except KeyboardInterrupt:
    print("interrupted")
"""
