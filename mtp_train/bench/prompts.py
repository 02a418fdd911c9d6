"""The questions that are sent: evaluation sets, or the user's own files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.builtin import BUILTIN_SETS
from data_prep.evaluation import evaluation_questions
from mtp_train.bench.facts import Question

_ROLES = frozenset({"system", "user", "assistant"})


def load_questions(names: Sequence[str], *, limit: int) -> list[Question]:
    """``limit`` questions of all of ``names`` together, evenly spaced (0: all).

    Raises ``ValueError`` naming what cannot be read, or where no prompt is left.
    """
    found = [question for name in names for question in _load(name)]
    if not found:
        raise ValueError(f"bench.prompts={list(names)}: no prompt in there")
    count = min(limit or len(found), len(found))
    return [found[index * len(found) // count] for index in range(count)]


def _load(name: str) -> list[Question]:
    if name in BUILTIN_SETS and BUILTIN_SETS[name].evaluation_only:
        return [Question(id_, (("user", text),)) for id_, text in evaluation_questions(name)]
    file = Path(name)
    if not file.is_file():
        sets = ", ".join(key for key, entry in BUILTIN_SETS.items() if entry.evaluation_only)
        raise ValueError(
            f"bench.prompts: {name} is neither a file nor one of {sets}; name one of these"
        )
    lines = file.read_text(encoding="utf-8").splitlines()
    numbered = [(f"{file.name}:{number}", line) for number, line in enumerate(lines, 1)]
    written = [(where, line) for where, line in numbered if line.strip()]
    if file.suffix == ".jsonl":
        return [Question(where, _read_messages(where, line)) for where, line in written]
    return [Question(where, (("user", line.strip()),)) for where, line in written]


def _read_messages(where: str, line: str) -> tuple[tuple[str, str], ...]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"bench.prompts: {where}: not valid JSON ({error})") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(prompt, str):
        return (("user", prompt),)
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f'bench.prompts: {where}: expected {{"prompt": "…"}} or {{"messages": [{{"role": …, '
            '"content": …}}]}}'
        )
    found = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(
                f"bench.prompts: {where}: a message has a role ({', '.join(sorted(_ROLES))}) and "
                "a content of text"
            )
        found.append((role, content))
    if found[-1][0] == "assistant":  # what it answered is not asked again
        found.pop()
    if not found:
        raise ValueError(f"bench.prompts: {where}: no message of the user's")
    return tuple(found)
