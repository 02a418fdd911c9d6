"""How a question is asked of a server, and how its reply becomes token ids.

Three routes, best first. Ids both ways is exact. Where a server returns text, the text is tokenised
again and kept only if nothing contradicts it: it decodes to itself, and the server counted as many
tokens. Where a server takes no ids either, it renders the messages with its own template, and its
count of prompt tokens must be ours.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from data_prep.answering import Question, Reply
from data_prep.chat import ChatFormat, UnrenderableError
from data_prep.conversation import Conversation, is_unicode
from data_prep.endpoints.http import UnavailableError, shown
from data_prep.openai_format import answer_from_openai, to_openai, tools_to_openai

Finish = Literal["stop", "length"]
_FINISH: Mapping[str, Finish] = {"stop": "stop", "length": "length", "tool_calls": "stop"}
_BROKEN_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class Dialect:
    """What every route to one server shares.

    ``model``: its name there; empty until it is known. ``stop_ids`` end an answer. ``is_extended``:
    the server knows the parameters that vLLM and SGLang add to the API (without them its own
    defaults for ``top_k``, ``min_p`` and the repetition penalty apply, and its own idea of where an
    answer ends).
    """

    model: str
    chat: ChatFormat
    stop_ids: frozenset[int]
    is_extended: bool = True


class Route(ABC):
    """One way to ask. :meth:`read` raises :class:`UnavailableError` for a reply that is broken."""

    path: ClassVar[str]
    is_exact: ClassVar[bool]
    summary: ClassVar[str]

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    @abstractmethod
    def body(self, question: Question) -> dict[str, Any]:
        """The request."""

    @abstractmethod
    def _read(self, question: Question, body: Mapping[str, Any], choice: _Choice) -> Reply:
        """The reply, whose prompt is known to be the question's."""

    def read(self, question: Question, body: Mapping[str, Any]) -> Reply:
        """The reply to ``question`` in the server's ``body``."""
        choice = _Choice.parse(body)
        if choice.finish is None:
            reason = f"finish_reason={shown(choice.raw_finish)}"
            return _unusable(question, "refused_by_server", reason)
        if fault := self.prompt_fault(question, body):
            return _unusable(question, "prompt_rendered_differently", fault)
        reply = self._read(question, body, choice)
        if not reply.fault and not reply.output_ids:
            return _unusable(question, "no_answer", "cut off before the first token")
        return reply

    def prompt_fault(self, question: Question, body: Mapping[str, Any]) -> str:
        """How the server's prompt differs from ours, as far as it shows."""
        choices = body.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else {}
        theirs = first.get("prompt_token_ids") or body.get("prompt_token_ids")
        if isinstance(theirs, list):
            return "" if tuple(theirs) == question.prompt_ids else "its prompt has other token ids"
        count = _count(body, "prompt_tokens")
        if count is None or count == len(question.prompt_ids):
            return ""
        return f"it counts {count} prompt tokens, not {len(question.prompt_ids)}"

    def _sampling(self, question: Question) -> dict[str, Any]:
        sampling = question.sampling
        body: dict[str, Any] = {
            "model": self.dialect.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.temperature > 0:
            body["seed"] = sampling.seed & 0x7FFFFFFF
        if self.dialect.is_extended:
            # Spelled out: a server takes what is missing from the model's generation_config.json.
            body |= {
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": 1.0,
                "stop_token_ids": sorted(self.dialect.stop_ids),
            }
        return body


class IdsRoute(Route):
    """``/v1/completions`` with ids both ways."""

    path = "/v1/completions"
    is_exact = True
    summary = "token ids both ways (exact)"

    def body(self, question: Question) -> dict[str, Any]:
        body = self._sampling(question)
        return body | {"prompt": list(question.prompt_ids), "return_token_ids": True}

    def _read(self, question: Question, body: Mapping[str, Any], choice: _Choice) -> Reply:
        if choice.token_ids is None:
            raise _broken("no token_ids in the reply")
        ids, finish = list(choice.token_ids), choice.finish
        assert finish is not None
        count = _count(body, "completion_tokens")
        has_end = bool(ids) and ids[-1] in self.dialect.stop_ids
        if finish == "stop" and not has_end and choice.stop_id is not None:
            ids.append(choice.stop_id)  # left out by this server
        if count is not None and count not in (len(ids), len(choice.token_ids)):
            raise _broken(
                f"{len(choice.token_ids)} token ids, but {count} are said to be generated"
            )
        if len(ids) > question.sampling.max_tokens:
            raise _broken(f"{len(ids)} token ids, but {question.sampling.max_tokens} were allowed")
        if ids and not 0 <= min(ids) <= max(ids) < len(self.dialect.chat.tokenizer):
            return _unusable(question, "malformed_tokens", f"id {max(ids)}")
        # A server that knows fewer ends of a turn goes on; the target in this process would not.
        end = next((i for i, token in enumerate(ids) if token in self.dialect.stop_ids), None)
        if end is not None:
            return Reply(question.key, tuple(ids[: end + 1]), "stop")
        if finish == "stop":
            return _unusable(question, "no_end_of_turn", "stopped without a token that ends a turn")
        return Reply(question.key, tuple(ids), "length")


class TextRoute(Route):
    """``/v1/completions``: ids in, text out."""

    path = "/v1/completions"
    is_exact = False
    summary = "prompt as token ids, answer as text (tokenised again, checked by count)"

    def body(self, question: Question) -> dict[str, Any]:
        body = self._sampling(question) | {"prompt": list(question.prompt_ids)}
        return body | ({"skip_special_tokens": False} if self.dialect.is_extended else {})

    def _read(self, question: Question, body: Mapping[str, Any], choice: _Choice) -> Reply:
        text, stop_id = choice.text, choice.stop_id
        if text is None:
            raise _broken("no text in the reply")
        if not is_unicode(text):
            return _unusable(question, "bad_encoding", "text that is not Unicode")
        if choice.finish == "stop":
            for token in sorted(self.dialect.stop_ids):
                end = self.dialect.chat.decode([token])
                if end and text.endswith(end):
                    text, stop_id = text.removesuffix(end), token
                    break
        return _retokenised(question, body, text, choice.finish, stop_id, self.dialect)


class ChatRoute(Route):
    """``/v1/chat/completions``: the server renders the messages."""

    path = "/v1/chat/completions"
    is_exact = False
    summary = "messages in, text out (rendered by the server, tokenised again, checked by count)"

    def body(self, question: Question) -> dict[str, Any]:
        body = self._sampling(question) | {"messages": to_openai(question.messages)}
        if question.tools:
            body["tools"] = tools_to_openai(question.tools)
        if self.dialect.chat.kwargs and self.dialect.is_extended:
            body["chat_template_kwargs"] = self.dialect.chat.kwargs
        return body

    def _read(self, question: Question, body: Mapping[str, Any], choice: _Choice) -> Reply:
        if choice.message is None:
            raise _broken("no message in the reply")
        try:
            answer = answer_from_openai(choice.message)
        except ValueError as error:
            return _unusable(question, "malformed_message", str(error))
        if choice.finish == "length":
            if answer.tool_calls or answer.reasoning:
                return _unusable(question, "not_reversible", "cut off inside a parsed answer")
            return _retokenised(question, body, answer.content, "length", None, self.dialect)
        conversation = Conversation((*question.messages, answer), question.tools)
        chat = self.dialect.chat
        try:
            prompt = chat.prompt_text(question.messages, question.tools)
            turn = chat.turn_text(conversation, len(question.messages))
            # What a template puts before an answer without thoughts was generated here.
            (encoded,) = chat.encode([(turn.prompt + turn.answer)[len(prompt) :]])
            ids = chat.answer_ids(encoded)
        except UnrenderableError as error:
            return _unusable(question, error.reason, error.detail)
        text = chat.decode(ids[:-1])
        stop_id = ids[-1] if choice.stop_id is None else choice.stop_id
        return _retokenised(question, body, text, "stop", stop_id, self.dialect)


def candidate_routes(dialect: Dialect) -> list[Route]:
    """Every route, the best first: ids, then text; with the extensions, then without."""
    plain = replace(dialect, is_extended=False)
    kinds: tuple[type[Route], ...] = (IdsRoute, TextRoute, ChatRoute)
    extended = [kind(dialect) for kind in kinds]
    return [*extended[:2], TextRoute(plain), extended[2], ChatRoute(plain)]


def _retokenised(
    question: Question,
    body: Mapping[str, Any],
    text: str,
    finish: Finish | None,
    stop_id: int | None,
    dialect: Dialect,
) -> Reply:
    """Ids of an answer that came as text, unless something shows that they were others."""
    chat = dialect.chat
    (ids,) = chat.encode([text])
    fault = ""
    if chat.decode(ids) != text:
        fault = "the text does not decode to itself"
    elif any(token in dialect.stop_ids for token in ids):
        fault = "a token that ends the turn is spelled out inside"
    elif finish == "length" and text.endswith(_BROKEN_CHARACTER):
        fault = "cut off inside a character"
    elif len(ids) > question.sampling.max_tokens:
        fault = f"{len(ids)} tokens where {question.sampling.max_tokens} were allowed"
    elif stop_id is not None and stop_id not in dialect.stop_ids:
        return _unusable(question, "no_end_of_turn", f"stopped by token {stop_id}")
    count = _count(body, "completion_tokens")
    # Servers differ in whether the token that ends the turn is counted.
    allowed = (len(ids), len(ids) + 1) if finish == "stop" else (len(ids),)
    if not fault and count is not None and count not in allowed:
        fault = f"{count} tokens were generated, the text has {len(ids)}"
    if fault:
        reply = _unusable(question, "retokenised_differently", fault)
        return replace(reply, finish_reason=finish or "stop", is_retokenised=True)
    if finish == "stop":
        ids = [*ids, chat.end_of_turn_id if stop_id is None else stop_id]
    return Reply(question.key, tuple(ids), finish or "stop", is_retokenised=True)


def _unusable(question: Question, fault: str, detail: str) -> Reply:
    return Reply(question.key, (), "abort", fault, detail)


@dataclass(frozen=True)
class _Choice:
    """The one choice of a reply. ``finish`` is ``None`` for a reason that ends no answer."""

    raw_finish: str
    token_ids: Sequence[int] | None
    text: str | None
    message: Mapping[str, Any] | None
    stop_id: int | None

    @property
    def finish(self) -> Finish | None:
        return _FINISH.get(self.raw_finish)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> _Choice:
        choices = body.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            words = f": {shown(json.dumps(body['error']))}" if body.get("error") else ""
            raise _broken(f"no choices in the reply{words}")
        if len(choices) > 1:
            raise _broken(f"{len(choices)} choices in the reply, one was asked for")
        raw = choices[0]
        finish = raw.get("finish_reason")
        if not isinstance(finish, str):
            raise _broken(f"finish_reason={finish!r}")
        ids = raw.get("token_ids")
        if ids is not None and not (
            isinstance(ids, list) and all(type(token) is int for token in ids)
        ):
            raise _broken("token_ids is no list of integers")
        text, message = raw.get("text"), raw.get("message")
        stop = raw.get("stop_reason", raw.get("matched_stop"))
        return cls(
            raw_finish=finish,
            token_ids=ids,
            text=text if isinstance(text, str) else None,
            message=message if isinstance(message, dict) else None,
            stop_id=stop if type(stop) is int else None,
        )


def counts_tokens(body: Mapping[str, Any]) -> bool:
    """Whether a reply says how many tokens prompt and answer have."""
    return None not in (_count(body, "prompt_tokens"), _count(body, "completion_tokens"))


def _count(body: Mapping[str, Any], name: str) -> int | None:
    usage = body.get("usage")
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int else None


def _broken(message: str) -> UnavailableError:
    return UnavailableError(message, may_be_the_question=True)
