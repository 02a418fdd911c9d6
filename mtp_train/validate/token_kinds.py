"""What kind of text each token of an answer belongs to, read off the decoded text.

A span begins with its opening mark and ends with its closing one, both included; without a closing
mark it runs to the end. Spans do not nest: code inside of a thought is thinking.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["chat", "code", "thinking", "tool call"]
KINDS: tuple[Kind, ...] = ("chat", "code", "thinking", "tool call")


@dataclass(frozen=True)
class Marks:
    """How one family marks a span. ``close=""``: nothing ends it but the answer."""

    kind: Kind
    open: str
    close: str


MARKS = (
    Marks("thinking", "<think>", "</think>"),  # Qwen, DeepSeek and most others
    Marks("thinking", "[THINK]", "[/THINK]"),  # Mistral
    Marks("thinking", "<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
    Marks("tool call", "<tool_call>", "</tool_call>"),  # Qwen, Hermes
    Marks("tool call", "[TOOL_CALLS]", ""),  # Mistral
    Marks("tool call", "<|python_tag|>", ""),  # Llama 3
    Marks("tool call", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # DeepSeek
)
_FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})", re.MULTILINE)
_OPENING = re.compile(
    "|".join([*(re.escape(marks.open) for marks in MARKS), _FENCE.pattern]), re.MULTILINE
)


@dataclass(frozen=True)
class Span:
    """Characters ``start`` to ``end`` (exclusive) of an answer that are not plain chat."""

    kind: Kind
    start: int
    end: int


def find_spans(text: str, *, prompt: str = "") -> list[Span]:
    """Spans in order. ``prompt``: text before the answer; its end may have opened a thought."""
    return list(_spans(text, prompt))


def token_kinds(pieces: Sequence[str], *, prompt: str = "") -> list[Kind]:
    """The kind at the first character of each token; ``pieces`` are the answer's texts by token."""
    spans = iter(find_spans("".join(pieces), prompt=prompt))
    span = next(spans, None)
    kinds: list[Kind] = []
    position = 0
    for piece in pieces:
        while span is not None and span.end <= position:
            span = next(spans, None)
        is_inside = span is not None and span.start <= position
        kinds.append(span.kind if span is not None and is_inside else "chat")
        position += len(piece)
    return kinds


def _spans(text: str, prompt: str) -> Iterator[Span]:
    position = 0
    opened = next((m for m in MARKS if prompt.rstrip().endswith(m.open)), None)
    if opened is not None:
        position = _end(text, opened.close, 0)
        yield Span(opened.kind, 0, position)
    while match := _OPENING.search(text, position):
        start = match.start()
        if fence := match["fence"]:
            kind: Kind = "code"
            position = _end_of_fence(text, fence, match.end())
        else:
            marks = next(m for m in MARKS if m.open == match[0])
            kind, position = marks.kind, _end(text, marks.close, match.end())
        yield Span(kind, start, position)


def _end(text: str, close: str, start: int) -> int:
    found = text.find(close, start) if close else -1
    return len(text) if found < 0 else found + len(close)


def _end_of_fence(text: str, fence: str, start: int) -> int:
    """A line of at least as many of the same character closes a block."""
    closing = re.compile(rf"^[ \t]*{re.escape(fence)}{re.escape(fence[0])}*[ \t]*$", re.MULTILINE)
    match = closing.search(text, start)
    return match.end() if match else len(text)
