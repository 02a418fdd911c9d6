"""The target writes the answers: each question of a conversation goes through the runtime.

A row is the prompt ids a server would have fed plus the ids the target generated, so nothing is
tokenised twice. Questions of one depth are decoded together (continuous batching); the next depth
sees the regenerated answers. Every finished answer is journaled before it is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from data_prep.chat import ChatFormat, UnrenderableError
from data_prep.config import DataConfig
from data_prep.conversation import Conversation, Message, Reject
from data_prep.journal import Journal, JournalRecord
from data_prep.normalise import Split, assign_split
from data_prep.rows import Answer, ConversationRows, fit_answer, join_answers, prompt_fault
from data_prep.token_set import TokenRow
from runtime.request import Generation, HiddenRows, Request, SamplingParams
from runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

HiddenSink = Callable[[HiddenRows, TokenRow, Split], None]
"""Receives the hidden states of one kept row: one per token of the row but the last.

It must be idempotent by the row's ``sample_id``: after a crash between the sink and the journal an
answer is decoded, and handed over, again. It need not be durable when it returns: an answer that is
in the journal is never handed over again, so what a crash costs the sink has to be computed from
the token set later (`mtp precompute`). It may see a row that later falls to the token budget.
"""


class AnswerEngine(Protocol):
    """What regeneration needs of an engine."""

    def generate(
        self,
        requests: Sequence[Request],
        *,
        hidden_sink: Callable[[HiddenRows], None] | None = None,
        on_finish: Callable[[Generation], None] | None = None,
    ) -> list[Generation]: ...


@dataclass(frozen=True)
class RegenerateContext:
    """What stays the same over all calls."""

    chat: ChatFormat
    engine: AnswerEngine
    journal: Journal
    config: DataConfig
    seed: int
    hidden_sink: HiddenSink | None = None
    on_answer: Callable[[int], None] | None = None  # number of generated tokens


@dataclass
class _Dialogue:
    """One conversation while it is being answered."""

    conversation: Conversation
    history: list[Message] = field(default_factory=list)
    position: int = 0  # next recorded message
    answers: list[Answer] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    is_open: bool = True

    def reject(self, reason: str, detail: str = "") -> None:
        item = self.conversation
        self.rejects.append(Reject(reason, item.source, item.record_id, detail, turn=self.position))

    def close(self, reason: str = "", detail: str = "") -> None:
        self.is_open = False
        if reason:
            self.reject(reason, detail)


@dataclass(frozen=True)
class _Question:
    dialogue: _Dialogue
    turn: int  # index of the answer's message, recorded or not
    prompt_ids: tuple[int, ...]

    @property
    def key(self) -> str:
        name = [self.dialogue.conversation.conversation_id, self.turn, self.prompt_ids]
        return hashlib.sha256(json.dumps(name).encode()).hexdigest()[:32]


def journal_header(config: DataConfig, *, seed: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """What an answer depends on beside its prompt: sampling, target, tokenizer, template."""
    options = config.regenerate
    header = {key: inputs[key] for key in ("target", "tokenizer", "chat_template") if key in inputs}
    return header | {
        "seed": seed,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "max_tokens": options.max_tokens,
        "max_row_tokens": config.max_tokens,
        "max_answer_tokens": config.max_answer_tokens,
    }


def regenerated_rows(
    conversations: Sequence[Conversation], context: RegenerateContext
) -> list[ConversationRows]:
    """Rows with answers written by the target, one result per conversation, in order."""
    dialogues = [_Dialogue(conversation) for conversation in conversations]
    while questions := _next_questions(dialogues, context):
        for question, record in zip(questions, _answer(questions, context), strict=True):
            _take_answer(question, record, context)
    # Captured hidden states belong to single answers, and so must the rows.
    join = context.hidden_sink is None
    return [
        ConversationRows(
            join_answers(
                dialogue.conversation.conversation_id,
                dialogue.conversation.source,
                dialogue.answers,
                join=join,
            ),
            tuple(dialogue.rejects),
        )
        for dialogue in dialogues
    ]


def _next_questions(dialogues: Sequence[_Dialogue], context: RegenerateContext) -> list[_Question]:
    asked: list[tuple[_Dialogue, str]] = []
    for dialogue in dialogues:
        if dialogue.is_open and _advance(dialogue):
            try:
                tools = dialogue.conversation.tools
                asked.append((dialogue, context.chat.prompt_text(dialogue.history, tools)))
            except UnrenderableError as error:
                dialogue.close(error.reason, error.detail)
    questions = []
    encoded = context.chat.encode([text for _, text in asked])
    for (dialogue, _), ids in zip(asked, encoded, strict=True):
        if fault := prompt_fault(len(ids), context.config):
            dialogue.close(fault, f"{len(ids)} prompt tokens; this and later answers")
        else:
            questions.append(_Question(dialogue, dialogue.position, tuple(ids)))
    return questions


def _advance(dialogue: _Dialogue) -> bool:
    """Copy recorded messages up to the next point where the assistant speaks."""
    recorded = dialogue.conversation.messages
    while dialogue.position < len(recorded):
        message = recorded[dialogue.position]
        assert message.role != "assistant", "answers are taken one at a time"
        dialogue.history.append(message)
        dialogue.position += 1
        following = (
            recorded[dialogue.position].role if dialogue.position < len(recorded) else "user"
        )
        if message.role in ("user", "tool") and following in ("user", "assistant"):
            return True
    dialogue.close()
    return False


def _answer(questions: Sequence[_Question], context: RegenerateContext) -> list[JournalRecord]:
    """Answers of all questions: from the journal, the rest from one call of the engine."""
    by_key = {question.key: question for question in questions}
    assert len(by_key) == len(questions), "conversations are unique"
    requests = [
        _request(question, context)
        for key, question in by_key.items()
        if context.journal.get(key) is None
    ]
    aborted: dict[str, JournalRecord] = {}
    hidden: dict[str, HiddenRows] = {}
    finished: dict[str, Generation] = {}
    capture = context.hidden_sink is not None

    def settle(key: str) -> None:
        """Once an answer, and its hidden states if wanted, are there: sink first, then journal."""
        if key not in finished or (capture and key not in hidden):
            return
        generation = finished.pop(key)
        record = JournalRecord(key, tuple(generation.output_ids), generation.finish_reason)
        _hand_over(by_key[key], record, hidden.pop(key, None), context)
        context.journal.append(record)
        if context.on_answer is not None:
            context.on_answer(len(record.output_ids))

    def on_hidden(rows: HiddenRows) -> None:
        hidden[rows.key] = rows
        settle(rows.key)

    def on_finish(generation: Generation) -> None:
        key = generation.request_id
        if generation.finish_reason == "abort":
            aborted[key] = JournalRecord(key, tuple(generation.output_ids), "abort")
        else:
            finished[key] = generation
            settle(key)

    if requests:
        context.engine.generate(
            requests, hidden_sink=on_hidden if capture else None, on_finish=on_finish
        )
        assert not finished, f"{len(finished)} answers came without their hidden states"
    records = []
    for key in by_key:
        record = context.journal.get(key) or aborted.get(key)
        assert record is not None, f"the engine did not finish request {key}"
        records.append(record)
    return records


def _request(question: _Question, context: RegenerateContext) -> Request:
    config = context.config
    options = config.regenerate
    limits = [options.max_tokens, config.max_tokens - len(question.prompt_ids)]
    if config.max_answer_tokens:
        limits.append(config.max_answer_tokens)
    conversation_id = question.dialogue.conversation.conversation_id
    sampling = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=derive_seed(context.seed, "regenerate", conversation_id, question.turn),
        max_tokens=min(limits),
        stop_token_ids=tuple(sorted(context.chat.end_of_turn_ids)),
    )
    return Request(question.key, question.prompt_ids, sampling)


def _hand_over(
    question: _Question,
    record: JournalRecord,
    hidden: HiddenRows | None,
    context: RegenerateContext,
) -> None:
    if context.hidden_sink is None or hidden is None:
        return
    answer = _fit(question, record, context.config)
    if isinstance(answer, Answer):
        conversation = question.dialogue.conversation
        (row,) = join_answers(conversation.conversation_id, conversation.source, [answer])
        assert hidden.token_ids == row.input_ids[:-1], "one state per token but the last"
        share = context.config.validation_share
        split = assign_split(conversation.prompt_id, validation_share=share, seed=context.seed)
        context.hidden_sink(hidden, row, split)


def _fit(question: _Question, record: JournalRecord, config: DataConfig) -> Answer | str:
    cut_off = record.finish_reason == "length"
    if record.finish_reason == "abort":
        return "aborted"
    if cut_off and config.regenerate.drop_cut_off:
        return "cut_off"
    answer = Answer(question.turn, question.prompt_ids, record.output_ids, cut_off)
    return fit_answer(answer, config)


def _take_answer(question: _Question, record: JournalRecord, context: RegenerateContext) -> None:
    """Add the answer to its dialogue and see whether the dialogue can go on."""
    dialogue = question.dialogue
    answer = _fit(question, record, context.config)
    if isinstance(answer, str):
        dialogue.reject(answer)
    else:
        dialogue.answers.append(answer)
    recorded = dialogue.conversation.messages
    original = recorded[dialogue.position] if dialogue.position < len(recorded) else None
    if original is not None and original.role == "assistant":
        dialogue.position += 1
    if record.finish_reason != "stop":
        more = dialogue.position < len(recorded)
        dialogue.close("after_cut_off" if more else "", "would follow half an answer")
        return
    # A stop is the end-of-turn token: the client never sees it.
    message = _as_message(context.chat.decode(record.output_ids[:-1]), context.chat)
    if dialogue.position >= len(recorded):
        dialogue.close()
    elif message.is_empty:
        dialogue.close("after_empty_answer", "the target said nothing")
    elif recorded[dialogue.position].role != "tool" and message.tool_calls:
        dialogue.close("no_tool_result", "the target calls a tool, the record does not")
    elif recorded[dialogue.position].role == "tool":
        _splice_tool_results(dialogue, message, original, context)
    else:
        dialogue.history.append(message)


def _as_message(text: str, chat: ChatFormat) -> Message:
    """What a client sends back as history: calls parsed, the rest as it was written."""
    if chat.call_syntax is None:
        return Message("assistant", text)
    head, calls = chat.call_syntax.parse(text)
    return Message("assistant", head.rstrip() if calls else text, tool_calls=calls)


def _splice_tool_results(
    dialogue: _Dialogue,
    message: Message,
    original: Message | None,
    context: RegenerateContext,
) -> None:
    """Give the regenerated calls the recorded results, where the same tools were called."""
    if context.config.regenerate.tool_results == "stop":
        dialogue.close("tool_results_not_spliced", "data.regenerate.tool_results=stop")
        return
    recorded_calls = original.tool_calls if original is not None else ()
    # Templates without call ids match results to calls by order, so the order must be the same.
    if [call.name for call in message.tool_calls] != [call.name for call in recorded_calls]:
        dialogue.close("tool_calls_differ", "the target calls other tools than the record")
        return
    calls = tuple(
        replace(call, call_id=recorded.call_id)
        for call, recorded in zip(message.tool_calls, recorded_calls, strict=True)
    )
    dialogue.history.append(replace(message, tool_calls=calls))
