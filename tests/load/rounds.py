"""Rounds of traffic for as long as wanted, and how much memory the process holds after each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.loader import Target
from runtime.request import Generation
from tests.load.driver import Outcome, run_traffic
from tests.load.schedules import MAX_MODEL_LEN, WAYS
from tests.load.traffic import Visitor, make_traffic
from tests.unit.runtime.engine_fixtures import EOS, ByteTokenizer

_WARM_UP_SHARE = 0.5  # rounds that are left out of the slope: caches by shape still fill
_MIN_ROUNDS = 40  # fewer say nothing about memory


def plain_answers(target: Target, visitors: Sequence[Visitor]) -> Mapping[str, Generation]:
    """Plain decoding with room for everybody and nobody giving up."""
    config = EngineConfig(
        num_pages=64 * MAX_MODEL_LEN // 16,
        max_running=32,
        max_model_len=MAX_MODEL_LEN,
        max_batch_tokens=512,
    )
    engine = Engine(target.model, config=config, eos_token_ids=(EOS,), tokenizer=ByteTokenizer())
    answers = engine.generate([visitor.request for visitor in visitors])
    return {generation.request_id: generation for generation in answers}


@dataclass(frozen=True)
class Round:
    """One round of one schedule. ``resident_mb`` is what the process held after it."""

    way: str
    seed: int
    outcome: Outcome
    seconds: float
    resident_mb: float


def run_rounds(target: Target, *, seconds: float, count: int, seed: int) -> Iterator[Round]:
    """Every schedule in turn with ``count`` requests each, until ``seconds`` are over."""
    engines = {
        (way, page_size): WAYS[way].engine(target, page_size=page_size)
        for way in WAYS
        for page_size in (1, 16)
    }
    started = time.perf_counter()
    while True:
        visitors = make_traffic(count, seed=seed)
        wanted = plain_answers(target, visitors)
        for (way, page_size), engine in engines.items():
            began = time.perf_counter()
            outcome = run_traffic(engine, visitors, wanted)
            ended = time.perf_counter()
            yield Round(f"{way} page {page_size}", seed, outcome, ended - began, resident_mb())
            if ended - started > seconds:
                return
        seed += 1


def resident_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def memory_slope(rounds: Sequence[Round]) -> float | None:
    """MB per round: the slope of a straight line through the rounds after the warm-up; ``None``
    when there are too few to tell.
    """
    if len(rounds) < _MIN_ROUNDS:
        return None
    values = [each.resident_mb for each in rounds[int(len(rounds) * _WARM_UP_SHARE) :]]
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    spread = sum((index - middle) ** 2 for index in range(len(values)))
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread
