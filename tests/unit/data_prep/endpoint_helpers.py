"""A regeneration run against test servers, with little patience."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.answering import Answering
from data_prep.chat import ChatFormat
from data_prep.config import DataConfig, RegenerateConfig
from data_prep.endpoints.endpoint import Patience
from data_prep.endpoints.pool import EndpointPool
from data_prep.endpoints.routes import Dialect
from data_prep.pipeline import DataReport, prepare
from data_prep.token_set import TokenRow, load_token_set
from tests.serving.openai_server import Complete, OpenAIServer, serve

TALKS = {f"talk{i}_0": [f"question {i}", f"recorded {i}", "and then", "more"] for i in range(12)}
PATIENCE = Patience(retries=3, timeout_s=5.0, backoff_s=0.01, max_backoff_s=0.05)


def config_for(source: Path, *servers: OpenAIServer, **options: Any) -> DataConfig:
    return DataConfig(
        sources=(str(source),),
        validation_share=0.2,
        regenerate=RegenerateConfig(
            enabled=True,
            url=tuple(server.url for server in servers),
            **{"concurrency": 4, **options},
        ),
    )


def regenerate(
    config: DataConfig,
    out: Path,
    tokenizer: Any,
    *,
    patience: Patience = PATIENCE,
    api_key: str = "",
    pools: list[EndpointPool] | None = None,
) -> tuple[DataReport, list[TokenRow]]:
    """The report and all rows; ``pools`` collects the pool that was used."""
    options = config.regenerate
    chat = ChatFormat(tokenizer, kwargs=dict(config.chat_template_kwargs))

    @contextmanager
    def open_answering() -> Iterator[Answering]:
        with EndpointPool(
            options.url,
            Dialect(options.model, chat, chat.end_of_turn_ids),
            concurrency=options.concurrency,
            patience=replace(patience, retries=min(patience.retries, options.retries)),
            api_key=api_key,
        ) as pool:
            if pools is not None:
                pools.append(pool)
            yield Answering(pool)

    report = prepare(
        config,
        out_dir=out,
        tokenizer=tokenizer,
        seed=1,
        open_answering=open_answering,
        target_fingerprint="target",
    )
    return report, rows_of(out)


def clean_rows(source: Path, folder: Path, tokenizer: Any, answers: Complete) -> list[TokenRow]:
    """The rows from a server that does everything right."""
    with serve(answers, tokenizer) as server:
        return regenerate(config_for(source, server), folder, tokenizer)[1]


def rows_of(out: Path) -> list[TokenRow]:
    token_set = load_token_set(out)
    return [*token_set.rows("train"), *token_set.rows("validation")]


def journal_lines(out: Path) -> list[list[Any]]:
    """The journal's records, without its header."""
    lines = (out / "regenerated.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def first_words(body: Mapping[str, Any], tokenizer: Any) -> str:
    """The prompt of a request for completion, as text."""
    text = tokenizer.decode(body["prompt"])
    assert isinstance(text, str)
    return text


def words(prompt: str, body: Mapping[str, Any]) -> str:
    """An answer that depends on the prompt alone."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return f"the answer {digest[: 4 + int(digest[0], 16)]}"
