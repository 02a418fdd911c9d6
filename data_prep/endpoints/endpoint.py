"""One server over the length of a run: found out about, asked, rested, set aside.

Before the first question, and again after every rest, the endpoint is *contacted*: which model does
it serve, and by which route does a short question come back? Only then are questions sent. Failures
in a row make the rests longer; more than ``retries`` of them, or a contact that cannot succeed, set
the endpoint aside for the rest of the run.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, replace

from data_prep.answering import Question, Reply
from data_prep.conversation import Message
from data_prep.endpoints.http import RefusedError, Server, UnavailableError, shown
from data_prep.endpoints.routes import Dialect, Route, candidate_routes, counts_tokens
from runtime.request import SamplingParams

logger = logging.getLogger(__name__)

_PROBE = Message("user", "Hello")
_PROBE_TOKENS = 2
_PROBE_TIMEOUT_S = 60.0
_LONGEST_REST_S = 3600.0


@dataclass(frozen=True)
class Patience:
    """How long to wait and how often to try again. Times in seconds.

    The n-th rest in a row takes about ``backoff_s * 2^(n-1)``, at most ``max_backoff_s``, with
    jitter; a server's Retry-After prolongs it, up to an hour: who asks for more is set aside.
    """

    retries: int
    timeout_s: float
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0


class HopelessError(Exception):
    """Trying this endpoint again cannot help."""


@dataclass
class EndpointCounts:
    """What an endpoint did, for the run's log."""

    answered: int = 0
    tokens: int = 0
    failures: int = 0  # requests that brought no answer
    rests: int = 0


class Endpoint:
    """One server and what is known of it. All methods belong to one event loop.

    ``dialect.model`` empty takes the only model that is served.
    """

    def __init__(self, server: Server, dialect: Dialect, patience: Patience) -> None:
        self.url = server.url
        self.server = server
        self.counts = EndpointCounts()
        self.set_aside_because = ""
        self.counts_tokens = False  # of prompt and answer, when it was last contacted
        self._dialect = dialect
        self._patience = patience
        self._route: Route | None = None
        self._answers_as = ""  # what its replies call the model
        self._is_resting = True  # until contacted
        self._rest_s = 0.0
        self._epoch = 0  # of the last contact: late failures of an earlier one do not count twice
        self._failures_in_a_row = 0
        self._lock = asyncio.Lock()

    @property
    def is_usable(self) -> bool:
        return not self.set_aside_because

    @property
    def model(self) -> str:
        """Its model's name as reported; empty before the first contact."""
        return self._dialect.model if self._route is not None else ""

    @property
    def is_resting(self) -> bool:
        return self._is_resting

    @property
    def route(self) -> Route | None:
        return self._route

    async def ready(self) -> bool:
        """Wait until questions may be sent; false once the endpoint is set aside."""
        async with self._lock:
            while self._is_resting and self.is_usable:
                await asyncio.sleep(self._rest_s)
                await self.contact()
        return self.is_usable

    async def contact(self) -> None:
        """Try once to find out model and route; a failure starts the next rest."""
        try:
            await self._contact()
        except UnavailableError as error:
            self._fail(error)
        except HopelessError as error:
            self.set_aside(str(error))

    def set_aside(self, reason: str) -> None:
        if self.is_usable:
            self.set_aside_because = reason
            logger.warning("%s: set aside: %s", self.url, reason)

    async def ask(self, question: Question) -> Reply:
        """Its reply. Raises :class:`UnavailableError`; a refusal is a reply with a fault."""
        route, epoch = self._route, self._epoch
        assert route is not None, "contacted before it is asked"
        try:
            body = await self.server.post(route.path, route.body(question))
            self._check_model(body)
            reply = route.read(question, body)
        except UnavailableError as error:
            self.counts.failures += 1
            if epoch == self._epoch and not self._is_resting:
                self._fail(error)
            raise
        except RefusedError as error:
            if error.status in (401, 403, 404):  # the key or the model is gone
                self.counts.failures += 1
                # Some forbid a question for what it says.
                gone = UnavailableError(str(error), may_be_the_question=error.status == 403)
                if epoch == self._epoch and not self._is_resting:
                    self._fail(gone)
                raise gone from error
            return Reply(question.key, (), "abort", "refused_by_server", str(error))
        self._failures_in_a_row = 0
        self.counts.answered += 1
        self.counts.tokens += len(reply.output_ids)
        return reply

    def _fail(self, error: UnavailableError) -> None:
        patience = self._patience
        self._failures_in_a_row += 1
        if self._failures_in_a_row > patience.retries:
            self.set_aside(f"{self._failures_in_a_row} failures in a row; the last: {error}")
            return
        if (error.retry_after_s or 0.0) > _LONGEST_REST_S:
            self.set_aside(f"{error}; to be asked again in {error.retry_after_s:.0f} s")
            return
        backoff = patience.backoff_s * 2.0 ** (self._failures_in_a_row - 1)
        rest = min(backoff, patience.max_backoff_s) * random.uniform(0.5, 1.5)
        self._rest_s = max(rest, error.retry_after_s or 0.0)
        self._is_resting = True
        self.counts.rests += 1
        logger.warning("%s: %s; trying again in %.1f s", self.url, error, self._rest_s)

    async def _contact(self) -> None:
        timeout_s = min(_PROBE_TIMEOUT_S, self._patience.timeout_s)
        model = await find_model(
            self.server, self._dialect.model, field="data.regenerate.model", timeout_s=timeout_s
        )
        dialect = replace(self._dialect, model=model)
        question = probe_question(dialect)
        refusals = []
        for route in candidate_routes(dialect):
            try:
                body = await self.server.post(route.path, route.body(question), timeout_s=timeout_s)
            except RefusedError as error:
                refusals.append(str(error))
                continue
            try:
                reply = route.read(question, body)
            except UnavailableError as error:  # nothing of what this route needs is in the reply
                refusals.append(str(error))
                continue
            if reply.fault == "prompt_rendered_differently":
                raise HopelessError(
                    f"a plain question has another prompt there ({reply.detail}): another chat "
                    "template or tokenizer; `mtp data check-render` shows the difference"
                )
            self._answers_as = str(body.get("model", ""))
            self.counts_tokens = counts_tokens(body)
            self._settle_on(route, dialect)
            return
        raise HopelessError(f"no way to ask works: {'; '.join(dict.fromkeys(refusals))}")

    def _settle_on(self, route: Route, dialect: Dialect) -> None:
        is_new = self._route is None or type(route) is not type(self._route)
        self._route, self._dialect = route, replace(self._dialect, model=dialect.model)
        self._is_resting = False
        self._epoch += 1
        if is_new:
            logger.info("%s: model %s, %s", self.url, dialect.model, route.summary)

    def _check_model(self, body: dict[str, object]) -> None:
        """A server that was restarted with another model must not go unnoticed."""
        model = str(body.get("model", ""))
        if model != self._answers_as:
            raise UnavailableError(
                f"answers come from model {shown(model)} now, not {self._answers_as}"
            )


async def find_model(
    server: Server, wanted: str, *, field: str, timeout_s: float | None = None
) -> str:
    """``wanted`` if the server has it; where that is empty, its only model.

    Raises :class:`HopelessError` that asks for ``field``, and what requests raise.
    """
    try:
        body = await server.get("/v1/models", timeout_s=timeout_s)
    except RefusedError as error:
        if wanted:
            return wanted
        if error.status in (401, 403):
            raise HopelessError(str(error)) from None
        raise HopelessError(f"it lists no models; set {field} ({error})") from None
    listed = body.get("data")
    entries = listed if isinstance(listed, list) else []
    models = [
        entry["id"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]
    names = shown(", ".join(models))
    if wanted and wanted not in models:
        raise HopelessError(f"it serves {names or 'no model'}, not {wanted}")
    if not wanted and len(models) != 1:
        raise HopelessError(f"set {field} to one of the models it serves: {names or 'none'}")
    return wanted or models[0]


def probe_question(dialect: Dialect) -> Question:
    """A short greedy question, to find out how a server answers."""
    chat = dialect.chat
    (ids,) = chat.encode([chat.prompt_text([_PROBE], ())])
    sampling = SamplingParams(max_tokens=_PROBE_TOKENS, stop_token_ids=tuple(dialect.stop_ids))
    return Question("probe", tuple(ids), sampling, (_PROBE,))
