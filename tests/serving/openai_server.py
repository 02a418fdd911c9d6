"""A small OpenAI-compatible server for tests, over whatever answers ids with ids.

As much of the API as regeneration and the rendering check use: /v1/models, /v1/completions,
/v1/chat/completions, /tokenize, /metrics. What kind of server it is (:class:`Manner`) and how it
fails (:class:`Fault`) are up to the test. Every request is recorded.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

from runtime.engine import Engine
from runtime.request import Request, SamplingParams

Complete = Callable[[Sequence[int], Mapping[str, Any]], tuple[list[int], str]]
"""Prompt ids and the request's parameters to output ids and ``stop`` or ``length``."""

EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "skip_special_tokens")


@dataclass(frozen=True)
class Manner:
    """What kind of server it is."""

    model: str = "tiny"
    models: tuple[str, ...] = ()  # what it lists; empty: its model
    has_completions: bool = True
    takes_ids: bool = True
    gives_ids: bool = True
    takes_extensions: bool = True
    has_usage: bool = True
    counts_end: bool = True  # the token that ends a turn, in usage
    keeps_end: bool = True  # that token, in token_ids
    tokenizes_messages: bool = True
    prefix_ids: tuple[int, ...] = ()  # put before every prompt
    template: str = ""  # another chat template than the tokenizer's
    generation_prompt: bool = True
    api_key: str = ""
    listing: Any = None  # the whole reply of /v1/models


@dataclass(frozen=True)
class Fault:
    """One broken reply instead of the right one."""

    status: int = 200
    retry_after: str = ""
    reset: bool = False  # the connection, before a byte of the reply
    truncate: bool = False  # the reply's JSON, in its middle
    delay_s: float = 0.0
    drip_s: float = 0.0  # between any two bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # of the reply
    page: str = ""  # instead of JSON
    text: str = "no luck"  # what an error says


@dataclass
class OpenAIServer:
    """A running server. ``requests``: path and body of each, in order of arrival."""

    url: str
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    num_answered: int = 0
    is_down: bool = False  # resets every connection

    def asked(self, path: str = "/v1/completions") -> list[dict[str, Any]]:
        """Bodies of the questions proper: not of the short ones that find out about the server."""
        return [body for name, body in self.requests if name == path and body["max_tokens"] > 2]


FaultOf = Callable[[int, str, Mapping[str, Any]], Fault | None]
"""Number of the request (from 0, questions proper only), path and body to what goes wrong."""


@contextmanager
def serve(
    complete: Complete,
    tokenizer: Any,
    *,
    manner: Manner = Manner(),
    fault: FaultOf = lambda number, path, body: None,
    port: int = 0,
) -> Iterator[OpenAIServer]:
    """Serve on a free port of this machine until the block ends."""
    lock = threading.Lock()
    stop = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            if server.is_down:
                return self.reset()
            if self.path == "/metrics":
                return self.send(200, f"answered_total {server.num_answered}\n", kind="text/plain")
            if self.path == "/v1/models":
                names = manner.models or (manner.model,)
                listing = {"data": [{"id": name} for name in names]}
                return self.send(200, manner.listing if manner.listing is not None else listing)
            return self.send(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len([b for _, b in server.requests if b.get("max_tokens", 0) > 2])
                server.requests.append((self.path, body))
                server.num_open += 1
                server.most_open = max(server.most_open, server.num_open)
            try:
                self.handle_post(number, body)
            finally:
                with lock:
                    server.num_open -= 1

        def handle_post(self, number: int, body: dict[str, Any]) -> None:
            if server.is_down:
                return self.reset()
            if manner.api_key and self.headers.get("Authorization") != f"Bearer {manner.api_key}":
                given = self.headers.get("Authorization")
                return self.send(401, {"error": {"message": f"bad key: {given}"}})
            is_question = body.get("max_tokens", 0) > 2
            wrong = fault(number, self.path, body) if is_question else None
            if wrong is not None and wrong.delay_s:
                stop.wait(wrong.delay_s)
            if wrong is not None and wrong.reset:
                return self.reset()
            if wrong is not None and wrong.status != 200:
                return self.send(
                    wrong.status, {"error": {"message": wrong.text}}, retry_after=wrong.retry_after
                )
            status, reply = respond(self.path, body)
            if status == 200 and wrong is not None and wrong.change is not None:
                reply = wrong.change(reply)
            if status == 200 and is_question:
                server.num_answered += 1
            wrong = wrong or Fault()
            return self.send(
                status,
                wrong.page or reply,
                truncate=wrong.truncate,
                headers=wrong.headers,
                drip_s=wrong.drip_s,
            )

        def reset(self) -> None:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.connection.close()

        def send(
            self,
            status: int,
            value: Any,
            *,
            truncate: bool = False,
            retry_after: str = "",
            kind: str = "application/json",
            headers: Mapping[str, str] = MappingProxyType({}),
            drip_s: float = 0.0,
        ) -> None:
            data = (value if isinstance(value, str) else json.dumps(value)).encode()
            data = data[: len(data) // 2] if truncate else data
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            if retry_after:
                self.send_header("Retry-After", retry_after)
            for name, text in headers.items():
                self.send_header(name, text)
            with contextlib.suppress(ConnectionError):  # the client gave up waiting
                self.end_headers()
                size = 1 if drip_s else len(data)
                for start in range(0, len(data), size):
                    self.wfile.write(data[start : start + size])
                    stop.wait(drip_s)

        def finish(self) -> None:
            if not self.close_connection or not self.connection._closed:  # type: ignore[attr-defined]
                super().finish()

    def respond(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        strange = [key for key in EXTENSIONS if key in body]
        if strange and not manner.takes_extensions:
            return 400, {"error": {"message": f"unknown parameter: {strange[0]}"}}
        if path == "/tokenize":
            if "messages" in body and not manner.tokenizes_messages:
                return 422, {"detail": "prompt: field required"}
            ids = render(body) if "messages" in body else encode(body["prompt"])
            return 200, {"tokens": ids, "count": len(ids), "max_model_len": 512}
        if body.get("model") not in (manner.models or (manner.model,)):
            return 404, {"error": {"message": f"the model {body.get('model')} does not exist"}}
        if path == "/v1/completions" and manner.has_completions:
            prompt = body["prompt"]
            if isinstance(prompt, list) and not manner.takes_ids:
                return 400, {"error": {"message": "prompt: expected a string"}}
            ids = [*manner.prefix_ids, *(prompt if isinstance(prompt, list) else encode(prompt))]
            return 200, completion(body, ids)
        if path == "/v1/chat/completions":
            return 200, completion(body, render(body), chat=True)
        return 404, {"detail": "Not Found"}

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def render(body: dict[str, Any]) -> list[int]:
        text = tokenizer.apply_chat_template(
            body["messages"],
            tools=body.get("tools"),
            chat_template=manner.template or None,
            add_generation_prompt=manner.generation_prompt,
            tokenize=False,
            **body.get("chat_template_kwargs", {}),
        )
        return [*manner.prefix_ids, *encode(text)]

    def completion(body: dict[str, Any], ids: list[int], *, chat: bool = False) -> dict[str, Any]:
        output, finish = complete(ids, body)
        shown = output[:-1] if finish == "stop" else output
        text = tokenizer.decode(shown, skip_special_tokens=body.get("skip_special_tokens", True))
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "stop_reason": None}
        if finish == "stop" and not manner.keeps_end:
            choice["stop_reason"] = output[-1]
        if body.get("return_token_ids") and manner.gives_ids:
            choice["prompt_token_ids"] = ids
            choice["token_ids"] = output if manner.keeps_end or finish != "stop" else shown
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        reply: dict[str, Any] = {"object": "text_completion", "model": body["model"]}
        reply["choices"] = [choice]
        if manner.has_usage:
            count = len(output) if manner.counts_end else len(shown)
            reply["usage"] = {"prompt_tokens": len(ids), "completion_tokens": count}
        return reply

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    http.daemon_threads = True
    server = OpenAIServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        http.shutdown()
        thread.join()
        http.server_close()


def engine_answers(engine: Engine) -> Complete:
    """Answers of the runtime, one request after the other."""
    lock = threading.Lock()

    def complete(ids: Sequence[int], body: Mapping[str, Any]) -> tuple[list[int], str]:
        sampling = SamplingParams(
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=max(0, body.get("top_k", 0)),
            seed=body.get("seed", 0),
            max_tokens=body["max_tokens"],
            stop_token_ids=tuple(body.get("stop_token_ids", ())),
        )
        with lock:
            name = f"r{time.monotonic_ns()}"
            (generation,) = engine.generate([Request(name, tuple(ids), sampling)])
        return list(generation.output_ids), generation.finish_reason

    return complete


def text_answers(tokenizer: Any, respond: Callable[[str, Mapping[str, Any]], str]) -> Complete:
    """Answers of ``respond(prompt text, request)``, as the tokenizer's ids."""

    def complete(ids: Sequence[int], body: Mapping[str, Any]) -> tuple[list[int], str]:
        text = respond(tokenizer.decode(list(ids)), body)
        output = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        limit = body["max_tokens"]
        return (output, "stop") if len(output) <= limit else (output[:limit], "length")

    return complete
