"""Configuration of the data stage (frozen; validated from ``conf/`` by the command line)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RegenerateConfig:
    """Let the target write the answers, through the runtime."""

    enabled: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 512
    drop_cut_off: bool = (
        False  # drop answers that hit the length limit (they are marked either way)
    )
    tool_results: Literal["splice", "stop"] = "splice"
    capture_features: bool = False  # hidden states of decoding become features in the same pass


@dataclass(frozen=True)
class DataConfig:
    """Prompts to token sets. ``path`` (optional): a finished token set to share between runs.

    ``sources`` are files, folders, `datasets` paths or built-in names (sharegpt, writingbench,
    mtbench,
    humaneval, gsm8k).
    """

    sources: tuple[str, ...] = ("sharegpt",)
    path: str = ""
    format: Literal["auto", "sharegpt", "openai", "prompts", "tokenized"] = "auto"
    max_conversations: int = 0  # 0 = all
    max_tokens_total: int = 0  # 0 = all
    min_tokens: int = 8
    max_tokens: int = 2048  # longer rows are rejected under "too_long"
    max_prompt_tokens: int = 0  # 0 = no separate limit
    max_answer_tokens: int = 0
    max_turns: int = 0  # 0 = all; 1 = first exchange only
    validation_share: float = 0.02
    chat_template: str = ""  # path of a Jinja file; empty = the tokenizer's own
    chat_template_kwargs: tuple[tuple[str, str], ...] = ()
    regenerate: RegenerateConfig = RegenerateConfig()
