"""What every source is read into: conversations, pre-tokenised rows, and rejected records.

Everything here is immutable and hashed by content, so order of reading never decides anything.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]

# Reasons that are no fault of a record: the configuration asked for no more.
BEYOND_LIMITS = frozenset({"conversation_limit", "token_budget"})


@dataclass(frozen=True)
class ToolCall:
    """One call the assistant makes. ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str
    call_id: str = ""


@dataclass(frozen=True)
class Message:
    """One turn. ``reasoning`` holds the assistant's thoughts, without their tags."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    @property
    def is_empty(self) -> bool:
        """Nothing was said, thought or called. A tool may well return nothing."""
        if self.role == "tool":
            return False
        return not (self.content.strip() or self.reasoning.strip() or self.tool_calls)

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that a template may write."""
        calls = [text for call in self.tool_calls for text in (call.name, call.arguments)]
        ids = [call.call_id for call in self.tool_calls]
        return (self.content, self.reasoning, *calls, *ids, self.tool_call_id, self.name)


@dataclass(frozen=True)
class Conversation:
    """Messages in order and the tools on offer (each the JSON text of its definition).

    ``source``, ``record_id`` and ``domain`` say where it came from and are not part of its
    identity.
    """

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    source: str = ""
    record_id: str = ""
    domain: str = ""  # as the record names it

    @cached_property
    def conversation_id(self) -> str:
        """SHA-256 (first 32 hex characters) of roles, contents, thoughts, calls and tools."""
        content = [
            [
                message.role,
                message.content,
                message.reasoning,
                [[call.name, call.arguments] for call in message.tool_calls],
                message.name,
            ]
            for message in self.messages
        ]
        text = json.dumps([content, self.tools], ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def prompt_id(self) -> str:
        """SHA-256 (first 32 hex characters) of tools and messages up to the first user turn.

        Conversations that open with the same question share it, whatever was answered.
        """
        opening = list(takewhile(lambda message: message.role != "user", self.messages))
        asked = [message for message in self.messages if message.role == "user"][:1]
        content = [[message.role, message.content] for message in [*opening, *asked]]
        text = json.dumps([content, self.tools], ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def with_messages(self, messages: tuple[Message, ...]) -> Conversation:
        """The same record with other messages (and therefore another identity)."""
        return replace(self, messages=messages)


@dataclass(frozen=True)
class TokenizedRecord:
    """A row that arrives as token ids. ``loss_mask[i]``: the assistant generated token i."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    source: str = ""
    record_id: str = ""
    group: str = ""  # rows of one conversation share a group and therefore a split
    domain: str = ""


@dataclass(frozen=True)
class Reject:
    """A record, conversation or turn that is not used, and why."""

    reason: str
    source: str
    record_id: str
    detail: str = ""
    turn: int = -1  # index of the assistant turn; -1 = the whole record


Record = Conversation | TokenizedRecord | Reject


def is_unicode(*texts: str) -> bool:
    """No lone surrogates: undecodable bytes, or half a character escaped in JSON."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True
