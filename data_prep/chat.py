"""Renders conversations with a chat template into exactly what a server and its model would see.

For each answer: the prompt is ``render(messages before it, generation prompt)`` tokenised in one
piece, as a server does; the answer is what the rendering adds, tokenised by itself, up to and
including the token that ends the turn. The mask covers the answer and nothing else. Only the
tokenizer's template (or one the user names) decides on text; nothing about a model family is
written here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from data_prep.config import DataConfig
from data_prep.conversation import Conversation, Message, ToolCall
from data_prep.tool_calls import CallSyntax, common_prefix, probe_call_syntax

_THOUGHT_OPEN, _THOUGHT_CLOSE = "<think>", "</think>"


class UnrenderableError(Exception):
    """One turn cannot be rendered; ``reason`` is a reject reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class TurnText:
    """Text of one answer. ``answer`` may run on past the end of the turn (a trailing newline)."""

    prompt: str
    answer: str


class ChatFormat:
    """A tokenizer with a chat template: renders, tokenises, and knows how a turn ends.

    ``template``: Jinja text, or empty for the tokenizer's own. Raises ``ValueError`` when there is
    none or when it does not render a plain question and answer.
    """

    def __init__(
        self, tokenizer: Any, *, template: str = "", kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if not template and not tokenizer.chat_template:
            raise ValueError(
                "data.chat_template is empty and the tokenizer has no chat template of its own: "
                "name a Jinja file"
            )
        self.tokenizer = tokenizer
        self._template = template or None
        self.kwargs = dict(kwargs or {})
        probe = self._probe_answer("A")
        other = self._probe_answer("B")
        if "A" not in probe or "B" not in other:
            raise ValueError("data.chat_template: the template does not render the answer")
        # What the template writes before any answer that has no thoughts (an empty thought block)
        # is not the assistant's: it belongs to the prompt.
        self.injected = common_prefix(probe, other)
        # The token after a plain answer, and all that end an answer of any kind.
        self.end_of_turn_id, self.end_of_turn_ids = self._find_end_of_turn(probe)

    @cached_property
    def template_hash(self) -> str:
        """:func:`hash_template` of this format."""
        return hash_template(self.tokenizer, template=self._template or "", kwargs=self.kwargs)

    @cached_property
    def call_syntax(self) -> CallSyntax | None:
        """How this template writes tool calls; ``None`` when it drops them."""
        return probe_call_syntax(self._render_raw, UnrenderableError)

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the tool definitions appear in the prompt at all."""
        tool = {
            "type": "function",
            "function": {
                "name": "probe_tool",
                "description": "Probe.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
        try:
            text = self._render_raw([{"role": "user", "content": "Q"}], [tool], True)
        except UnrenderableError:
            return False
        return "probe_tool" in text

    @cached_property
    def renders_tool_results(self) -> bool:
        """Whether the result of a call appears in the prompt."""
        if self.call_syntax is None:
            return False
        call = Message("assistant", tool_calls=(ToolCall("probe", "{}", "call_0"),))
        result = Message("tool", "probe_result", tool_call_id="call_0")
        try:
            text = self.prompt_text((Message("user", "Q"), call, result), ())
        except UnrenderableError:
            return False
        return "probe_result" in text

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[str]) -> str:
        """What a server feeds the model after ``messages``. Raises ``UnrenderableError``."""
        return self._render(messages, tools, add_generation_prompt=True)

    def history_text(self, messages: Sequence[Message], tools: Sequence[str]) -> str:
        """``messages`` without the generation prompt. Raises ``UnrenderableError``."""
        return self._render(messages, tools, add_generation_prompt=False)

    def turn_text(self, conversation: Conversation, turn: int) -> TurnText:
        """Prompt and answer of the assistant message at index ``turn``."""
        messages, tools = conversation.messages, conversation.tools
        message = messages[turn]
        assert message.role == "assistant", f"message {turn} is a {message.role} message"
        self._check_tools(messages[: turn + 1])
        prompt = self.prompt_text(messages[:turn], tools)
        whole = self._render(messages[: turn + 1], tools, add_generation_prompt=False)
        if whole.startswith(prompt):
            text = TurnText(prompt, whole[len(prompt) :])
        else:
            text = _complete_opened_thought(prompt, whole, message)
        if (
            self.injected
            and not message.reasoning
            and text.answer.startswith(self.injected)
            and not message.content.lstrip().startswith(self.injected.strip())
        ):
            cut = len(self.injected)
            text = TurnText(text.prompt + self.injected, text.answer[cut:])
        _check_answer(message, text.answer)
        return text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids per text; special tokens only where the text spells them, as servers do."""
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens spelled out, nothing tidied up."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def answer_ids(self, encoded_answer: Sequence[int]) -> list[int]:
        """Cut an encoded :attr:`TurnText.answer` after the token that ends the turn.

        Raises ``UnrenderableError`` when no such token follows, or when one occurs earlier (the
        model would have stopped there).
        """
        ends = [i for i, token in enumerate(encoded_answer) if token in self.end_of_turn_ids]
        if not ends:
            raise UnrenderableError("no_end_of_turn", "the template does not end this turn")
        if len(ends) > 1:
            raise UnrenderableError("end_of_turn_inside", f"after {ends[0] + 1} answer tokens")
        return list(encoded_answer[: ends[0] + 1])

    def _check_tools(self, messages: Sequence[Message]) -> None:
        if any(message.tool_calls for message in messages) and self.call_syntax is None:
            raise UnrenderableError("template_drops_tool_calls")
        if any(message.role == "tool" for message in messages) and not self.renders_tool_results:
            raise UnrenderableError("template_drops_tool_results")

    def _render(
        self, messages: Sequence[Message], tools: Sequence[str], *, add_generation_prompt: bool
    ) -> str:
        raw = [self._message_dict(message) for message in messages]
        definitions = [json.loads(tool) for tool in tools] or None
        return self._render_raw(raw, definitions, add_generation_prompt)

    def _render_raw(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool
    ) -> str:
        try:
            # As apply_chat_template does, except that a null content stays null: it drops the key,
            # and templates that test for null then fail.
            result = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(self._template, tools),
                add_generation_prompt=add_generation_prompt,
                **{**self.tokenizer.special_tokens_map, **self.kwargs},
            )
        # Templates raise on purpose (raise_exception) and by operating on a missing value.
        except (TemplateError, TypeError) as error:
            raise UnrenderableError("template_error", str(error)) from error
        text: str = result[0][0]
        return text

    def _message_dict(self, message: Message) -> dict[str, Any]:
        raw: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            raw["reasoning_content"] = message.reasoning
        if message.tool_calls and self.call_syntax is not None:
            raw.update(self.call_syntax.message_fields(message))
        if message.tool_call_id:
            raw["tool_call_id"] = message.tool_call_id
        if message.name:
            raw["name"] = message.name
        return raw

    def _probe_answer(self, answer: str) -> str:
        question = {"role": "user", "content": "Q"}
        try:
            prompt = self._render_raw([question], None, True)
            messages = [question, {"role": "assistant", "content": answer}]
            whole = self._render_raw(messages, None, False)
        except UnrenderableError as error:
            raise ValueError(f"data.chat_template fails on a plain question: {error}") from error
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        # The prompt opens a thought that the history drops.
        return whole[len(common_prefix(prompt, whole)) :]

    def _find_end_of_turn(self, probe: str) -> tuple[int, frozenset[int]]:
        """The special token after a plain answer, the end of text, and Llama's "message ended"."""
        special = {
            token: text.content
            for token, text in self.tokenizer.added_tokens_decoder.items()
            if text.special
        }
        (ids,) = self.encode([probe])
        after = next((token for token in ids if token in special), None)
        ends = {after, self.tokenizer.eos_token_id} - {None}
        # A call that expects a result ends with <|eom_id|> in Llama templates, not with <|eot_id|>.
        ends |= {token for token, text in special.items() if text == "<|eom_id|>"}
        if after is None and self.tokenizer.eos_token_id not in ids:
            raise ValueError(
                "data.chat_template ends an answer with no special token: a model trained on it "
                f"would never stop (an answer is rendered as {probe!r})"
            )
        usual = after if after is not None else self.tokenizer.eos_token_id
        return usual, frozenset(token for token in ends if token is not None)


def hash_template(tokenizer: Any, *, template: str, kwargs: Mapping[str, Any]) -> str:
    """SHA-256 of ``template`` (or of all of the tokenizer's, where it is empty) and its arguments.

    A tokenizer without a template has a hash as well.
    """
    content = [template or tokenizer.chat_template, dict(kwargs)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_chat_format(
    tokenizer: Any, *, template_path: str, kwargs: Sequence[tuple[str, str]]
) -> ChatFormat:
    """The format of ``tokenizer`` under ``data.chat_template`` and its ``_kwargs``."""
    template, arguments = read_template(template_path, kwargs)
    return ChatFormat(tokenizer, template=template, kwargs=arguments)


def configured_chat_format(tokenizer: Any, config: DataConfig) -> ChatFormat:
    """:func:`load_chat_format` with the template that ``config`` names."""
    return load_chat_format(
        tokenizer, template_path=config.chat_template, kwargs=config.chat_template_kwargs
    )


def read_template(
    template_path: str, kwargs: Sequence[tuple[str, str]]
) -> tuple[str, dict[str, Any]]:
    """Text of ``data.chat_template`` (empty: the tokenizer's own) and values of its ``_kwargs``."""
    template = ""
    if template_path:
        path = Path(template_path).expanduser()
        if not path.is_file():
            raise ValueError(f"data.chat_template={template_path!r}: no such file")
        template = path.read_text(encoding="utf-8")
    return template, {key: _parse_value(value) for key, value in kwargs}


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _complete_opened_thought(prompt: str, whole: str, message: Message) -> TurnText:
    """Where the generation prompt opens a thought that the history leaves out, put it back."""
    shared = len(common_prefix(prompt, whole))
    # The two part inside a tag they may share the start of ("<" of "<think>").
    opened = prompt.rfind(_THOUGHT_OPEN)
    shared = min(shared, opened) if opened >= 0 else shared
    if prompt[shared:].strip() != _THOUGHT_OPEN:
        raise UnrenderableError(
            "prompt_not_a_prefix", f"the rendered history departs from the prompt at {shared}"
        )
    if not message.reasoning:
        raise UnrenderableError("no_thoughts", "the prompt opens a thought, the record has none")
    thought = f"{message.reasoning.strip()}\n{_THOUGHT_CLOSE}\n\n"
    return TurnText(prompt, thought + whole[shared:])


def _check_answer(message: Message, answer: str) -> None:
    """What the assistant thought, said and called must be in the text the mask will cover."""
    if message.reasoning.strip() not in answer:
        raise UnrenderableError("template_drops_thoughts")
    for piece in message.content.split(_THOUGHT_CLOSE):
        if piece.strip().removeprefix(_THOUGHT_OPEN).strip() not in answer:
            raise UnrenderableError("template_changes_answer")
    for call in message.tool_calls:
        if call.name not in answer:
            raise UnrenderableError("template_drops_tool_calls")
