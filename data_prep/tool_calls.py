"""How a chat template writes tool calls, found out by rendering probes.

Templates disagree on what they accept (``content`` empty or null, arguments as an object or as
text) and on what they write. The same probes give the pattern by which calls are read back from a
generated answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data_prep.conversation import Message, ToolCall

RenderRaw = Callable[[list[dict[str, Any]], list[Any] | None, bool], str]

_QUESTION = {"role": "user", "content": "Q"}
_NAMES = ("probe_alpha", "probe_beta")
_ARGUMENTS = ({"probe_key": "probe_one"}, {"probe_key": "probe_two"})


@dataclass(frozen=True)
class CallSyntax:
    """``before`` name ``between`` arguments, and the form of message the template takes."""

    before: str
    between: str
    null_content: bool  # an answer that only calls has content null, not ""
    text_arguments: bool  # arguments are passed as JSON text, not as an object

    def message_fields(self, message: Message) -> dict[str, Any]:
        """``content`` and ``tool_calls`` of ``message`` as the template wants them."""
        content = None if self.null_content and not message.content else message.content
        calls = [
            {
                "id": call.call_id or f"call_{index}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments
                    if self.text_arguments
                    else json.loads(call.arguments),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
        return {"content": content, "tool_calls": calls}

    def parse(self, answer: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Text before the first call, and the calls. A malformed call is text, not a call."""
        pattern = re.compile(
            _loose(self.before) + r"(?P<name>[\w.\-]+)" + _loose(self.between), re.UNICODE
        )
        decoder = json.JSONDecoder()
        calls: list[ToolCall] = []
        head, position = answer, 0
        while match := pattern.search(answer, position):
            position = match.end()
            try:
                arguments, position = decoder.raw_decode(answer, position)
            except ValueError:
                continue
            if isinstance(arguments, dict):
                if not calls:
                    head = answer[: match.start()]
                text = json.dumps(arguments, ensure_ascii=False)
                calls.append(ToolCall(match["name"], text))
        return head, tuple(calls)


def common_prefix(first: str, second: str) -> str:
    """The longest text both start with."""
    pairs = zip(first, second, strict=False)
    length = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return first[:length]


def probe_call_syntax(render: RenderRaw, error: type[Exception]) -> CallSyntax | None:
    """The syntax of a template, or ``None`` when no form of call comes through.

    ``render(messages, tools, add_generation_prompt)`` raises ``error`` where the template fails.
    """
    for null_content in (False, True):
        for text_arguments in (False, True):
            one = _render_calls(render, error, 1, null_content, text_arguments)
            if one is None:
                continue
            two = _render_calls(render, error, 2, null_content, text_arguments)
            before, between = _split(one, 0)
            if two is not None:
                # The first call also carries what opens the whole list of calls.
                before = _common_suffix(before, _split(two, 1)[0])
            return CallSyntax(before.lstrip(), between, null_content, text_arguments)
    return None


def _render_calls(
    render: RenderRaw,
    error: type[Exception],
    num_calls: int,
    null_content: bool,
    text_arguments: bool,
) -> str | None:
    """What the template writes for the answer; ``None`` when name or arguments are lost."""
    calls = [
        {
            "id": f"call{index:05d}",
            "type": "function",
            "function": {
                "name": _NAMES[index],
                "arguments": json.dumps(_ARGUMENTS[index]) if text_arguments else _ARGUMENTS[index],
            },
        }
        for index in range(num_calls)
    ]
    answer = {"role": "assistant", "content": None if null_content else "", "tool_calls": calls}
    try:
        text = render([_QUESTION, answer], None, False)
        start = len(common_prefix(text, render([_QUESTION], None, True)))
    except error:
        return None
    text = text[start:]
    # Arguments must come out as one JSON object: neither a Python dictionary nor quoted JSON.
    for index in range(num_calls):
        if _NAMES[index] not in text or _find_arguments(text, index) is None:
            return None
    # A template that prints a null prints the word.
    return None if "None" in text.split(_NAMES[0])[0] else text


def _find_arguments(text: str, index: int) -> int | None:
    """Where the JSON object of call ``index`` starts."""
    position = text.index(_NAMES[index]) + len(_NAMES[index])
    while (position := text.find("{", position)) >= 0:
        try:
            value, _ = json.JSONDecoder().raw_decode(text, position)
        except ValueError:
            value = None
        if value == _ARGUMENTS[index]:
            return position
        position += 1
    return None


def _split(text: str, index: int) -> tuple[str, str]:
    name = text.index(_NAMES[index])
    start = _find_arguments(text, index)
    assert start is not None, "checked when rendered"
    return text[:name], text[name + len(_NAMES[index]) : start]


def _common_suffix(first: str, second: str) -> str:
    return common_prefix(first[::-1], second[::-1])[::-1]


def _loose(text: str) -> str:
    """A pattern for ``text`` that does not care how much white space stands between words."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))
