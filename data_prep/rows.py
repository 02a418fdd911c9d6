"""From answers to rows: length limits per answer, and joining the answers of one conversation.

The unit is one answer with the prompt a server would have fed. Answers of a conversation share a
row only where the later prompt begins with exactly the tokens of the earlier prompt and answer; a
template that rewrites history breaks that, and then each answer keeps its own row.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace

from data_prep.chat import ChatFormat, TurnText, UnrenderableError
from data_prep.config import DataConfig
from data_prep.conversation import Conversation, Reject, TokenizedRecord
from data_prep.normalise import token_group_hash
from data_prep.token_set import TokenRow


@dataclass(frozen=True)
class Answer:
    """One answer of a conversation. ``turn`` is the index of its message."""

    turn: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    cut_off: bool = False

    @property
    def input_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.answer_ids


@dataclass(frozen=True)
class ConversationRows:
    """What became of one conversation. ``recalled``: the share of its answers that an earlier run
    had generated.
    """

    rows: tuple[TokenRow, ...]
    rejects: tuple[Reject, ...]
    recalled: float = 0.0


Results = Generator[tuple[Conversation, ConversationRows], None, None]
"""Conversations with what became of them, in order."""


def prompt_fault(num_prompt_tokens: int, config: DataConfig) -> str:
    """Reject reason of a prompt that is too long, or empty. Later prompts are longer still."""
    if config.max_prompt_tokens and num_prompt_tokens > config.max_prompt_tokens:
        return "prompt_too_long"
    return "too_long" if num_prompt_tokens >= config.max_tokens else ""


def fit_answer(answer: Answer, config: DataConfig) -> Answer | str:
    """The answer within the limits of ``config`` (cut if allowed), or the reject reason."""
    limit = config.max_answer_tokens
    if limit and len(answer.answer_ids) > limit:
        if not config.cut_long_answers:
            return "answer_too_long"
        answer = replace(answer, answer_ids=answer.answer_ids[:limit], cut_off=True)
    num_tokens = len(answer.prompt_ids) + len(answer.answer_ids)
    if num_tokens > config.max_tokens:
        return "too_long"
    return "too_short" if num_tokens < config.min_tokens else answer


def join_answers(
    conversation_id: str, source: str, answers: Sequence[Answer], *, join: bool = True
) -> tuple[TokenRow, ...]:
    """Rows of one conversation; ``join=False`` keeps one row per answer."""
    rows: list[TokenRow] = []
    for answer in answers:
        ids = answer.input_ids
        mask = (False,) * len(answer.prompt_ids) + (True,) * len(answer.answer_ids)
        previous = rows[-1] if rows else None
        if join and previous and answer.prompt_ids[: len(previous.input_ids)] == previous.input_ids:
            rows.pop()
            mask = previous.loss_mask + mask[len(previous.loss_mask) :]
        rows.append(TokenRow(conversation_id, source, ids, mask, answer.cut_off))
    return tuple(rows)


def recorded_rows(
    conversations: Sequence[Conversation], chat: ChatFormat, config: DataConfig
) -> list[ConversationRows]:
    """Rows from the answers as recorded, one result per conversation.

    Works through all first answers, then all second answers, …, so that the tokenizer gets large
    batches and nothing is tokenised beyond the length limit.
    """
    answers: list[list[Answer]] = [[] for _ in conversations]
    rejects: list[list[Reject]] = [[] for _ in conversations]
    turns = [
        [index for index, message in enumerate(item.messages) if message.role == "assistant"]
        for item in conversations
    ]
    for item, indices, dropped in zip(conversations, turns, rejects, strict=True):
        if not indices:
            dropped.append(_reject("no_answer", item))

    open_items = [index for index, indices in enumerate(turns) if indices]
    depth = 0
    while open_items:
        texts: list[tuple[int, TurnText]] = []
        for index in open_items:
            turn = turns[index][depth]
            try:
                texts.append((index, chat.turn_text(conversations[index], turn)))
            except UnrenderableError as error:
                rejects[index].append(
                    _reject(error.reason, conversations[index], error.detail, turn)
                )
        prompts = chat.encode([text.prompt for _, text in texts])
        encoded = chat.encode([text.answer for _, text in texts])
        closed: set[int] = set()
        for (index, text), prompt, raw_answer in zip(texts, prompts, encoded, strict=True):
            turn = turns[index][depth]
            if fault := prompt_fault(len(prompt), config):
                detail = f"{len(prompt)} prompt tokens; this and later answers"
                rejects[index].append(_reject(fault, conversations[index], detail, turn))
                closed.add(index)
                continue
            result = _finish(Answer(turn, tuple(prompt), tuple(raw_answer)), text, chat, config)
            if isinstance(result, Answer):
                answers[index].append(result)
            else:
                rejects[index].append(_reject(result.reason, conversations[index], "", turn))
        depth += 1
        open_items = [
            index for index in open_items if index not in closed and depth < len(turns[index])
        ]

    return [
        ConversationRows(join_answers(item.conversation_id, item.source, kept), tuple(dropped))
        for item, kept, dropped in zip(conversations, answers, rejects, strict=True)
    ]


def _finish(
    answer: Answer, text: TurnText, chat: ChatFormat, config: DataConfig
) -> Answer | UnrenderableError:
    try:
        ids = chat.answer_ids(answer.answer_ids)
        if not text.answer.startswith(chat.decode(ids)):
            raise UnrenderableError("not_reversible")
    except UnrenderableError as error:
        return error
    result = fit_answer(replace(answer, answer_ids=tuple(ids)), config)
    return UnrenderableError(result) if isinstance(result, str) else result


def tokenized_row(
    record: TokenizedRecord, config: DataConfig, *, vocab_size: int
) -> TokenRow | Reject:
    """A pre-tokenised record as a row, under the same limits."""

    def reject(reason: str, detail: str = "") -> Reject:
        return Reject(reason, record.source, record.record_id, detail)

    if not any(record.loss_mask):
        return reject("no_answer")
    if record.loss_mask[0]:
        return reject("no_prompt", "the first token is in the mask")
    if max(record.input_ids) >= vocab_size:
        return reject("malformed_tokens", f"id {max(record.input_ids)} of {vocab_size}")
    num_tokens = len(record.input_ids)
    first = record.loss_mask.index(True)
    if num_tokens > config.max_tokens:
        return reject("too_long", f"{num_tokens} tokens")
    if num_tokens < config.min_tokens:
        return reject("too_short", f"{num_tokens} tokens")
    if fault := prompt_fault(first, config):
        return reject(fault, f"{first} prompt tokens")
    if config.max_answer_tokens and _longest_run(record.loss_mask) > config.max_answer_tokens:
        return reject("answer_too_long")
    return TokenRow(token_group_hash(record), record.source, record.input_ids, record.loss_mask)


def _longest_run(mask: Iterable[bool]) -> int:
    longest = run = 0
    for flag in mask:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


def _reject(reason: str, conversation: Conversation, detail: str = "", turn: int = -1) -> Reject:
    return Reject(reason, conversation.source, conversation.record_id, detail, turn)
