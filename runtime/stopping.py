"""Stop strings: when one is complete, and what of the text is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """What stop strings and ``Generation.text`` need of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def hits_stop_string(
    tokenizer: Detokenizer | None, output_ids: list[int], stops: Sequence[str]
) -> bool:
    """Whether the end of the output contains one of ``stops`` (call it after every token)."""
    if not stops:
        return False
    assert tokenizer is not None, "stop strings need a tokenizer"
    # A stop string of n bytes is completed by at most n tokens (each adds a byte or more of text);
    # 8 more give the decoder context for characters split over tokens.
    window = max(len(stop.encode()) for stop in stops) + 8
    text = tokenizer.decode(output_ids[-window:], skip_special_tokens=False)
    return any(stop in text for stop in stops)


def visible_text(
    tokenizer: Detokenizer | None, output_ids: list[int], stops: Sequence[str]
) -> str | None:
    """The output without special tokens, up to a stop string; ``None`` without a tokenizer."""
    if tokenizer is None:
        return None
    text = tokenizer.decode(output_ids, skip_special_tokens=True)
    cuts = [text.find(stop) for stop in stops if stop in text]
    return text[: min(cuts)] if cuts else text
