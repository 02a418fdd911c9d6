"""Load on one server: questions in flight, answers streamed, counters before and after.

As many requests as asked for are in flight until none is left; the rate is all their tokens by the
time until the last of them has arrived, its end included, when fewer are in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data_prep.endpoints.http import RefusedError, Server, UnavailableError
from mtp_train.bench.facts import Answer, CellRun, Question
from mtp_train.serving.job import DraftCounts, ServingError
from mtp_train.serving.server import Counters, read_counters

_ASK_S = 30.0  # for everything but an answer
_SETTLE_S = 5.0  # a server writes its counters shortly after it has answered
_PAUSE_S = 0.05
_PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Load:
    """What is sent to every server, the same for all."""

    questions: tuple[Question, ...]
    max_tokens: int
    warm_up_tokens: int
    timeout_s: float
    api_key: str = ""
    model: str = ""  # its name there; empty = the only one

    def order(self, concurrency: int) -> list[int]:
        """Questions by index: each once, and again where there are fewer than two per slot."""
        count = max(len(self.questions), 2 * concurrency)
        return [index % len(self.questions) for index in range(count)]


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself. ``k=None`` where its metrics do not say."""

    model: str
    version: str
    k: int | None


def find_out(url: str, load: Load) -> ServerFacts:
    """Ask ``url`` for its model, version and K. Raises :class:`ServingError`."""
    return asyncio.run(_with_server(url, load, 1, lambda server: _find_out(server, load)))


def measure(
    url: str,
    load: Load,
    *,
    model: str,
    contestant: str,
    concurrency: int,
    round_: int,
    on_answer: Callable[[], None] = lambda: None,
) -> CellRun:
    """Warm up, then measure one cell. A request that fails is counted, not raised.

    ``on_answer`` is called after each measured request.
    """

    async def work(server: Server) -> CellRun:
        if load.warm_up_tokens:
            first = load.order(concurrency)[:concurrency]
            warm = [_answer(server, load, index, model, load.warm_up_tokens) for index in first]
            await asyncio.gather(*warm)
        before = await _counters(server)
        started = time.perf_counter()
        answers, ended = await _send_all(server, load, model, concurrency, on_answer)
        num_answered = sum(not answer.error for answer in answers)
        counts, reason = await _difference(server, before, num_answered)
        return CellRun(
            contestant=contestant,
            concurrency=concurrency,
            round=round_,
            wall_s=ended - started,
            answers=tuple(answers),
            counts=counts,
            no_counts=reason,
            error="" if num_answered else f"no request was answered: {answers[0].error}",
        )

    return asyncio.run(_with_server(url, load, concurrency, work))


async def _with_server(url: str, load: Load, concurrency: int, work: Callable[..., Any]) -> Any:
    server = Server(
        url, api_key=load.api_key, timeout_s=load.timeout_s, max_connections=concurrency + 2
    )
    try:
        return await work(server)
    finally:
        await server.close()


async def _find_out(server: Server, load: Load) -> ServerFacts:
    where = f"url={server.url}"
    try:
        listing = await server.get("/v1/models", timeout_s=_ASK_S)
        names = [str(item["id"]) for item in listing["data"]]
    except (RefusedError, UnavailableError) as error:
        raise ServingError("reach", f"{where}: {error}") from error
    except (KeyError, TypeError) as error:
        raise ServingError("reach", f"{where}: /v1/models lists no models") from error
    if load.model and load.model not in names:
        raise ServingError(
            "reach", f"bench.model={load.model}: {where} serves {', '.join(names) or 'nothing'}"
        )
    if not load.model and len(names) != 1:
        raise ServingError(
            "reach",
            f"{where} serves {', '.join(names) or 'nothing'}; say which one, as in "
            f"model={names[0] if names else 'NAME'}",
        )
    counters = await _counters(server)
    k = len(counters.counts.accepted) if isinstance(counters, Counters) else None
    return ServerFacts(load.model or names[0], await _version(server), k)


async def _version(server: Server) -> str:
    """Empty where it does not say."""
    try:
        return str((await server.get("/version", timeout_s=_ASK_S)).get("version", ""))
    except (RefusedError, UnavailableError):
        return ""


async def _send_all(
    server: Server, load: Load, model: str, concurrency: int, on_answer: Callable[[], None]
) -> tuple[list[Answer], float]:
    """All answers, in the order of the questions, and when the last one had arrived."""
    waiting = list(reversed(list(enumerate(load.order(concurrency)))))
    found: dict[int, Answer] = {}

    async def slot() -> None:
        while waiting:
            place, index = waiting.pop()
            found[place] = await _answer(server, load, index, model, load.max_tokens)
            on_answer()

    await asyncio.gather(*(slot() for _ in range(concurrency)))
    ended = time.perf_counter()
    return [found[place] for place in sorted(found)], ended


async def _answer(server: Server, load: Load, index: int, model: str, max_tokens: int) -> Answer:
    """One greedy answer, streamed."""
    body = {
        "model": model,
        "messages": [
            {"role": role, "content": content} for role, content in load.questions[index].messages
        ],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    texts: list[str] = []
    arrivals: list[float] = []
    finish, num_tokens = "", None
    sent = time.perf_counter()
    try:
        async for event in server.stream(_PATH, body, timeout_s=load.timeout_s):
            text, finish = _read_chunk(event, finish)
            if text:
                texts.append(text)
                arrivals.append(time.perf_counter() - sent)
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    except (RefusedError, UnavailableError) as error:
        return Answer(index, "", (), 0, error=str(error))
    if not finish:
        return Answer(index, "", (), 0, error=f"{_PATH}: the stream ended before the answer did")
    if not arrivals:
        return Answer(index, "", (), 0, error=f"{_PATH}: an answer without text")
    count = len(arrivals) if num_tokens is None else int(num_tokens)
    return Answer(index, "".join(texts), tuple(arrivals), count, finish)


def _read_chunk(event: dict[str, Any], finish: str) -> tuple[str, str]:
    """Text of a chunk, reasoning included, and the finish reason known so far."""
    choices = event.get("choices") or []
    if not choices:
        return "", finish
    delta = choices[0].get("delta") or {}
    text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (
        delta.get("content") or ""
    )
    return text, str(choices[0].get("finish_reason") or finish)


async def _counters(server: Server) -> Counters | str:
    """The server's totals, or why there are none."""
    try:
        text = await server.get_text("/metrics", timeout_s=_ASK_S)
    except (RefusedError, UnavailableError) as error:
        return str(error)
    if "vllm:" not in text:
        return "/metrics has no counters of vLLM's"
    return read_counters(text)


async def _difference(
    server: Server, before: Counters | str, num_answered: int
) -> tuple[DraftCounts | None, str]:
    """What was drafted since ``before``, once the answers are in it; or why that is not known."""
    if isinstance(before, str):
        return None, before
    deadline = time.monotonic() + _SETTLE_S
    while True:
        after = await _counters(server)
        if isinstance(after, str):
            return None, after
        done = after.requests - before.requests
        if done > num_answered:
            return None, f"{done} requests were counted for {num_answered}: somebody else is served"
        if done == num_answered:
            if not after.counts.accepted:
                return None, "it does not speculate"
            known = (
                before.counts
                if before.counts.accepted
                else DraftCounts.none(len(after.counts.accepted))
            )
            return after.counts - known, ""
        if time.monotonic() > deadline:
            return None, f"{done} requests were counted for {num_answered}"
        await asyncio.sleep(_PAUSE_S)
