"""Messages as the OpenAI-compatible API writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data_prep.conversation import Message, ToolCall, is_unicode


def to_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The value of ``messages`` in a request."""
    return [_to_openai(message) for message in messages]


def tools_to_openai(tools: Sequence[str]) -> list[Any]:
    """The value of ``tools`` in a request."""
    return [json.loads(tool) for tool in tools]


def answer_from_openai(raw: Mapping[str, Any]) -> Message:
    """The ``message`` of a chat completion. Raises ``ValueError`` for what cannot be read."""
    content = raw.get("content") or ""
    reasoning = raw.get("reasoning_content") or raw.get("reasoning") or ""
    calls = raw.get("tool_calls") or []
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise ValueError("message: content and reasoning must be text")
    try:
        tool_calls = tuple(
            ToolCall(
                call["function"]["name"], call["function"]["arguments"], str(call.get("id") or "")
            )
            for call in calls
        )
        for call in tool_calls:
            if not isinstance(call.name, str) or not isinstance(json.loads(call.arguments), dict):
                raise ValueError("expected a name and a JSON object")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"message: a tool call is malformed ({error})") from error
    message = Message("assistant", content, reasoning=reasoning, tool_calls=tool_calls)
    if not is_unicode(*message.texts):
        raise ValueError("message: text that is not Unicode")
    return message


def _to_openai(message: Message) -> dict[str, Any]:
    raw: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        raw["reasoning_content"] = message.reasoning
    if message.tool_calls:
        raw["tool_calls"] = [
            {
                "id": call.call_id or f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        raw["tool_call_id"] = message.tool_call_id
    if message.name:
        raw["name"] = message.name
    return raw
