"""How a server renders messages: asked of the server itself, by the best of three ways.

``/tokenize`` with messages (vLLM, recent SGLang); the prompt ids of a chat completion of one token;
or only the number of prompt tokens that such a completion counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.conversation import Message
from data_prep.endpoints.http import RefusedError, Server
from data_prep.openai_format import to_openai, tools_to_openai


@dataclass(frozen=True)
class ServedRendering:
    """What the server makes of a prompt. ``ids`` is ``None`` where it only counts."""

    count: int
    ids: tuple[int, ...] | None


class ServedTemplate:
    """The chat template of the server's own, for one of its models.

    ``kwargs`` go to its template with every request. Methods raise ``ValueError`` when it says
    nothing about its prompts, ``UnavailableError`` and ``RefusedError`` as the server does.
    """

    def __init__(self, server: Server, *, model: str, kwargs: Mapping[str, Any]) -> None:
        self._server = server
        self.model = model
        self._kwargs = dict(kwargs)
        self.way = ""  # by which the last prompt was found out

    async def render(self, messages: Sequence[Message], tools: Sequence[str]) -> ServedRendering:
        """The prompt after ``messages``, with the generation prompt."""
        body: dict[str, Any] = {"model": self.model, "messages": to_openai(messages)}
        if tools:
            body["tools"] = tools_to_openai(tools)
        if self._kwargs:
            body["chat_template_kwargs"] = self._kwargs
        if self.way in ("", "/tokenize"):
            ids = await self._tokenize(body)
            if ids is not None:
                self.way = "/tokenize"
                return ServedRendering(len(ids), ids)
        return await self._complete(body)

    async def _tokenize(self, body: Mapping[str, Any]) -> tuple[int, ...] | None:
        try:
            reply = await self._server.post(
                "/tokenize", dict(body) | {"add_generation_prompt": True}
            )
        except RefusedError:
            if self.way:  # it did so before: this one prompt is what it refuses
                raise
            return None
        return _ids(reply.get("tokens"))

    async def _complete(self, body: Mapping[str, Any]) -> ServedRendering:
        request = dict(body) | {"max_tokens": 1, "temperature": 0.0}
        path = "/v1/chat/completions"
        try:
            reply = await self._server.post(path, request | {"return_token_ids": True})
        except RefusedError:
            reply = await self._server.post(path, request)
        choices = reply.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else {}
        ids = _ids(reply.get("prompt_token_ids"))
        if ids is None and isinstance(first, dict):
            ids = _ids(first.get("prompt_token_ids"))
        if ids is not None:
            self.way = f"{path}, prompt_token_ids"
            return ServedRendering(len(ids), ids)
        usage = reply.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if type(count) is not int:
            raise ValueError(
                f"{self._server.url}: neither /tokenize with messages nor prompt_token_ids nor "
                "usage.prompt_tokens: this server says nothing about its prompts"
            )
        self.way = f"{path}, count of prompt tokens only"
        return ServedRendering(count, None)


def _ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not value:
        return None
    return tuple(value) if all(type(t) is int and 0 <= t < 2**31 for t in value) else None
