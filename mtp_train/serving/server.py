"""A serving engine that already runs: asked over HTTP, counted by what ``/metrics`` says.

Prompts go one at a time, as token ids, to ``/v1/completions`` of a vLLM server. Its counters before
and after a prompt are that prompt's, as long as nobody else uses the server: when more requests
finished or more tokens came out than were asked for here, the figures are refused.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from data_prep.endpoints.http import RefusedError, Server, UnavailableError
from mtp_train.serving.job import (
    DraftCounts,
    Served,
    ServedPrompt,
    ServingError,
    ServingJob,
)

_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_REQUESTS = "vllm:request_success_total"
_TOKENS = "vllm:generation_tokens_total"
_SETTLE_S = 10.0  # the server writes its counters shortly after it has answered
_PAUSE_S = 0.05
_DESCRIBE_S = 30.0  # for everything but an answer

T = TypeVar("T")

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class ServerFacts:
    """What a running server says about itself. ``k`` is 0 where it does not speculate."""

    version: str
    model: str
    k: int
    max_model_len: int  # 0 where it does not say


@dataclass(frozen=True)
class Counters:
    """The server's totals since it started."""

    counts: DraftCounts
    requests: int
    tokens: int


def describe_server(url: str, *, api_key: str = "", timeout_s: float = _DESCRIBE_S) -> ServerFacts:
    """Ask ``url`` (with or without ``/v1``) what it is. Raises :class:`ServingError`."""
    return _run(url, api_key, timeout_s, lambda server: _describe(server, timeout_s))


def serve_at_url(
    job: ServingJob, *, url: str, api_key: str = "", timeout_s: float = 600.0
) -> Served:
    """Have the server at ``url`` decode the job's prompts, one at a time.

    What it serves is the server's business: ``job`` says what it is held to be. Raises
    :class:`ServingError` when it speculates with another K, answers without token ids, is too
    short for a prompt, or is used by somebody else meanwhile.
    """
    return _run(url, api_key, timeout_s, lambda server: _serve(job, server))


def _run(
    url: str, api_key: str, timeout_s: float, work: Callable[[Server], Coroutine[Any, Any, T]]
) -> T:
    """What ``work`` finds out over connections of its own."""

    async def run() -> T:
        server = Server(url, api_key=api_key, timeout_s=timeout_s)
        try:
            return await work(server)
        except RefusedError as error:
            raise ServingError("decode", f"engine.url={url}: {error}") from error
        except UnavailableError as error:
            stage = "decode" if error.may_be_the_question else "reach"
            raise ServingError(stage, f"engine.url={url}: {error}") from error
        finally:
            await server.close()

    return asyncio.run(run())


async def _describe(server: Server, timeout_s: float = _DESCRIBE_S) -> ServerFacts:
    models = await server.get("/v1/models", timeout_s=timeout_s)
    try:
        model = models["data"][0]
        name = str(model["id"])
    except (KeyError, IndexError, TypeError) as error:
        where = f"engine.url={server.url}"
        raise ServingError("reach", f"{where}: /v1/models names no model") from error
    k = (await _counters(server)).counts.accepted
    version = await server.get("/version", timeout_s=timeout_s)
    return ServerFacts(
        str(version.get("version", "unknown")), name, len(k), int(model.get("max_model_len") or 0)
    )


async def _serve(job: ServingJob, server: Server) -> Served:
    facts = await _describe(server)
    where = f"engine.url={server.url}"
    if facts.k != job.k:
        raise ServingError("reach", f"{where}: speculates with K={facts.k}, expected K={job.k}")
    if 0 < facts.max_model_len < job.max_model_len:
        raise ServingError(
            "reach",
            f"{where}: max_model_len={facts.max_model_len}, at least {job.max_model_len} are "
            "needed so that no draft comes near the end",
        )
    first = before = await _counters(server)
    prompts = []
    started = time.monotonic()
    for prompt in job.prompts:
        answer = await server.post("/v1/completions", _request(job, facts.model, prompt))
        output_ids, finish_reason = _read_answer(answer, where)
        after = await _settled(server, before, len(output_ids))
        steps = _steps(answer)
        prompts.append(ServedPrompt(output_ids, finish_reason, after.counts - before.counts, steps))
        before = after
    return Served(
        engine="vllm",
        version=facts.version,
        k=job.k,
        dtype=job.dtype,
        prompts=tuple(prompts),
        counters=before.counts - first.counts,
        warm_up=first.counts,
        attribution="one_at_a_time",
        decode_s=time.monotonic() - started,
    )


async def _counters(server: Server) -> Counters:
    return read_counters(await server.get_text("/metrics", timeout_s=_DESCRIBE_S))


def read_counters(text: str) -> Counters:
    """Totals out of a page in Prometheus's text format, summed over the server's engines."""
    drafts = requests = tokens = 0
    accepted: dict[int, int] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name = match["name"]
        if name == _ACCEPTED:
            position = int(dict(_LABEL.findall(match["labels"]))["position"])
            accepted[position] = accepted.get(position, 0) + int(float(match["value"]))
        elif name == _DRAFTS:
            drafts += int(float(match["value"]))
        elif name == _REQUESTS:
            requests += int(float(match["value"]))
        elif name == _TOKENS:
            tokens += int(float(match["value"]))
    counts = DraftCounts(drafts, tuple(accepted[position] for position in sorted(accepted)))
    return Counters(counts, requests, tokens)


def _request(job: ServingJob, model: str, prompt: tuple[int, ...]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "stop_token_ids": list(job.stop_token_ids),
        "ignore_eos": True,  # the list above says where to stop
        "return_token_ids": True,
    }


def _read_answer(answer: Mapping[str, Any], where: str) -> tuple[tuple[int, ...], str]:
    try:
        choice = answer["choices"][0]
        ids, finish = choice.get("token_ids"), choice["finish_reason"]
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ServingError("decode", f"{where}: an answer without choices") from error
    if ids is None:
        raise ServingError(
            "decode",
            f"{where}: answers carry no token_ids; a vLLM that knows return_token_ids is needed "
            "(0.11 or newer), or engine.python",
        )
    return tuple(int(token) for token in ids), str(finish)


def _steps(answer: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Accepted per step where the server was told to say so (``--per-request-spec-decode-metrics
    detailed``).
    """
    metrics = answer.get("metrics") or {}
    steps = (metrics.get("speculative_decoding") or {}).get("per_step_accepted")
    return None if steps is None else tuple(int(count) for count in steps)


async def _settled(server: Server, before: Counters, num_tokens: int) -> Counters:
    """Counters once they have this answer in them; refuses when they have more than that."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        after = await _counters(server)
        requests = after.requests - before.requests
        tokens = after.tokens - before.tokens
        if requests > 1 or tokens > num_tokens:
            raise ServingError(
                "decode",
                f"{server.url} is used by somebody else: {requests} requests and {tokens} tokens "
                f"were counted where 1 and {num_tokens} were asked for; measure on a server of "
                "your own",
            )
        if requests == 1 and tokens == num_tokens:
            return after
        if time.monotonic() > deadline:
            raise ServingError(
                "decode",
                f"{server.url}: /metrics counted {requests} requests and {tokens} tokens where 1 "
                f"and {num_tokens} were asked for; is it started with --disable-log-stats?",
            )
        await asyncio.sleep(_PAUSE_S)
