"""When a request has ended: at EOS, a stop token or string, or a length; and what text is shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from runtime.request import RequestState


class Detokenizer(Protocol):
    """What stop strings and ``Generation.text`` need of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def append_tokens(
    state: RequestState,
    new_ids: Sequence[int],
    *,
    eos_token_ids: Collection[int],
    tokenizer: Detokenizer | None,
    max_model_len: int,
) -> int:
    """Append new tokens up to the first that ends the request; returns how many were kept."""
    sampling = state.request.sampling
    for count, token in enumerate(new_ids, start=1):
        state.tokens.append(token)
        is_eos = token in eos_token_ids and not sampling.ignore_eos
        is_stop = token in sampling.stop_token_ids or hits_stop_string(
            tokenizer, state.output_ids, sampling.stop
        )
        if is_eos or is_stop:
            state.finish_reason = "stop"
        elif (
            len(state.tokens) - state.num_prompt >= sampling.max_tokens
            or len(state.tokens) >= max_model_len
        ):
            state.finish_reason = "length"
        if state.finish_reason is not None:
            return count
    return len(new_ids)


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
