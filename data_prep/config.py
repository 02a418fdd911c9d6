"""Configuration of the data stage (frozen; validated from ``conf/`` by the command line)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from data_prep.addresses import check_url, check_variable, server_root

Format = Literal["auto", "sharegpt", "openai", "prompts", "tokenized"]


# How answers are fetched; they do not depend on it (but for `model`, recorded as reported).
TRANSPORT = frozenset(
    {"url", "model", "concurrency", "request_timeout_s", "retries", "api_key_env"}
)


@dataclass(frozen=True)
class RegenerateConfig:
    """Let the target write the answers: through the runtime in this process or, with ``url``,
    through OpenAI-compatible servers that run it.
    """

    enabled: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 512
    # Answers that hit the length limit are marked; this also drops them.
    drop_cut_off: bool = False
    tool_results: Literal["splice", "stop"] = "splice"
    capture_features: bool = False  # hidden states of decoding become features in the same pass
    url: tuple[str, ...] = ()  # OpenAI-compatible endpoints; none = the runtime answers
    model: str = ""  # its name at the endpoints; empty = the only one they serve
    concurrency: int = 32  # requests in flight, per endpoint
    request_timeout_s: float = 600.0
    retries: int = 6  # in a row, per question and per endpoint
    api_key_env: str = ""  # name of the environment variable that holds the key

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(
                f"data.regenerate.temperature={self.temperature}: must be >= 0 (0 is greedy)"
            )
        if self.top_k < 0:
            raise ValueError(f"data.regenerate.top_k={self.top_k}: must be >= 0 (0 switches off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"data.regenerate.top_p={self.top_p}: must be in (0, 1]")
        if self.max_tokens < 1:
            raise ValueError(f"data.regenerate.max_tokens={self.max_tokens}: must be at least 1")
        if self.capture_features and not self.enabled:
            raise ValueError(
                "data.regenerate.capture_features=true needs data.regenerate.enabled=true: "
                "only decoding computes the hidden states"
            )
        self._check_endpoints()

    def _check_endpoints(self) -> None:
        for url in self.url:
            check_url(url, "data.regenerate.url", key_field="data.regenerate.api_key_env")
        check_variable(self.api_key_env, "data.regenerate.api_key_env")
        if len({server_root(url) for url in self.url}) < len(self.url):
            raise ValueError(f"data.regenerate.url={list(self.url)}: the same endpoint twice")
        if self.url and not self.enabled:
            raise ValueError(
                "data.regenerate.url needs data.regenerate.enabled=true: only then are answers "
                "written anew"
            )
        if self.url and self.capture_features:
            raise ValueError(
                "data.regenerate.capture_features=true with data.regenerate.url: an endpoint gives "
                "no hidden states; leave one out (`mtp precompute` computes them afterwards)"
            )
        if self.concurrency < 1:
            raise ValueError(f"data.regenerate.concurrency={self.concurrency}: must be at least 1")
        if self.retries < 0:
            raise ValueError(f"data.regenerate.retries={self.retries}: must not be negative")
        if self.request_timeout_s <= 0:
            raise ValueError(
                f"data.regenerate.request_timeout_s={self.request_timeout_s}: must be greater "
                "than 0"
            )


@dataclass(frozen=True)
class DataConfig:
    """Prompts to token sets. Lengths are in tokens of the target's tokenizer.

    ``sources`` are files, folders, `datasets` paths or built-in names (``sharegpt``,
    ``writingbench``). ``path``: a finished token set to use instead of making one (shared by runs).
    """

    sources: tuple[str, ...] = ("sharegpt",)
    path: str = ""
    format: Format = "auto"
    max_conversations: int = 0  # 0 = all
    max_tokens_total: int = 0  # of the training split, prompts included; 0 = all
    min_tokens: int = 8
    max_tokens: int = 2048  # longer rows are rejected under "too_long"
    max_prompt_tokens: int = 0  # 0 = no separate limit
    max_answer_tokens: int = 0
    # Recorded answers beyond max_answer_tokens are cut (and marked) instead of rejected.
    cut_long_answers: bool = False
    max_turns: int = 0  # 0 = all; 1 = first exchange only
    validation_share: float = 0.02
    chat_template: str = ""  # path of a Jinja file; empty = the tokenizer's own
    # Values are JSON where they parse as JSON ("false", "3"), text otherwise.
    chat_template_kwargs: tuple[tuple[str, str], ...] = ()
    regenerate: RegenerateConfig = RegenerateConfig()

    def __post_init__(self) -> None:
        for name in (
            "max_conversations",
            "max_tokens_total",
            "min_tokens",
            "max_prompt_tokens",
            "max_answer_tokens",
            "max_turns",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"data.{name}={getattr(self, name)}: must not be negative")
        if self.max_tokens < max(1, self.min_tokens):
            raise ValueError(
                f"data.max_tokens={self.max_tokens}: must be at least 1 and not below "
                f"data.min_tokens={self.min_tokens}"
            )
        if not 0 <= self.validation_share < 1:
            raise ValueError(
                f"data.validation_share={self.validation_share}: must be in [0, 1) "
                "(the share of conversations held out)"
            )
        if self.cut_long_answers and not self.max_answer_tokens:
            raise ValueError(
                "data.cut_long_answers=true needs data.max_answer_tokens > 0: the length to cut at"
            )
