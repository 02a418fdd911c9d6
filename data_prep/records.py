"""Turns one raw record (a dictionary) into a conversation or a token row, or says why it cannot.

Formats: ShareGPT (``conversations`` of ``from``/``value``), OpenAI (``messages`` of
``role``/``content`` with ``tools``, ``tool_calls``, ``reasoning_content``), plain prompts, and
pre-tokenised rows (``input_ids``, ``loss_mask``).
"""

from __future__ import annotations

import json
from typing import Any

from data_prep.config import Format
from data_prep.conversation import (
    Conversation,
    Message,
    Record,
    Reject,
    Role,
    TokenizedRecord,
    ToolCall,
    is_unicode,
)
from data_prep.coverage import record_domain

_CONVERSATION_KEYS = ("conversations", "conversation")
_PROMPT_KEYS = ("prompt", "question", "query", "instruction", "turns", "text")
RECORD_KEYS = frozenset(("messages", "input_ids", *_CONVERSATION_KEYS, *_PROMPT_KEYS))

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}


class _UnusableError(Exception):
    """Why a record cannot be used: a reason from the closed list, and details."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def parse_record(row: Any, *, source: str, record_id: str, format: Format) -> Record:
    """One record of any format; ``format`` other than ``auto`` admits only that one."""
    if isinstance(row, dict) and isinstance(row.get("id"), str | int):
        record_id = str(row["id"])
    try:
        found = _detect(row)
        if format not in ("auto", found):
            raise _UnusableError("wrong_format", f"looks like {found}, data.format={format}")
        if found == "tokenized":
            return _tokenized(row, source, record_id)
        messages = _prompts(row) if found == "prompts" else _messages(row)
        tools = _tools(row.get("tools") or row.get("functions"))
        if not is_unicode(*(text for message in messages for text in message.texts), *tools):
            raise _UnusableError("bad_encoding", "text that is not Unicode")
        domain = record_domain(row)
        return Conversation(messages, tools, source=source, record_id=record_id, domain=domain)
    except _UnusableError as error:
        return Reject(error.reason, source, record_id, error.detail)


def _detect(row: Any) -> Format:
    if not isinstance(row, dict):
        raise _UnusableError("unknown_format", f"a {type(row).__name__}, not an object")
    if "input_ids" in row:
        return "tokenized"
    if "messages" in row or _is_message_list(row.get("prompt")):
        return "openai"
    if any(key in row for key in _CONVERSATION_KEYS):
        return "sharegpt"
    if any(key in row for key in _PROMPT_KEYS):
        return "prompts"
    raise _UnusableError("unknown_format", f"keys {sorted(map(str, row))[:8]}")


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _prompts(row: dict[str, Any]) -> tuple[Message, ...]:
    value = next(row[key] for key in _PROMPT_KEYS if key in row)
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise _UnusableError("empty_prompt", "a prompt must be text that is not blank")
    system = row.get("system")
    head = (Message("system", system),) if isinstance(system, str) and system.strip() else ()
    return head + tuple(Message("user", text) for text in texts)


def _messages(row: dict[str, Any]) -> tuple[Message, ...]:
    keys = ("messages", *_CONVERSATION_KEYS, "prompt")
    raw = next(row[key] for key in keys if key in row)
    if isinstance(raw, str):
        raw = _parse_json(raw, "messages")
    if not isinstance(raw, list) or not raw:
        raise _UnusableError("empty_conversation", "no messages")
    system = row.get("system")
    head = [Message("system", system)] if isinstance(system, str) and system.strip() else []
    return tuple(head + [_message(item) for item in raw])


def _message(raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise _UnusableError("malformed_message", f"a {type(raw).__name__}, not an object")
    name = raw.get("role", raw.get("from"))
    if not isinstance(name, str) or name.lower() not in _ROLES:
        raise _UnusableError("unknown_role", repr(name))
    role = _ROLES[name.lower()]
    content = _content(raw.get("content", raw.get("value")))
    if name.lower() == "function_call":
        return Message("assistant", tool_calls=(_tool_call(_parse_json(content, "call")),))
    calls = raw.get("tool_calls") or []
    if isinstance(calls, str):
        calls = _parse_json(calls, "tool_calls")
    if not isinstance(calls, list):
        raise _UnusableError("malformed_tool_call", "tool_calls is no list")
    if raw.get("function_call"):
        calls = [*calls, raw["function_call"]]
    if calls and role != "assistant":
        raise _UnusableError("malformed_tool_call", f"a {role} message calls a tool")
    return Message(
        role=role,
        content=content,
        reasoning=_content(raw.get("reasoning_content", raw.get("reasoning"))),
        tool_calls=tuple(_tool_call(call) for call in calls),
        tool_call_id=str(raw.get("tool_call_id") or ""),
        name=str(raw.get("name") or ""),
    )


def _content(value: Any) -> str:
    """Text, ``null``, or a list of text parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = []
        for part in value:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, dict) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise _UnusableError("unsupported_content", f"a part of type {kind!r}")
        return "".join(texts)
    raise _UnusableError("unsupported_content", f"content is a {type(value).__name__}")


def _tool_call(raw: Any) -> ToolCall:
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _UnusableError("malformed_tool_call", "a call needs function.name")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _parse_json(arguments or "{}", "arguments")
    if not isinstance(arguments, dict):
        raise _UnusableError("malformed_tool_call", "arguments must be a JSON object")
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(function["name"], text, call_id=str(raw.get("id") or ""))


def _tools(raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    if isinstance(raw, str):
        raw = _parse_json(raw, "tools")
    if not isinstance(raw, list) or not all(isinstance(tool, str | dict) for tool in raw):
        raise _UnusableError("malformed_tools", "tools must be a list of definitions")
    parsed = [_parse_json(tool, "tools") if isinstance(tool, str) else tool for tool in raw]
    wrapped = [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
        for tool in parsed
    ]
    return tuple(json.dumps(tool, ensure_ascii=False) for tool in wrapped)


def _tokenized(row: dict[str, Any], source: str, record_id: str) -> Record:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if mask is None:
        raise _UnusableError("malformed_tokens", "input_ids without loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise _UnusableError("malformed_tokens", "input_ids and loss_mask must be equally long")
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise _UnusableError("malformed_tokens", "input_ids must be token ids")
    if not all(flag in (0, 1) for flag in mask):
        raise _UnusableError("malformed_tokens", "loss_mask must hold true/false or 1/0")
    flags = tuple(bool(flag) for flag in mask)
    group = str(row.get("conversation_id") or "")
    return TokenizedRecord(
        tuple(ids),
        flags,
        source=source,
        record_id=record_id,
        group=group,
        domain=record_domain(row),
    )


def _parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        reason = "malformed_tools" if what == "tools" else "malformed_tool_call"
        if what == "messages":
            reason = "malformed_message"
        raise _UnusableError(reason, f"{what} is no JSON: {error}") from error
