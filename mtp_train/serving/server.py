"""A serving engine that already runs: asked over HTTP, counted by what ``/metrics`` says.

Prompts go one at a time, as token ids, to ``/v1/completions`` of a vLLM server. Its counters before
and after a prompt are that prompt's, as long as nobody else uses the server: when more requests
finished or more tokens came out than were asked for here, the figures are refused.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def describe_server(url: str, *, timeout_s: float = 30.0) -> ServerFacts:
    """Ask ``url`` (with or without ``/v1``) what it is. Raises :class:`ServingError`."""
    base = base_url(url)
    models = _get_json(f"{base}/v1/models", timeout_s)
    try:
        model = models["data"][0]
        name = str(model["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ServingError("reach", f"engine.url={url}: /v1/models names no model") from error
    k = read_counters(_get_text(f"{base}/metrics", timeout_s)).counts.accepted
    version = str(_get_json(f"{base}/version", timeout_s).get("version", "unknown"))
    return ServerFacts(version, name, len(k), int(model.get("max_model_len") or 0))


def serve_at_url(job: ServingJob, *, url: str, timeout_s: float = 600.0) -> Served:
    """Have the server at ``url`` decode the job's prompts, one at a time.

    What it serves is the server's business: ``job`` says what it is held to be. Raises
    :class:`ServingError` when it speculates with another K, answers without token ids, is too
    short for a prompt, or is used by somebody else meanwhile.
    """
    base = base_url(url)
    facts = describe_server(url)
    if facts.k != job.k:
        raise ServingError(
            "reach", f"engine.url={url}: speculates with K={facts.k}, expected K={job.k}"
        )
    if 0 < facts.max_model_len < job.max_model_len:
        raise ServingError(
            "reach",
            f"engine.url={url}: max_model_len={facts.max_model_len}, at least {job.max_model_len} "
            "are needed so that no draft is clipped",
        )
    first = before = read_counters(_get_text(f"{base}/metrics", timeout_s))
    prompts = []
    started = time.monotonic()
    for prompt in job.prompts:
        answer = _post_json(f"{base}/v1/completions", _request(job, facts.model, prompt), timeout_s)
        output_ids, finish_reason = _read_answer(answer, url)
        after = _settled(base, before, len(output_ids), timeout_s)
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


def base_url(url: str) -> str:
    """``http://host:port`` of an address that may end in ``/v1``."""
    if not re.match(r"https?://[^/]+", url):
        raise ServingError(
            "reach", f"engine.url={url}: expected an address such as http://localhost:8000"
        )
    return url.rstrip("/").removesuffix("/v1")


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


def _read_answer(answer: Mapping[str, Any], url: str) -> tuple[tuple[int, ...], str]:
    choice = answer["choices"][0]
    ids = choice.get("token_ids")
    if ids is None:
        raise ServingError(
            "decode",
            f"engine.url={url}: answers carry no token_ids; a vLLM that knows return_token_ids "
            "is needed (0.11 or newer), or engine.python",
        )
    return tuple(int(token) for token in ids), str(choice.get("finish_reason"))


def _steps(answer: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Accepted per step where the server was told to say so (``--per-request-spec-decode-metrics
    detailed``).
    """
    metrics = answer.get("metrics") or {}
    steps = (metrics.get("speculative_decoding") or {}).get("per_step_accepted")
    return None if steps is None else tuple(int(count) for count in steps)


def _settled(base: str, before: Counters, num_tokens: int, timeout_s: float) -> Counters:
    """Counters once they have this answer in them; refuses when they have more than that."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        after = read_counters(_get_text(f"{base}/metrics", timeout_s))
        requests = after.requests - before.requests
        tokens = after.tokens - before.tokens
        if requests > 1 or tokens > num_tokens:
            raise ServingError(
                "decode",
                f"{base} is used by somebody else: {requests} requests and {tokens} tokens were "
                f"counted where 1 and {num_tokens} were asked for; measure on a server of your own",
            )
        if requests == 1 and tokens == num_tokens:
            return after
        if time.monotonic() > deadline:
            raise ServingError(
                "decode",
                f"{base}/metrics counted {requests} requests and {tokens} tokens where 1 and "
                f"{num_tokens} were asked for; is it started with --disable-log-stats?",
            )
        time.sleep(_PAUSE_S)


def _get_text(url: str, timeout_s: float) -> str:
    return _ask(urllib.request.Request(url), timeout_s)


def _get_json(url: str, timeout_s: float) -> dict[str, Any]:
    return _parse(_get_text(url, timeout_s), url)


def _post_json(url: str, content: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    data = json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return _parse(_ask(request, timeout_s), url)


def _ask(request: urllib.request.Request, timeout_s: float) -> str:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:500]
        raise ServingError("decode", f"{request.full_url}: HTTP {error.code}: {said}") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise ServingError("reach", f"{request.full_url}: {error}") from error


def _parse(text: str, url: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ServingError("reach", f"{url}: did not answer with JSON") from error
    if not isinstance(value, dict):
        raise ServingError("reach", f"{url}: expected a JSON object")
    return value
