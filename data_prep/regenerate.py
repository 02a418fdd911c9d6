"""The target writes the answers: each question of a conversation goes to an engine.

A row is the prompt ids a server would have fed plus the ids the target generated, so nothing is
tokenised twice. Conversations enter one by one and leave in the same order; in between as many
questions are in flight as the engine has room for, and the next question of a conversation follows
as soon as its answer is there. Every finished answer is journaled before it is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data_prep.answering import AnswerEngine, HiddenSink, Question, Reply
from data_prep.chat import ChatFormat, UnrenderableError
from data_prep.config import DataConfig
from data_prep.conversation import Conversation, Message, Reject
from data_prep.journal import Journal, JournalRecord
from data_prep.normalise import assign_split
from data_prep.rows import (
    Answer,
    ConversationRows,
    Results,
    fit_answer,
    join_answers,
    prompt_fault,
)
from runtime.request import HiddenRows, SamplingParams
from runtime.seeds import derive_seed

logger = logging.getLogger(__name__)

# Conversations begun before the oldest is finished: bounds memory, and answers asked in vain when
# the token budget ends the run. Beyond that, one slow answer would stall the engine.
_MIN_LOOK_AHEAD = 256


@dataclass(frozen=True)
class RegenerateContext:
    """What stays the same over all calls."""

    chat: ChatFormat
    engine: AnswerEngine
    journal: Journal
    config: DataConfig
    seed: int
    hidden_sink: HiddenSink | None = None
    on_answer: Callable[[JournalRecord], None] | None = None  # newly generated, and journaled


@dataclass
class _Dialogue:
    """One conversation while it is being answered."""

    conversation: Conversation
    history: list[Message] = field(default_factory=list)
    position: int = 0  # next recorded message
    answers: list[Answer] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    num_recalled: int = 0  # answers from the journal
    num_generated: int = 0
    is_open: bool = True

    def reject(self, reason: str, detail: str = "") -> None:
        item = self.conversation
        self.rejects.append(Reject(reason, item.source, item.record_id, detail, turn=self.position))

    def close(self, reason: str = "", detail: str = "") -> None:
        self.is_open = False
        if reason:
            self.reject(reason, detail)


def journal_header(
    config: DataConfig, *, seed: int, inputs: Mapping[str, Any], identity: Mapping[str, str]
) -> dict[str, Any]:
    """What an answer depends on beside its prompt: sampling, target, tokenizer, template, and who
    answers where that is not the target's own files.
    """
    options = config.regenerate
    header: dict[str, Any] = {
        key: inputs[key] for key in ("target", "tokenizer", "chat_template") if key in inputs
    }
    if identity:
        header["answered_by"] = dict(identity)
    return header | {
        "seed": seed,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "max_tokens": options.max_tokens,
        "max_row_tokens": config.max_tokens,
        "max_answer_tokens": config.max_answer_tokens,
    }


def regenerated_rows(conversations: Sequence[Conversation], context: RegenerateContext) -> Results:
    """Each conversation with rows whose answers the target wrote, in order.

    Closing the iterator gives up what is in flight.
    """
    engine = context.engine
    waiting = deque(conversations)
    begun: deque[_Dialogue] = deque()
    asked: dict[str, tuple[_Dialogue, Question]] = {}

    def ask(dialogue: _Dialogue) -> None:
        """Go on with a dialogue until it waits for the engine or is closed."""
        while question := _next_question(dialogue, context):
            record = context.journal.get(question.key)
            if record is None:
                assert question.key not in asked, "conversations are unique"
                asked[question.key] = (dialogue, question)
                engine.submit(question, captures_hidden=context.hidden_sink is not None)
                return
            dialogue.num_recalled += 1
            _take_answer(dialogue, question, record, context)

    try:
        while waiting or begun:
            look_ahead = max(_MIN_LOOK_AHEAD, 2 * engine.capacity)
            while waiting and len(asked) < engine.capacity and len(begun) < look_ahead:
                begun.append(_Dialogue(waiting.popleft()))
                ask(begun[-1])
            while begun and not begun[0].is_open:
                dialogue = begun.popleft()
                yield dialogue.conversation, _rows(dialogue, context)
            if asked:
                replies = engine.collect()
                settled = [(*asked.pop(reply.key), reply) for reply in replies]
                for record, (dialogue, question, _) in zip(
                    _settle(settled, context), settled, strict=True
                ):
                    dialogue.num_generated += 1
                    _take_answer(dialogue, question, record, context)
                for dialogue, _, _ in settled:
                    ask(dialogue)
    finally:
        engine.cancel()


def _rows(dialogue: _Dialogue, context: RegenerateContext) -> ConversationRows:
    conversation = dialogue.conversation
    rows = join_answers(
        conversation.conversation_id,
        conversation.source,
        dialogue.answers,
        # Captured hidden states belong to single answers, and so must the rows.
        join=context.hidden_sink is None,
    )
    num_answers = dialogue.num_recalled + dialogue.num_generated
    recalled = dialogue.num_recalled / num_answers if num_answers else 0.0
    return ConversationRows(rows, tuple(dialogue.rejects), recalled)


def _next_question(dialogue: _Dialogue, context: RegenerateContext) -> Question | None:
    """What to ask next; ``None`` closes the dialogue."""
    if not dialogue.is_open or not _advance(dialogue):
        return None
    conversation = dialogue.conversation
    try:
        text = context.chat.prompt_text(dialogue.history, conversation.tools)
    except UnrenderableError as error:
        dialogue.close(error.reason, error.detail)
        return None
    (prompt_ids,) = context.chat.encode([text])
    if fault := prompt_fault(len(prompt_ids), context.config):
        dialogue.close(fault, f"{len(prompt_ids)} prompt tokens; this and later answers")
        return None
    name = [conversation.conversation_id, dialogue.position, prompt_ids]
    return Question(
        key=hashlib.sha256(json.dumps(name).encode()).hexdigest()[:32],
        prompt_ids=tuple(prompt_ids),
        sampling=_sampling(dialogue, len(prompt_ids), context),
        messages=tuple(dialogue.history),
        tools=conversation.tools,
    )


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


def _sampling(dialogue: _Dialogue, prompt_len: int, context: RegenerateContext) -> SamplingParams:
    config = context.config
    options = config.regenerate
    limits = [options.max_tokens, config.max_tokens - prompt_len]
    if config.max_answer_tokens:
        limits.append(config.max_answer_tokens)
    conversation_id = dialogue.conversation.conversation_id
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=derive_seed(context.seed, "regenerate", conversation_id, dialogue.position),
        max_tokens=min(limits),
        stop_token_ids=tuple(sorted(context.chat.end_of_turn_ids)),
    )


def _settle(
    settled: Sequence[tuple[_Dialogue, Question, Reply]], context: RegenerateContext
) -> list[JournalRecord]:
    """Make the replies durable: hidden states to the sink first, then the journal."""
    records = []
    for dialogue, question, reply in settled:
        record = JournalRecord(
            reply.key,
            reply.output_ids,
            reply.finish_reason,
            reply.fault,
            reply.detail,
            reply.is_retokenised,
        )
        records.append(record)
        if context.hidden_sink is not None and reply.finish_reason != "abort":
            assert reply.hidden is not None, f"answer {reply.key} came without its hidden states"
            _hand_over(dialogue, question, record, reply.hidden, context)
    finished = [record for record in records if record.finish_reason != "abort"]
    context.journal.append(finished)
    if context.on_answer is not None:
        for record in finished:
            context.on_answer(record)
    return records


def _hand_over(
    dialogue: _Dialogue,
    question: Question,
    record: JournalRecord,
    hidden: HiddenRows,
    context: RegenerateContext,
) -> None:
    assert context.hidden_sink is not None
    answer = _fit(dialogue, question, record, context.config)
    if isinstance(answer, Answer):
        conversation = dialogue.conversation
        (row,) = join_answers(conversation.conversation_id, conversation.source, [answer])
        assert hidden.token_ids == row.input_ids[:-1], "one state per token but the last"
        share = context.config.validation_share
        split = assign_split(conversation.prompt_id, validation_share=share, seed=context.seed)
        context.hidden_sink(hidden, row, split)


def _fit(
    dialogue: _Dialogue, question: Question, record: JournalRecord, config: DataConfig
) -> Answer | str:
    cut_off = record.finish_reason == "length"
    if record.fault:
        return record.fault
    if record.finish_reason == "abort":
        return "aborted"
    if cut_off and config.regenerate.drop_cut_off:
        return "cut_off"
    answer = Answer(dialogue.position, question.prompt_ids, record.output_ids, cut_off)
    return fit_answer(answer, config)


def _take_answer(
    dialogue: _Dialogue, question: Question, record: JournalRecord, context: RegenerateContext
) -> None:
    """Add the answer to its dialogue and see whether the dialogue can go on."""
    answer = _fit(dialogue, question, record, context.config)
    if isinstance(answer, str):
        dialogue.reject(answer, record.detail)
    else:
        dialogue.answers.append(answer)
    recorded = dialogue.conversation.messages
    original = recorded[dialogue.position] if dialogue.position < len(recorded) else None
    if original is not None and original.role == "assistant":
        dialogue.position += 1
    if record.fault:  # what was said is not known to the token
        dialogue.close()
        return
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
