"""Does a server feed its model the prompts that rows are made of?

Prompts are taken from the sources as `mtp data` would ask them; what the server makes of the same
messages is compared token by token, and a difference is named where it has a usual cause.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from data_prep.chat import ChatFormat, UnrenderableError
from data_prep.config import DataConfig
from data_prep.conversation import Conversation, Message
from data_prep.endpoints.rendering import ServedRendering, ServedTemplate
from data_prep.normalise import normalise
from data_prep.rows import prompt_fault
from data_prep.sources import read_source

_CONTEXT_TOKENS = 6  # shown before the first difference
_SHOWN_TOKENS = 24
_EXCERPT = 40  # characters


@dataclass(frozen=True)
class Prompt:
    """One prompt: messages, and the text and ids they are here."""

    source: str
    record_id: str
    turn: int  # index of the message that would follow
    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    text: str
    ids: tuple[int, ...]

    @property
    def kind(self) -> str:
        """What a template might treat differently."""
        roles = [message.role for message in self.messages]
        traits = {
            "system": "system" in roles,
            "tools": bool(self.tools),
            "tool results": "tool" in roles,
            "thoughts": any(message.reasoning for message in self.messages),
            "several turns": roles.count("user") > 1,
        }
        return ", ".join(name for name, has in traits.items() if has) or "one question"


@dataclass(frozen=True)
class TokenLine:
    """A line of a diff. ``mark``: ``" "`` in both, ``"-"`` only here, ``"+"`` only there."""

    mark: str
    token: int
    text: str


@dataclass(frozen=True)
class Difference:
    """One prompt that the server renders differently. ``position``: the first token that differs
    (−1 where only counts are known). ``cause`` names the kind of difference, ``detail`` shows it.
    """

    prompt: Prompt
    count: int  # of the server's tokens
    position: int
    cause: str
    detail: str
    lines: tuple[TokenLine, ...] = ()


@dataclass(frozen=True)
class RenderReport:
    """What came of a check. ``way``: how the server was asked."""

    model: str
    way: str
    num_prompts: int
    num_tokens: int
    counts_only: bool  # the server gave no ids
    kinds: dict[str, int]
    differences: tuple[Difference, ...]


def prompts_to_check(config: DataConfig, chat: ChatFormat, *, limit: int) -> list[Prompt]:
    """Up to ``limit`` prompts from the sources, of every kind there is, in an order of their own.

    Of each conversation the last prompt: it shows all of its history. Raises ``ValueError`` when
    the sources hold none.
    """
    records = (
        record for source in config.sources for record in read_source(source, format=config.format)
    )
    conversations = normalise(
        records, max_turns=config.max_turns, max_conversations=config.max_conversations
    ).conversations
    by_kind: dict[str, list[Prompt]] = {}
    for conversation in conversations:
        prompt = _last_prompt(conversation, config, chat)
        if prompt is None:
            continue
        found = by_kind.setdefault(prompt.kind, [])
        if len(found) < limit:
            found.append(prompt)
        if sum(map(len, by_kind.values())) >= 50 * limit:
            break
    mixed = [prompt for group in zip_longest(*by_kind.values()) for prompt in group if prompt]
    if not mixed:
        raise ValueError(
            f"data.sources={list(config.sources)}: no prompt in it that the chat template renders "
            f"within data.max_tokens={config.max_tokens}"
        )
    return mixed[:limit]


async def check_rendering(
    prompts: Sequence[Prompt], template: ServedTemplate, chat: ChatFormat
) -> RenderReport:
    """Have the server render every prompt. Raises what ``template`` raises."""
    differences = []
    kinds: dict[str, int] = {}
    counts_only = False
    for prompt in prompts:
        kinds[prompt.kind] = kinds.get(prompt.kind, 0) + 1
        served = await template.render(prompt.messages, prompt.tools)
        counts_only |= served.ids is None
        difference = compare(prompt, served, chat)
        if difference is not None:
            differences.append(difference)
    return RenderReport(
        model=template.model,
        way=template.way,
        num_prompts=len(prompts),
        num_tokens=sum(len(prompt.ids) for prompt in prompts),
        counts_only=counts_only,
        kinds=kinds,
        differences=tuple(differences),
    )


def compare(prompt: Prompt, served: ServedRendering, chat: ChatFormat) -> Difference | None:
    """How the server's rendering differs; ``None`` where it does not (as far as it is known)."""
    if served.ids is None:
        if served.count == len(prompt.ids):
            return None
        detail = f"{served.count} tokens there, {len(prompt.ids)} here"
        return Difference(prompt, served.count, -1, "another number of tokens", detail)
    if served.ids == prompt.ids:
        return None
    pairs = zip_longest(prompt.ids, served.ids)
    position = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
    cause, detail = find_cause(prompt, served.ids, chat)
    lines = tuple(_diff(prompt.ids, served.ids, position, chat))
    return Difference(prompt, served.count, position, cause, detail, lines)


def find_cause(prompt: Prompt, theirs: tuple[int, ...], chat: ChatFormat) -> tuple[str, str]:
    """The kind of difference, and in words what it is here."""
    ours = prompt.ids
    if theirs[1:] == ours:
        name = repr(chat.decode(theirs[:1]))
        if theirs[0] == ours[0]:
            why = "its tokenizer adds what its template writes already"
            return "first token twice", f"the server puts {name} in front twice: {why}"
        return "first token added", f"the server puts {name} in front, the template here does not"
    if ours[1:] == theirs:
        return "first token missing", f"the server leaves out {chat.decode(ours[:1])!r} in front"
    try:
        history = chat.history_text(prompt.messages, prompt.tools)
    except UnrenderableError:  # a template that wants to be asked for an answer
        history = ""
    (without,) = chat.encode([history])
    if theirs == tuple(without):
        missing = prompt.text.removeprefix(history)
        return "no generation prompt", f"the server leaves out the generation prompt {missing!r}"
    if theirs[: len(ours)] == ours:
        rest = _short(chat.decode(theirs[len(ours) :]))
        detail = f"the server goes on with {rest} (a switch in data.chat_template_kwargs?)"
        return "more after the generation prompt", detail
    if ours[: len(theirs)] == theirs:
        rest = _short(chat.decode(ours[len(theirs) :]))
        return "end missing", f"the server stops early and lacks {rest}"
    text, other = prompt.text, chat.decode(theirs)
    if text == other:
        why = "the server's tokenizer is another, or it normalises"
        return "other tokens for the same text", f"the same text in other tokens: {why}"
    start = next(i for i, (a, b) in enumerate(zip_longest(text, other)) if a != b)
    here, there = _short(text[start:]), _short(other[start:])
    detail = f"from character {start} on the text is {here} here and {there} there"
    return "another chat template", detail


def _last_prompt(conversation: Conversation, config: DataConfig, chat: ChatFormat) -> Prompt | None:
    messages = conversation.messages
    ends = [i for i, message in enumerate(messages) if message.role in ("user", "tool")]
    # A result may be followed by another: only the last of them is answered.
    for end in reversed(ends):
        if end + 1 < len(messages) and messages[end + 1].role != "assistant":
            continue
        history = messages[: end + 1]
        try:
            text = chat.prompt_text(history, conversation.tools)
        except UnrenderableError:
            continue
        (ids,) = chat.encode([text])
        if not prompt_fault(len(ids), config):
            return Prompt(
                conversation.source,
                conversation.record_id,
                end + 1,
                history,
                conversation.tools,
                text,
                tuple(ids),
            )
    return None


def _diff(
    ours: Sequence[int], theirs: Sequence[int], position: int, chat: ChatFormat
) -> Iterator[TokenLine]:
    """The tokens around the first difference, as a diff."""
    start = max(0, position - _CONTEXT_TOKENS)
    ours, theirs = ours[start : start + 200], theirs[start : start + 200]
    matcher = difflib.SequenceMatcher(a=ours, b=theirs, autojunk=False)
    lines: list[TokenLine] = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            lines += [TokenLine(" ", token, chat.decode([token])) for token in ours[a:b]]
            continue
        lines += [TokenLine("-", token, chat.decode([token])) for token in ours[a:b]]
        lines += [TokenLine("+", token, chat.decode([token])) for token in theirs[c:d]]
    yield from lines[:_SHOWN_TOKENS]


def _short(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…")
