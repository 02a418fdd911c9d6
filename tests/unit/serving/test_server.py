"""The engine that runs already: its counters before and after, and when they are not believed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mtp_train.serving import server
from mtp_train.serving.job import DraftCounts, ServingError, ServingJob
from mtp_train.serving.server import describe_server, read_counters, serve_at_url


class FakeServer:
    """Counts like a server: every answer has two steps per prompt token, half of them accepted."""

    def __init__(self) -> None:
        self.k = 2
        self.drafts, self.accepted, self.requests, self.tokens = 9, 4, 3, 20
        self.others = 0  # requests of somebody else per request of ours
        self.lag = 0  # reads of /metrics until an answer is in it
        self.gives_ids = self.gives_steps = True
        self.max_model_len = 64
        self.asked: list[dict[str, Any]] = []
        self._waiting: list[tuple[int, int]] = []

    def metrics(self) -> str:
        if self.lag > 0:
            self.lag -= 1
        else:
            for size, tokens in self._waiting:
                self.drafts += 2 * size
                self.accepted += size
                self.requests += 1 + self.others
                self.tokens += tokens
            self._waiting.clear()
        per_position = "".join(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{j}"}} '
            f"{self.accepted if j == 0 else 0}.0\n"
            for j in range(self.k)
        )
        return (
            "# HELP vllm:spec_decode_num_drafts_total Number of drafts.\n"
            f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="a b"}} {self.drafts}.0\n'
            f"{per_position}"
            f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {self.requests}.0\n'
            f'vllm:request_success_total{{engine="0",finished_reason="length"}} 0.0\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}.0\n'
        )

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        prompt = request["prompt"]
        self._waiting.append((len(prompt), len(prompt) + 1))
        choice: dict[str, Any] = {"finish_reason": "stop"}
        if self.gives_ids:
            choice["token_ids"] = [*prompt, 2]
        metrics = {"speculative_decoding": {"per_step_accepted": [1, 0] * len(prompt)}}
        return {"choices": [choice], "metrics": metrics if self.gives_steps else None}


@contextmanager
def running(fake: FakeServer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {
                "/metrics": fake.metrics,
                "/version": lambda: json.dumps({"version": "0.32.0"}),
                "/v1/models": lambda: json.dumps(
                    {"data": [{"id": "m", "max_model_len": fake.max_model_len}]}
                ),
            }
            self._answer(pages[self.path]())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(json.dumps(fake.complete(json.loads(body))))

        def _answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def make_job(k: int = 2) -> ServingJob:
    return ServingJob(
        Path("target"), Path("head"), k, "bfloat16", (((5, 6), (7,)),), 10, stop_token_ids=(2,)
    )


def test_counters_before_and_after_a_prompt_are_its_own() -> None:
    fake = FakeServer()
    with running(fake) as url:
        served = serve_at_url(make_job(), url=f"{url}/v1")
    assert [prompt.counts for prompt in served.prompts] == [
        DraftCounts(4, (2, 0)),
        DraftCounts(2, (1, 0)),
    ]
    assert served.prompts[0].accepted_per_step == (1, 0, 1, 0)
    assert served.counters == served.attributed == DraftCounts(6, (3, 0))
    assert served.warm_up == DraftCounts(9, (4, 0))
    assert served.version == "0.32.0"
    assert served.prompts[0].output_ids == (5, 6, 2)
    assert fake.asked[0]["temperature"] == 0
    assert fake.asked[0]["return_token_ids"] is True
    assert fake.asked[0]["stop_token_ids"] == [2]


def test_a_server_that_only_counts_is_enough() -> None:
    fake = FakeServer()
    fake.gives_steps = False
    with running(fake) as url:
        served = serve_at_url(make_job(), url=url)
    assert [prompt.accepted_per_step for prompt in served.prompts] == [None, None]


def test_counters_that_come_late_are_waited_for() -> None:
    fake = FakeServer()
    with running(fake) as url:
        describe_server(url)
        fake.lag = 4
        assert serve_at_url(make_job(), url=url).counters == DraftCounts(6, (3, 0))


def test_counters_that_never_come_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SETTLE_S", 0.2)
    fake = FakeServer()
    fake.lag = 10_000
    with running(fake) as url, pytest.raises(ServingError, match="--disable-log-stats"):
        serve_at_url(make_job(), url=url)


def test_other_traffic_is_noticed() -> None:
    fake = FakeServer()
    fake.others = 1
    with running(fake) as url, pytest.raises(ServingError, match="used by somebody else"):
        serve_at_url(make_job(), url=url)


def test_what_the_server_cannot_do_is_named() -> None:
    fake = FakeServer()
    with running(fake) as url:
        with pytest.raises(ServingError, match="speculates with K=2, expected K=1"):
            serve_at_url(make_job(k=1), url=url)
        fake.max_model_len = 12
        with pytest.raises(ServingError, match="max_model_len=12, at least 21"):
            serve_at_url(make_job(), url=url)
        fake.max_model_len, fake.gives_ids = 64, False
        with pytest.raises(ServingError, match="no token_ids"):
            serve_at_url(make_job(), url=url)


def test_an_address_that_is_none_and_a_server_that_is_not_there_are_named() -> None:
    with pytest.raises(ServingError, match=r"engine.url=localhost:8000: /v1/models: Unsupported"):
        describe_server("localhost:8000")
    with pytest.raises(ServingError, match=r"=http://127.0.0.1:1: /v1/models: Conn") as caught:
        describe_server("http://127.0.0.1:1")
    assert caught.value.stage == "reach"


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [None]}, {"choices": [{"token_ids": [5]}]}]
)
def test_a_broken_answer_is_refused(answer: dict[str, Any]) -> None:
    class Broken(FakeServer):
        def complete(self, request: dict[str, Any]) -> dict[str, Any]:
            return answer

    with running(Broken()) as url, pytest.raises(ServingError, match="without choices") as caught:
        serve_at_url(make_job(), url=url)
    assert caught.value.stage == "decode"


def test_counters_of_several_engines_are_added() -> None:
    text = (
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 3.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 4.0\n'
        'vllm:spec_decode_num_drafts_total{engine="0"} 1e1\n'
        'vllm:spec_decode_num_drafts_total{engine="1"} 2.0\n'
        'vllm:spec_decode_num_drafts_created{engine="1"} 1.7e9\n'
    )
    assert read_counters(text).counts == DraftCounts(12, (7,))
