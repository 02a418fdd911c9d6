"""Timing of decoding with and without the draft: interleaved runs, medians, and the cost model.

The cost model: with T the time of a plain step, a speculative step costs ``T * (1 + K c + v)``, so
the speed-up is ``emitted / (1 + K c + v)``. c and v come from steps with forced drafts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mtp_train.validate.forced_draft import ForcedDraft
from mtp_train.validate.measure import fit_engine
from mtp_train.validate.subject import Subject
from runtime.engine import Engine
from runtime.models.base import DraftModel
from runtime.request import Request


@dataclass(frozen=True)
class Timing:
    """One run over one batch of requests. Seconds; decoding starts after the last first token."""

    decode_s: float
    num_steps: int
    num_tokens: int  # decoded after the first token of each request
    first_token_s: float  # until every request has its first token
    gaps_s: tuple[float, ...] = field(repr=False)  # between arrivals at one request

    @property
    def step_s(self) -> float:
        return self.decode_s / max(self.num_steps, 1)


@dataclass(frozen=True)
class CostModel:
    """``c``: one more drafted token; ``v``: verifying and extending; both in plain steps."""

    c: float
    v: float

    def speedup(self, emitted: float, k: int) -> float:
        return emitted / (1 + k * self.c + self.v)


class SpeedBench:
    """Engines over the subject's target in the run's dtype, kept for all runs of one batch shape.

    ``k = 0`` is plain decoding.
    """

    def __init__(self, subject: Subject, groups: Sequence[Sequence[Request]]) -> None:
        self._subject = subject
        self._dtype = subject.runtime_dtype
        requests = [request for group in groups for request in group]
        self._lens = [len(request.prompt_ids) for request in requests]
        self._max_tokens = max(request.sampling.max_tokens for request in requests)
        self._batch_size = max(len(group) for group in groups)
        self._prompt_rows = max(sum(len(r.prompt_ids) for r in group) for group in groups)
        self._engines: dict[int, Engine] = {}

    def engine(self, k: int, *, draft: DraftModel | None = None) -> Engine:
        target = self._subject.target(self._dtype)
        config = fit_engine(
            self._subject.engine_config,
            self._lens,
            max_tokens=self._max_tokens,
            k=k,
            max_running=self._batch_size,
        )
        rows = max(config.max_batch_tokens, self._prompt_rows)
        return Engine(
            target.model,
            config=replace(config, max_batch_tokens=rows, verify="keyed", draft_mode="argmax"),
            eos_token_ids=target.eos_token_ids,
            draft=draft if draft is not None or not k else self._subject.head(self._dtype),
        )

    def run(self, group: Sequence[Request], k: int) -> Timing:
        if k not in self._engines:
            self._engines[k] = self.engine(k)
        return time_run(self._engines[k], group)[0]

    def plain_answers(self, group: Sequence[Request]) -> dict[str, list[int]]:
        """Prompt and plain output per request id."""
        outputs = time_run(self.engine(0), group)[1]
        return {
            request.request_id: [*request.prompt_ids, *outputs[request.request_id]]
            for request in group
        }

    def run_forced(
        self,
        group: Sequence[Request],
        k: int,
        answers: Mapping[str, Sequence[int]],
        *,
        is_right: bool,
        repeats: int,
    ) -> list[Timing]:
        run = self.forced(k, answers, is_right=is_right)
        return [run(group) for _ in range(repeats)]

    def forced(
        self, k: int, answers: Mapping[str, Sequence[int]], *, is_right: bool
    ) -> Callable[[Sequence[Request]], Timing]:
        """A timed run of requests of ``answers`` with drafts that are always right or wrong."""
        draft = ForcedDraft(self._subject.head(self._dtype), answers, is_right=is_right)
        engine = self.engine(k, draft=draft)
        draft.engine = engine
        return lambda group: time_run(engine, group)[0]


def time_run(engine: Engine, group: Sequence[Request]) -> tuple[Timing, dict[str, list[int]]]:
    """Decode one batch of requests and time every step; also returns the output ids."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in group}
    arrivals: dict[str, list[float]] = {request.request_id: [] for request in group}
    for request in group:
        engine.add(request)
    started = time.perf_counter()
    num_steps, first_token_at = 0, started
    living = len(group)
    while living:
        events = engine.step()
        now = time.perf_counter()
        is_decoding = all(arrivals.values())
        for event in events:
            outputs[event.request_id].extend(event.token_ids)
            arrivals[event.request_id].append(now)
            living -= event.finish_reason is not None
        if is_decoding:
            num_steps += 1
        elif all(arrivals.values()):
            first_token_at = now
    finished = time.perf_counter()
    gaps = [b - a for times in arrivals.values() for a, b in itertools.pairwise(times)]
    num_tokens = sum(len(ids) - 1 for ids in outputs.values())
    timing = Timing(
        decode_s=finished - first_token_at,
        num_steps=num_steps,
        num_tokens=num_tokens,
        first_token_s=first_token_at - started,
        gaps_s=tuple(gaps),
    )
    return timing, outputs


def fit_cost_model(ratios: Mapping[int, float]) -> CostModel:
    """c and v from the cost of a step in plain steps at two different K."""
    (k1, r1), (k2, r2) = sorted(ratios.items())
    c = (r2 - r1) / (k2 - k1)
    return CostModel(c=c, v=r1 - 1 - k1 * c)


def median(values: Sequence[float]) -> float:
    return float(np.median(np.asarray(values, dtype=np.float64)))
