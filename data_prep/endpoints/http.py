"""Requests to one server, and what their failures mean.

A failure is either the server's for now (:class:`UnavailableError`: try again, here or elsewhere)
or this request's for good (:class:`RefusedError`). The key is sent and never shown.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import httpx

from data_prep.addresses import server_root

_CONNECT_TIMEOUT_S = 10.0
_MAX_SHOWN = 200  # characters of a server's own words
_REFUSALS = frozenset({400, 401, 403, 404, 405, 413, 422, 501})


class UnavailableError(Exception):
    """No answer now. ``retry_after_s``: how long the server asked to be left alone.

    ``may_be_the_question``: the server was reached and failed on this very request.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        may_be_the_question: bool = False,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.may_be_the_question = may_be_the_question


class RefusedError(Exception):
    """The server understood the request and will never serve it, or not from this user."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """One server's address, key and connections. ``url`` with or without a last ``/v1``.

    The server's own words in errors are shortened, and the key is left out of them.

    Use from one event loop only; :meth:`close` when done.
    """

    def __init__(
        self, url: str, *, api_key: str = "", timeout_s: float, max_connections: int = 4
    ) -> None:
        self.url = url
        self._base = server_root(url)
        self._api_key = api_key
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S)),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=None),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The JSON object at ``path``, whole within ``timeout_s`` (the server's own where it is
        ``None``). Raises :class:`UnavailableError`, :class:`RefusedError`.
        """
        return self._parse(path, await self._send("GET", path, None, timeout_s))

    async def get_text(self, path: str, *, timeout_s: float | None = None) -> str:
        """As :meth:`get`, whatever the text is."""
        return (await self._send("GET", path, None, timeout_s)).text

    async def post(
        self, path: str, body: dict[str, Any], *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """As :meth:`get`, for the answer to ``body``."""
        return self._parse(path, await self._send("POST", path, body, timeout_s))

    async def stream(
        self, path: str, body: dict[str, Any], *, timeout_s: float | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, each as it arrives, until the server
        says ``[DONE]`` or closes. All of it within ``timeout_s``. Raises as :meth:`get` does, and
        where the server puts an error into the stream.
        """
        try:
            async with (
                asyncio.timeout(timeout_s or self._timeout_s),
                self._client.stream("POST", self._base + path, json=body) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    self._refuse(path, response)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or not data:
                        continue
                    if data == "[DONE]":
                        return
                    event = self._parse_event(path, data)
                    yield event
        except (httpx.TimeoutException, TimeoutError) as error:
            raise _timed_out(path, error) from error
        except httpx.HTTPError as error:
            raise self._broken(path, error) from error

    async def _send(
        self, method: str, where: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> httpx.Response:
        try:
            # The client's own timeout counts anew with every byte that arrives.
            async with asyncio.timeout(timeout_s or self._timeout_s):
                response = await self._client.request(method, self._base + where, json=body)
        except (httpx.TimeoutException, TimeoutError) as error:
            raise _timed_out(where, error) from error
        except httpx.HTTPError as error:
            raise self._broken(where, error) from error
        if response.status_code != 200:
            self._refuse(where, response)
        return response

    def _broken(self, where: str, error: httpx.HTTPError) -> UnavailableError:
        return UnavailableError(
            f"{where}: {type(error).__name__}: {self._shown(str(error))}",
            may_be_the_question=not isinstance(error, httpx.ConnectError),
        )

    def _refuse(self, where: str, response: httpx.Response) -> NoReturn:
        """Raise what the status of a reply that has been read means."""
        message = f"{where}: HTTP {response.status_code}: {self._shown(_words(response))}"
        if response.status_code in _REFUSALS:
            raise RefusedError(message, status=response.status_code)
        raise UnavailableError(
            message,
            retry_after_s=_retry_after(response.headers.get("Retry-After", "")),
            may_be_the_question=response.status_code >= 500 and response.status_code != 503,
        )

    def _parse_event(self, where: str, data: str) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UnavailableError(
                f"{where}: {len(data)} characters of the stream are no JSON object",
                may_be_the_question=True,
            )
        if "error" in value:
            raise UnavailableError(
                f"{where}: {self._shown(_said(value))}", may_be_the_question=True
            )
        return value

    def _parse(self, where: str, response: httpx.Response) -> dict[str, Any]:
        try:
            value = json.loads(response.content)
        except ValueError:
            # Half an answer is somebody's text, which has no place in a log.
            text = response.text.lstrip()
            words = f"{len(text)} characters, broken" if text[:1] in "{[" else self._shown(text)
            raise UnavailableError(
                f"{where}: the answer is no JSON: {words}", may_be_the_question=True
            ) from None
        if not isinstance(value, dict):
            raise UnavailableError(
                f"{where}: expected a JSON object, got {type(value).__name__}",
                may_be_the_question=True,
            )
        return value

    def _shown(self, text: str) -> str:
        """A server's words, without the key should it echo it."""
        return shown(text.replace(self._api_key, "***") if self._api_key else text)


def _timed_out(where: str, error: Exception) -> UnavailableError:
    is_connecting = isinstance(error, httpx.ConnectTimeout)
    kind = "no connection" if is_connecting else "no answer"
    return UnavailableError(f"{where}: {kind} in time", may_be_the_question=not is_connecting)


def shown(text: str) -> str:
    """A server's words, shortened to one line of what can be printed and written."""
    text = " ".join(text.split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _words(response: httpx.Response) -> str:
    """What the server says is wrong: OpenAI's, FastAPI's or any other form."""
    try:
        value = json.loads(response.content)
    except ValueError:
        return response.text
    return _said(value)


def _said(value: Any) -> str:
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return value if isinstance(value, str) else json.dumps(value)


def _retry_after(value: str) -> float | None:
    """Seconds, from either form of the header; ``None`` where it is absent or unreadable."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    now = datetime.datetime.now(datetime.UTC)
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or datetime.UTC) - now).total_seconds())
