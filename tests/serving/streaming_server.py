"""A small server that streams chat answers with known pauses and counts drafts as vLLM does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StreamManner:
    """How it answers. ``accepted``: drafts that each step of an answer accepts; the answer's first
    token comes before them. ``dies_after``: connections are closed from that request on.
    """

    k: int = 0
    accepted: tuple[int, ...] = (0, 0, 0)
    first_s: float = 0.0
    gap_s: float = 0.0
    models: tuple[str, ...] = ("tiny",)
    word: str = "w"
    api_key: str = ""
    has_metrics: bool = True
    has_usage: bool = True
    dies_after: int | None = None
    breaks_off: bool = False  # every answer, before its end
    refuses: str = ""  # questions with this word in them
    counts_double: bool = False  # somebody else is served


@dataclass
class StreamingServer:
    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    requests: int = 0
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)
    most_open: int = 0
    num_open: int = 0


@contextmanager
def serve_stream(manner: StreamManner) -> Iterator[StreamingServer]:
    """Serve on a free port of this machine until the block ends."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            if is_dead():
                return self.hang_up()
            if manner.api_key and self.headers.get("Authorization") != f"Bearer {manner.api_key}":
                return self.reply(401, {"error": {"message": "bad key"}})
            if self.path == "/v1/models":
                return self.reply(200, {"data": [{"id": name} for name in manner.models]})
            if self.path == "/version":
                return self.reply(200, {"version": "9.9"})
            if self.path == "/metrics" and manner.has_metrics:
                return self.reply(200, metrics_page(server, manner), kind="text/plain")
            return self.reply(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.asked.append(body)
                server.num_open += 1
                server.most_open = max(server.most_open, server.num_open)
            try:
                self.answer(body)
            finally:
                with lock:
                    server.num_open -= 1

        def answer(self, body: dict[str, Any]) -> None:
            if is_dead():
                return self.hang_up()
            given = self.headers.get("Authorization", "")
            if manner.api_key and given != f"Bearer {manner.api_key}":
                return self.reply(401, {"error": {"message": f"bad key {given}"}})
            if body["model"] not in manner.models:
                return self.reply(404, {"error": {"message": f"no model {body['model']}"}})
            if manner.refuses and manner.refuses in body["messages"][-1]["content"]:
                return self.reply(400, {"error": {"message": "too long"}})
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            sizes = [1, *(1 + count for count in manner.accepted)]
            for index, size in enumerate(sizes):
                time.sleep(manner.gap_s if index else manner.first_s)
                self.event({"choices": [{"delta": {"content": f"{manner.word} " * size}}]})
            if manner.breaks_off:
                return self.hang_up()
            count(sum(manner.accepted))
            self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            if manner.has_usage:
                self.event({"choices": [], "usage": {"completion_tokens": sum(sizes)}})
            self.wfile.write(b"data: [DONE]\n\n")
            return None

        def event(self, value: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
            self.wfile.flush()

        def reply(self, status: int, value: Any, *, kind: str = "application/json") -> None:
            data = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def hang_up(self) -> None:
            self.close_connection = True
            self.connection.close()

    def is_dead() -> bool:
        return manner.dies_after is not None and len(server.asked) > manner.dies_after

    def count(num_accepted: int) -> None:
        with lock:
            server.requests += 2 if manner.counts_double else 1
            if manner.k:
                server.drafts += len(manner.accepted)
                server.accepted = server.accepted or [0] * manner.k
                for position in range(manner.k):
                    server.accepted[position] += sum(n > position for n in manner.accepted)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = StreamingServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
    server.accepted = [0] * manner.k
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def metrics_page(server: StreamingServer, manner: StreamManner) -> str:
    """As vLLM writes it: speculation's counters only where it speculates."""
    lines = [f'vllm:request_success_total{{finished_reason="stop"}} {server.requests}.0']
    if manner.k:
        lines.append(f'vllm:spec_decode_num_drafts_total{{engine="0"}} {server.drafts}.0')
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {count}.0'
            for i, count in enumerate(server.accepted)
        ]
    return "\n".join(lines) + "\n"
