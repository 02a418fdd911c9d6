"""Several endpoints as one engine: questions go to whoever has room, failed ones go on to others.

An event loop in a thread of its own runs ``concurrency`` workers per endpoint. Memory is bounded by
what the caller keeps in flight (:attr:`EndpointPool.capacity`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from data_prep.answering import Question, Reply
from data_prep.endpoints.endpoint import Endpoint, Patience
from data_prep.endpoints.http import Server, UnavailableError
from data_prep.endpoints.routes import Dialect

logger = logging.getLogger(__name__)

_GRACE_S = 5.0  # for the other endpoints, once one is known


class EndpointsDownError(ValueError):
    """Nobody is left who could answer."""


@dataclass(order=True)
class _Job:
    number: int  # of the question: what was asked first is tried again first
    question: Question = field(compare=False)
    failures: int = field(compare=False, default=0)


class EndpointPool:
    """An :class:`data_prep.answering.AnswerEngine`; a context manager that owns the connections.

    On entering, every endpoint is contacted. Raises ``ValueError`` when none can be used, or when
    two serve models of different names.
    """

    def __init__(
        self,
        urls: Sequence[str],
        dialect: Dialect,
        *,
        concurrency: int,
        patience: Patience,
        api_key: str = "",
    ) -> None:
        self._urls = tuple(urls)
        self._dialect = dialect
        self._concurrency = concurrency
        self._patience = patience
        self._api_key = api_key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="endpoints", daemon=True
        )
        self._done: queue.SimpleQueue[Reply | BaseException] = queue.SimpleQueue()
        self._num_submitted = 0
        self._jobs: asyncio.PriorityQueue[_Job] = asyncio.PriorityQueue()
        self._workers: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive
        self._asking: set[asyncio.Task[Reply]] = set()
        self._model = ""  # whose answers these are, from the first contact to the end
        self.endpoints: tuple[Endpoint, ...] = ()

    # -- AnswerEngine -----------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        usable = sum(endpoint.is_usable for endpoint in self.endpoints)
        return max(1, usable) * self._concurrency

    @property
    def identity(self) -> Mapping[str, str]:
        return {"model": self._model}

    @property
    def notes(self) -> Sequence[str]:
        """Complete once the answers are there."""
        notes = [
            f"the answers come from a server's model {self._model}; nothing here can prove that "
            "its weights are the target's"
        ]
        for endpoint in self.endpoints:
            route = endpoint.route
            if route is not None and not route.is_exact:
                notes.append(f"{endpoint.url}: {route.summary}")
                if not endpoint.counts_tokens:
                    notes.append(f"{endpoint.url}: it counts no tokens, so these were not checked")
            if route is not None and not route.dialect.is_extended:
                notes.append(
                    f"{endpoint.url}: top_k, repetition penalty and the tokens that end an answer "
                    "are the server's own; it does not take ours"
                )
            if endpoint.set_aside_because:
                notes.append(f"{endpoint.url} was set aside: {endpoint.set_aside_because}")
        return notes

    def submit(self, question: Question, *, captures_hidden: bool = False) -> None:
        assert not captures_hidden, "refused by the configuration"
        job = _Job(self._num_submitted, question)
        self._num_submitted += 1
        self._loop.call_soon_threadsafe(self._jobs.put_nowait, job)

    def collect(self) -> list[Reply]:
        replies: list[Reply] = []
        item = self._done.get()
        while True:
            if isinstance(item, BaseException):
                if replies:  # those first
                    self._done.put(item)
                    return replies
                raise item
            replies.append(item)
            try:
                item = self._done.get_nowait()
            except queue.Empty:
                return replies

    def cancel(self) -> None:
        async def cancel() -> None:
            self._cancel()

        self._run(cancel())

    # -- life -------------------------------------------------------------------------------------

    def __enter__(self) -> EndpointPool:
        self._thread.start()
        is_open = False
        try:
            self._run(self._open())
            is_open = True
        finally:
            if not is_open:
                self._close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    async def _open(self) -> None:
        self.endpoints = tuple(
            Endpoint(
                Server(
                    url,
                    api_key=self._api_key,
                    timeout_s=self._patience.timeout_s,
                    max_connections=self._concurrency + 1,
                ),
                self._dialect,
                self._patience,
            )
            for url in self._urls
        )
        await self._find_first()
        known = [endpoint for endpoint in self.endpoints if endpoint.model]
        if not known:
            raise EndpointsDownError(self._all_down())
        if len({endpoint.model for endpoint in known}) > 1:
            listed = ", ".join(f"{endpoint.url} serves {endpoint.model}" for endpoint in known)
            raise ValueError(f"data.regenerate.url: different models ({listed}); name one model")
        self._model = known[0].model
        for endpoint in self.endpoints:
            for _ in range(self._concurrency):
                worker = asyncio.ensure_future(self._work(endpoint))
                worker.add_done_callback(self._on_worker_end)
                self._workers.add(worker)

    async def _find_first(self) -> None:
        """Return once an endpoint is known and the others had their chance, or none is left.

        Who is late is contacted by its own workers.
        """
        first = [asyncio.ensure_future(endpoint.contact()) for endpoint in self.endpoints]
        await self._until_known(first)
        if not any(endpoint.model for endpoint in self.endpoints):  # starting up, or down
            await self._until_known([asyncio.ensure_future(e.ready()) for e in self.endpoints])

    async def _until_known(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        pending = set(tasks)
        while pending and not any(endpoint.model for endpoint in self.endpoints):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=_GRACE_S)
        for task in pending:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    def _close(self) -> None:
        async def shut() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for endpoint in self.endpoints:
                await endpoint.server.close()

        self._run(shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Have the event loop do it, and wait."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _cancel(self) -> None:
        while not self._jobs.empty():
            self._jobs.get_nowait()
        for task in self._asking:
            task.cancel()

    # -- work, in the event loop ------------------------------------------------------------------

    def _on_worker_end(self, worker: asyncio.Task[None]) -> None:
        """What ends a worker must reach whoever waits in :meth:`collect`."""
        if worker.cancelled():
            return
        if error := worker.exception():
            self._done.put(error)
        elif not any(endpoint.is_usable for endpoint in self.endpoints):
            self._done.put(EndpointsDownError(self._all_down()))

    async def _work(self, endpoint: Endpoint) -> None:
        while await endpoint.ready():
            if endpoint.model != self._model:
                endpoint.set_aside(f"it serves {endpoint.model}, the others {self._model}")
                return
            job = await self._jobs.get()
            if endpoint.is_resting or not endpoint.is_usable:  # it fell while this worker waited
                self._jobs.put_nowait(job)
                continue
            task = asyncio.ensure_future(endpoint.ask(job.question))
            self._asking.add(task)
            try:
                self._done.put(await task)
            except UnavailableError as error:
                self._try_again(job, error)
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                # Only the question was given up.
            finally:
                self._asking.discard(task)

    def _try_again(self, job: _Job, error: UnavailableError) -> None:
        job.failures += error.may_be_the_question
        if job.failures <= self._patience.retries:
            self._jobs.put_nowait(job)
            return
        logger.warning("giving up on one question after %d failures: %s", job.failures, error)
        self._done.put(Reply(job.question.key, (), "abort", "endpoint_error", str(error)))

    def _all_down(self) -> str:
        reasons = "; ".join(f"{e.url}: {e.set_aside_because}" for e in self.endpoints)
        return (
            f"data.regenerate.url: no endpoint answers any more ({reasons}); the answers so far "
            "are kept: start the same command again to go on"
        )
