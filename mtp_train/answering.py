"""Who writes the answers of `mtp data`: the runtime in this process, or endpoints.

The one place that decides between them; `data_prep` sees an :class:`AnswerEngine`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from data_prep.answering import Answering, OpenAnswering, RuntimeAnswers
from mtp_train.config import Config
from mtp_train.distributed import ProcessGroup
from mtp_train.events import EventLog


def answering_opener(
    config: Config, directory: Path, tokenizer: Any, *, group: ProcessGroup, events: EventLog
) -> OpenAnswering:
    """Opens what ``data.regenerate`` names, for the target in ``directory``."""
    if config.data.regenerate.url:
        return lambda: _open_endpoints(config, directory, tokenizer, events)
    return lambda: _open_runtime(config, directory, tokenizer, group)


@contextmanager
def _open_runtime(
    config: Config, directory: Path, tokenizer: Any, group: ProcessGroup
) -> Iterator[Answering]:
    """A plain decoding engine; the hidden states are kept if asked for."""
    from mtp_train.capture import open_capture
    from mtp_train.features.sources import RuntimeSource
    from mtp_train.features.workbench import load_workbench
    from mtp_train.targets import open_target
    from runtime.cpu import set_threads
    from runtime.engine import Engine
    from runtime.models.config import load_config

    with ExitStack() as stack:
        sink = None
        if config.data.regenerate.capture_features:
            max_len = config.data.max_tokens
            bench = load_workbench(config, directory, group=group, max_len=max_len)
            assert isinstance(bench.source, RuntimeSource), "other sources are refused"
            model = bench.source.model
            sink = stack.enter_context(open_capture(config, directory, bench, group=group))
        else:
            set_threads(config.runtime.num_threads)
            model = open_target(config.target, device=group.device, runtime=config.runtime).model
        engine = Engine(
            model,
            config=config.runtime,
            eos_token_ids=load_config(directory).eos_token_ids,
            tokenizer=tokenizer,
        )
        yield Answering(RuntimeAnswers(engine), sink)


@contextmanager
def _open_endpoints(
    config: Config, directory: Path, tokenizer: Any, events: EventLog
) -> Iterator[Answering]:
    """Servers that run the target; what each of them did goes into the run's log."""
    from data_prep.chat import configured_chat_format
    from data_prep.endpoints.endpoint import Patience
    from data_prep.endpoints.pool import EndpointPool
    from data_prep.endpoints.routes import Dialect
    from runtime.models.config import load_config

    options = config.data.regenerate
    chat = configured_chat_format(tokenizer, config.data)
    stop_ids = chat.end_of_turn_ids | frozenset(load_config(directory).eos_token_ids)
    pool = EndpointPool(
        options.url,
        Dialect(options.model, chat, stop_ids),
        concurrency=options.concurrency,
        patience=Patience(options.retries, options.request_timeout_s),
        api_key=read_api_key(options.api_key_env, "data.regenerate.api_key_env"),
    )
    with pool:
        try:
            yield Answering(pool)
        finally:
            for endpoint in pool.endpoints:
                route = endpoint.route
                events.write(
                    "endpoint",
                    endpoint.counts,
                    url=endpoint.url,
                    model=endpoint.model,
                    route=route.summary if route is not None else "",
                    set_aside_because=endpoint.set_aside_because,
                )


def read_api_key(variable: str, field: str) -> str:
    """The key in the environment variable that ``field`` names; empty where none is named."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()  # a file's last line break, for instance
    if not key:
        raise ValueError(f"{field}={variable}: this environment variable is not set, or empty")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(
            f"{field}={variable}: what this environment variable holds cannot be a key: it has "
            "characters that no header can carry"
        )
    return key
