"""From the configuration's ``engine`` section to something that serves a job."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from mtp_train.answering import read_api_key
from mtp_train.config import Config
from mtp_train.serving.job import Served, ServingJob
from mtp_train.serving.process import find_python, serve_in_process
from mtp_train.serving.server import describe_server, serve_at_url
from mtp_train.serving.target_scope import vllm_layout_for


def open_engine(config: Config) -> Callable[[ServingJob], Served]:
    """What ``config.engine`` names. A given interpreter or address is looked at here, before
    anything is decoded. Raises ``ServingError`` when it is not there, ``ValueError`` without an
    engine.
    """
    engine = config.engine
    if engine.kind == "none":
        raise ValueError("engine.kind=none: no serving engine; say which, as in engine=vllm")
    if engine.url:
        key = read_api_key(engine.api_key_env, "engine.api_key_env")
        describe_server(engine.url, api_key=key)
        return partial(serve_at_url, url=engine.url, api_key=key, timeout_s=engine.timeout_s)
    python = find_python(engine.python)
    arguments = {name: parse_argument(text) for name, text in engine.args}

    def serve(job: ServingJob) -> Served:
        return serve_in_process(
            job,
            python=python,
            layout=vllm_layout_for(config.export.format, job.target),
            num_threads=config.runtime.num_threads,
            timeout_s=engine.timeout_s,
            llm_args=arguments,
        )

    return serve


def served_lengths(config: Config) -> tuple[int, ...]:
    """The K that are served: those of ``engine.k``, or the one of a server that runs."""
    engine = config.engine
    if not engine.url:
        return tuple(dict.fromkeys(engine.k))
    key = read_api_key(engine.api_key_env, "engine.api_key_env")
    return (describe_server(engine.url, api_key=key).k,)


def parse_argument(text: str) -> Any:
    """An argument as JSON says, or the text itself: ``2``, ``true``, ``fp8``."""
    try:
        return json.loads(text)
    except ValueError:
        return text
