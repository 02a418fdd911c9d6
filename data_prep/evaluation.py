"""Prompts of the evaluation sets, as a server would feed them. For measuring only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.builtin import BUILTIN_SETS, builtin_path
from data_prep.chat import load_chat_format
from data_prep.conversation import Message
from data_prep.json_stream import Damage, read_json_records

_ID_KEYS = {"mtbench": "question_id", "humaneval": "task_id", "gsm8k": ""}
_PROMPT_KEYS = {"mtbench": "turns", "humaneval": "prompt", "gsm8k": "question"}


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt of an evaluation set. ``turn`` counts from 1; only first turns are given (a second
    one needs the model's own first answer).
    """

    id: str
    category: str
    prompt_ids: tuple[int, ...]
    turn: int = 1


def evaluation_prompts(
    name: str,
    tokenizer: Any,
    limit: int = 0,
    *,
    chat_template: str = "",
    chat_template_kwargs: Sequence[tuple[str, str]] = (),
) -> list[EvalPrompt]:
    """``limit`` prompts of ``name`` (0 = all), evenly spaced so that every category has its share.

    Template arguments as in :class:`data_prep.config.DataConfig`. Raises
    ``ValueError`` for an unknown set or a missing package.
    """
    if name not in _PROMPT_KEYS:
        raise ValueError(f"evaluation set {name!r}: must be one of {sorted(_PROMPT_KEYS)}")
    if limit < 0:
        raise ValueError(f"evaluation set {name!r}: limit={limit} must not be negative")
    assert BUILTIN_SETS[name].evaluation_only
    path = builtin_path(name)
    chat = load_chat_format(tokenizer, template_path=chat_template, kwargs=chat_template_kwargs)
    records: list[dict[str, Any]] = []
    for record in read_json_records(path, is_record=frozenset(_PROMPT_KEYS.values())):
        if isinstance(record, Damage):
            raise ValueError(f"evaluation set {name!r}: {path} is damaged: {record.detail}")
        records.append(record)
    total = len(records)
    count = min(limit or total, total)
    chosen = [index * total // count for index in range(count)]
    texts, meta = [], []
    for index in chosen:
        record = records[index]
        value = record[_PROMPT_KEYS[name]]
        question = value[0] if isinstance(value, list) else value
        texts.append(chat.prompt_text((Message("user", question),), ()))
        meta.append((str(record.get(_ID_KEYS[name], index)), str(record.get("category", name))))
    return [
        EvalPrompt(id_, category, tuple(ids))
        for (id_, category), ids in zip(meta, chat.encode(texts), strict=True)
    ]
