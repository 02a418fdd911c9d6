"""Text token by token: pieces that concatenate to the text of the whole.

A character may be spread over several tokens; its text belongs to the last of them and the others
get nothing. Each token is decoded together with the few before it, never with all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import ne

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]

_HALF_CHARACTER = "\ufffd"  # what decoders write for bytes that are no character (yet)


class PieceDecoder:
    """Give it tokens in order; it gives back the text that each one completes.

    ``decode`` turns token ids into text and tidies nothing up.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: list[int] = []  # shown already; decoders may treat a first token differently
        self._shown = ""  # text of _before
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty inside of a character."""
        self._pending.append(token_id)
        text = self._decode([*self._before, *self._pending])
        return "" if text.endswith(_HALF_CHARACTER) else self._show(text)

    def flush(self) -> str:
        """Text of half a character at the end; empty when there is none."""
        return self._show(self._decode([*self._before, *self._pending])) if self._pending else ""

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        # A token without text (a special one that is left out) must not become all there is before.
        self._before = self._pending if piece else self._before + self._pending
        self._pending = []
        self._shown = self._decode(self._before)
        return piece


def split_text(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """One piece per token; ``"".join(pieces) == decode(token_ids)`` whatever the decoder does."""
    if not token_ids:
        return []
    decoder = PieceDecoder(decode)
    pieces = [decoder.push(token_id) for token_id in token_ids]
    pieces[-1] += decoder.flush()
    text = decode(token_ids)
    if "".join(pieces) != text:
        logger.warning("the tokenizer decodes a token by what comes long before: splitting slowly")
        return _split_by_prefixes(token_ids, decode, text)
    return pieces


def _split_by_prefixes(token_ids: Sequence[int], decode: Decode, text: str) -> list[str]:
    """Token i ends where the text of the first i tokens departs from that of all. Quadratic."""
    ends = [0]
    for count in range(1, len(token_ids)):
        prefix = decode(token_ids[:count])
        differs = [*map(ne, prefix, text), True]
        shared = differs.index(True)
        ends.append(max(ends[-1], shared))
    ends.append(len(text))
    return [text[start:end] for start, end in pairwise(ends)]
