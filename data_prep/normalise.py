"""Cleans, merges, deduplicates, orders and splits conversations.

Nothing depends on the order of reading: conversations are ordered by the hash of their content and
split by that of their first question. Whatever is left out leaves as a :class:`Reject` with a
reason.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from data_prep.conversation import Conversation, Message, Record, Reject, TokenizedRecord

Split = Literal["train", "validation"]

_SPLIT_ID = re.compile(r"(.+)_(\d+)")


@dataclass(frozen=True)
class Normalised:
    """Usable records, each list in hash order, and everything that was left out."""

    conversations: tuple[Conversation, ...]
    tokenized: tuple[TokenizedRecord, ...]
    rejects: tuple[Reject, ...]


def normalise(records: Iterable[Record], *, max_turns: int, max_conversations: int) -> Normalised:
    """``max_turns`` answers are kept per conversation and ``max_conversations`` in all (0 = no
    limit).
    """
    rejects: list[Reject] = []
    conversations: list[Conversation] = []
    tokenized: list[TokenizedRecord] = []
    for record in records:
        if isinstance(record, Reject):
            rejects.append(record)
        elif isinstance(record, TokenizedRecord):
            tokenized.append(record)
        else:
            conversations.append(record)

    merged = merge_splits(conversations, rejects)
    cleaned = [
        clean
        for conversation in merged
        if (clean := clean_turns(conversation, max_turns=max_turns, rejects=rejects)) is not None
    ]
    unique: dict[str, Conversation] = {}
    for conversation in cleaned:
        key = conversation.conversation_id
        if key in unique:
            rejects.append(_reject("duplicate", conversation, f"same as {unique[key].record_id}"))
        else:
            unique[key] = conversation
    ordered = [unique[key] for key in sorted(unique)]
    if max_conversations:
        for conversation in ordered[max_conversations:]:
            rejects.append(_reject("conversation_limit", conversation))
        ordered = ordered[:max_conversations]
    return Normalised(
        tuple(ordered), tuple(sorted(tokenized, key=token_group_hash)), tuple(rejects)
    )


def merge_splits(
    conversations: Iterable[Conversation], rejects: list[Reject]
) -> list[Conversation]:
    """Join the parts ``id_0``, ``id_11``, … of one source into one conversation.

    ShareGPT numbers a part by the position of its first message, and a part may repeat the last
    message of the one before. Parts numbered 0, 1, 2, … without such overlap are joined in order.
    A part whose predecessor is missing has lost its context and is rejected.
    """
    groups: dict[tuple[str, str], list[tuple[int, Conversation]]] = {}
    for index, conversation in enumerate(conversations):
        match = _SPLIT_ID.fullmatch(conversation.record_id)
        name, number = (match[1], int(match[2])) if match else (f"\0{index}", 0)
        groups.setdefault((conversation.source, name), []).append((number, conversation))

    merged: list[Conversation] = []
    for parts in groups.values():
        if len(parts) == 1 and parts[0][0] == 0:
            merged.append(parts[0][1])
            continue
        if not _are_splits(parts):
            merged.extend(part for _, part in parts)
            continue
        unique: dict[int, Conversation] = {}
        for number, part in sorted(parts, key=lambda item: item[0]):
            if number not in unique:
                unique[number] = part
            elif part.conversation_id == unique[number].conversation_id:
                rejects.append(_reject("duplicate", part, "the same part twice"))
            else:
                merged.append(part)  # another conversation under the same name
        joined = _join(unique, rejects)
        if joined is not None:
            merged.append(joined)
    return merged


def _are_splits(parts: list[tuple[int, Conversation]]) -> bool:
    """``task_17`` is an ordinary name; a later part that opens like a conversation is none."""
    return any(number == 0 for number, _ in parts) or any(
        part.messages[0].role == "assistant" for _, part in parts
    )


def _join(parts: dict[int, Conversation], rejects: list[Reject]) -> Conversation | None:
    numbers = sorted(parts)
    if numbers[0] != 0:
        for part in parts.values():
            rejects.append(_reject("missing_split", part, "the conversation's first part"))
        return None
    base = parts[0]
    by_position = _join_by_position(parts)
    if by_position is None and numbers == list(range(len(numbers))):
        joined = tuple(message for number in numbers for message in parts[number].messages)
        return base.with_messages(joined)
    messages, used = by_position if by_position is not None else (base.messages, 1)
    for number in numbers[used:]:
        rejects.append(_reject("missing_split", parts[number], f"after message {len(messages)}"))
    return base.with_messages(messages)


def _join_by_position(
    parts: dict[int, Conversation],
) -> tuple[tuple[Message, ...], int] | None:
    """Messages and number of parts used, up to the first gap; ``None`` if an overlap differs."""
    messages: tuple[Message, ...] = ()
    used = 0
    for number in sorted(parts):
        if number > len(messages):
            break
        overlap = messages[number:]
        if overlap != parts[number].messages[: len(overlap)]:
            return None
        messages = messages[:number] + parts[number].messages
        used += 1
    return messages, used


def clean_turns(
    conversation: Conversation, *, max_turns: int, rejects: list[Reject]
) -> Conversation | None:
    """Keep the turns that make sense as a dialogue and cut at the first that does not.

    What follows an empty turn answers something that is not there; a second answer in a row was
    not given to any question.
    """
    messages = [
        message
        for message in conversation.messages
        if not (message.role == "system" and message.is_empty)
    ]
    if max_turns:
        messages = _first_turns(messages, max_turns)
    fault = ""
    kept: list[Message] = []
    for index, message in enumerate(messages):
        fault = _fault(message, kept[-1] if kept else None)
        if fault:
            rejects.append(_reject(fault, conversation, f"message {index}", index))
            break
        kept.append(message)
    if not any(message.role == "user" for message in kept):
        if not fault:
            rejects.append(_reject("no_prompt", conversation))
        return None
    return conversation.with_messages(tuple(kept))


def _fault(message: Message, previous: Message | None) -> str:
    """Why ``message`` cannot follow ``previous``; empty when it can."""
    if message.is_empty:
        return "empty_turn"
    role = previous.role if previous else ""
    if message.role == "assistant" and role not in ("user", "tool"):
        return "repeated_answer" if role == "assistant" else "starts_with_answer"
    if message.role == "tool":
        called = previous is not None and (role == "tool" or bool(previous.tool_calls))
        return "" if called else "orphan_tool_result"
    return ""


def _first_turns(messages: list[Message], max_turns: int) -> list[Message]:
    """Up to the ``max_turns``-th answer; a question nobody answered counts as a turn (it may be
    answered by the target).
    """
    num_turns = 0
    for index, message in enumerate(messages):
        following = messages[index + 1].role if index + 1 < len(messages) else "user"
        if message.role in ("user", "tool") and following in ("assistant", "user"):
            num_turns += 1
            if num_turns == max_turns:
                return messages[: index + 1 + (following == "assistant")]
    return messages


def token_group_hash(record: TokenizedRecord) -> str:
    """Content hash that orders token rows; rows of one group share it."""
    if record.group:
        return hashlib.sha256(f"group:{record.group}".encode()).hexdigest()[:32]
    text = ",".join(map(str, record.input_ids))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def token_prompt_hash(record: TokenizedRecord) -> str:
    """Content hash that splits token rows: of the group, else of what precedes the first answer."""
    if record.group:
        return token_group_hash(record)
    first = record.loss_mask.index(True) if True in record.loss_mask else len(record.input_ids)
    text = ",".join(map(str, record.input_ids[:first]))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def assign_split(prompt_id: str, *, validation_share: float, seed: int) -> Split:
    """The same prompt always falls into the same split, whatever else is in the data and however
    it was answered: a head must not be validated on a prompt it was trained on.
    """
    digest = hashlib.sha256(f"split:{seed}:{prompt_id}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "validation" if share < validation_share else "train"


def _reject(reason: str, conversation: Conversation, detail: str = "", turn: int = -1) -> Reject:
    return Reject(reason, conversation.source, conversation.record_id, detail, turn)
