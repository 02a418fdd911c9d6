"""Prompts of the evaluation sets, as a server would feed them. For measuring only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.builtin import BUILTIN_SETS, builtin_path
from data_prep.chat import load_chat_format
from data_prep.conversation import Message
from data_prep.json_stream import Damage, read_json_records
from data_prep.scripts import main_script

_ID_KEYS = {"mtbench": "question_id", "humaneval": "task_id", "gsm8k": ""}
_PROMPT_KEYS = {"mtbench": "turns", "humaneval": "prompt", "gsm8k": "question"}


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt of an evaluation set. ``turn`` counts from 1."""

    id: str
    category: str
    prompt_ids: tuple[int, ...]
    turn: int = 1
    script: str = ""  # the main one of the question


def evaluation_prompts(
    name: str,
    tokenizer: Any,
    limit: int = 0,
    *,
    chat_template: str = "",
    chat_template_kwargs: Sequence[tuple[str, str]] = (),
) -> list[EvalPrompt]:
    """First turns: ``limit`` prompts of ``name`` (0 = all), evenly spaced so that every category
    has its share.

    Template arguments as in :class:`data_prep.config.DataConfig`. Raises
    ``ValueError`` for an unknown set or a missing package.
    """
    if limit < 0:
        raise ValueError(f"evaluation set {name!r}: limit={limit} must not be negative")
    questions = _read_questions(name)
    total = len(questions)
    count = min(limit or total, total)
    chosen = [questions[index * total // count] for index in range(count)]
    chat = load_chat_format(tokenizer, template_path=chat_template, kwargs=chat_template_kwargs)
    texts = [chat.prompt_text((Message("user", item.turns[0]),), ()) for item in chosen]
    return [
        EvalPrompt(item.id, item.category, tuple(ids), script=main_script(item.turns[0]))
        for item, ids in zip(chosen, chat.encode(texts), strict=True)
    ]


def evaluation_questions(name: str) -> list[tuple[str, str]]:
    """Id and text of every first turn, for servers that render prompts themselves. Raises
    ``ValueError`` as :func:`evaluation_prompts` does.
    """
    return [(item.id, item.turns[0]) for item in _read_questions(name)]


def second_turn_prompts(
    name: str,
    tokenizer: Any,
    answers: Mapping[str, str],
    *,
    chat_template: str = "",
    chat_template_kwargs: Sequence[tuple[str, str]] = (),
) -> list[EvalPrompt]:
    """Second turns after the model's own first ``answers`` (text by prompt id), in their order.

    A question without a second turn is left out. Raises ``ValueError`` as
    :func:`evaluation_prompts` does.
    """
    questions = {item.id: item for item in _read_questions(name)}
    chosen = [questions[id_] for id_ in answers if len(questions[id_].turns) > 1]
    chat = load_chat_format(tokenizer, template_path=chat_template, kwargs=chat_template_kwargs)
    texts = []
    for item in chosen:
        first = (Message("user", item.turns[0]), Message("assistant", answers[item.id]))
        texts.append(chat.prompt_text((*first, Message("user", item.turns[1])), ()))
    return [
        EvalPrompt(item.id, item.category, tuple(ids), turn=2, script=main_script(item.turns[1]))
        for item, ids in zip(chosen, chat.encode(texts), strict=True)
    ]


@dataclass(frozen=True)
class _Question:
    id: str
    category: str
    turns: tuple[str, ...]


def _read_questions(name: str) -> list[_Question]:
    if name not in _PROMPT_KEYS:
        raise ValueError(f"evaluation set {name!r}: must be one of {sorted(_PROMPT_KEYS)}")
    assert BUILTIN_SETS[name].evaluation_only
    path = builtin_path(name)
    questions: list[_Question] = []
    for index, record in enumerate(
        read_json_records(path, is_record=frozenset(_PROMPT_KEYS.values()))
    ):
        if isinstance(record, Damage):
            raise ValueError(f"evaluation set {name!r}: {path} is damaged: {record.detail}")
        value = record[_PROMPT_KEYS[name]]
        turns = tuple(value) if isinstance(value, list) else (value,)
        id_, category = record.get(_ID_KEYS[name], index), record.get("category", name)
        questions.append(_Question(str(id_), str(category), turns))
    return questions
