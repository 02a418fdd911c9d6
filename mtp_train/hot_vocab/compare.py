"""Acceptance and speed of one head drafting from the whole vocabulary and from lists of it.

All of them decode the same prompts. For the speed they take turns, prompt by prompt, together with
plain decoding; costs are those of the very columns that are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtp_train.validate.bootstrap import prompt_interval
from mtp_train.validate.measure import Measured, make_requests, measure_acceptance
from mtp_train.validate.p5 import LEVEL, Cell, CellRuns, compare_speed, measure_cost
from mtp_train.validate.report import SpeedResult
from mtp_train.validate.speed import SpeedBench, Timing, median
from mtp_train.validate.subject import Subject

WHOLE = 0  # the size that stands for the whole vocabulary
_Runs = dict[tuple[int, int], list[list[Timing]]]  # by (size, K): [prompt][repeat]
_PLAIN = (WHOLE, 0)


@dataclass(frozen=True)
class Gain:
    """Tokens/s of a list over those of the whole vocabulary at the same K, with its interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One vocabulary at one K. ``size`` 0: the whole vocabulary.

    ``coverage``: of the training set's answer tokens; ``emitted_share``: of the tokens that the
    target wrote on these prompts, which bounds what can be accepted.
    """

    size: int
    coverage: float
    emitted_share: float
    served_by: str
    measured: Measured
    speed: SpeedResult | None
    gain: Gain | None

    def to_dict(self) -> dict[str, Any]:
        item = self.measured
        interval = item.tau_interval
        return {
            "size": self.size,
            "coverage": self.coverage,
            "emitted_share": self.emitted_share,
            "served_by": self.served_by,
            "prompt_set": item.prompt_set,
            "temperature": item.temperature,
            "draft_mode": item.draft_mode,
            "prompts": item.num_prompts,
            "max_tokens": item.max_tokens,
            "tau_interval": [interval.low, interval.high],
            "tau_level": interval.level,
            **item.acceptance.to_dict(),
            "speed": None if self.speed is None else self.speed.to_dict(),
            "speed_over_whole": None
            if self.gain is None
            else {"ratio": self.gain.ratio, "low": self.gain.low, "high": self.gain.high},
        }


def measure_sizes(
    subjects: Mapping[int, Subject],
    prompts: Sequence[Sequence[int]],
    *,
    draft_lengths: Sequence[int],
    max_tokens: int,
    temperature: float,
    prompt_set: str,
    seed: int,
) -> dict[tuple[int, int], Measured]:
    """Acceptance by (size, K)."""
    return {
        (size, k): measure_acceptance(
            subject.target(subject.runtime_dtype),
            subject.head(subject.runtime_dtype),
            prompts,
            k=k,
            max_tokens=max_tokens,
            temperature=temperature,
            engine_config=subject.engine_config,
            prompt_set=prompt_set,
            seed=seed,
        )
        for size, subject in subjects.items()
        for k in draft_lengths
    }


def emitted_share(measured: Measured, ids: Sequence[int]) -> float:
    """Share of the output tokens whose id is in ``ids``."""
    listed = set(ids)
    output = [token for g in measured.generations for token in g.output_ids]
    return sum(token in listed for token in output) / max(1, len(output))


def time_sizes(
    subjects: Mapping[int, Subject],
    prompts: Sequence[Sequence[int]],
    *,
    draft_lengths: Sequence[int],
    max_tokens: int,
    repeats: int,
    prompt_set: str,
) -> dict[tuple[int, int], tuple[SpeedResult, Gain]]:
    """Speed by (size, K), prompts one at a time: over plain decoding, and over the whole
    vocabulary.
    """
    requests = make_requests(prompts, max_tokens=max_tokens, ignore_eos=True)
    groups = [[request] for request in requests]
    benches = {size: SpeedBench(subject, groups) for size, subject in subjects.items()}
    costs = {
        size: measure_cost(bench, groups[0], draft_lengths, max_tokens=max_tokens)
        for size, bench in benches.items()
    }
    cells = [_PLAIN, *((size, k) for k in draft_lengths for size in subjects)]
    for size, k in cells:
        benches[size].run(groups[0], k)  # warm: first use of every shape
    runs: _Runs = {cell: [[] for _ in groups] for cell in cells}
    for repeat in range(repeats):
        for index, group in enumerate(groups):
            start = (repeat * len(groups) + index) % len(cells)
            for size, k in cells[start:] + cells[:start]:
                runs[size, k][index].append(benches[size].run(group, k))
    found = {}
    for size, k in cells[1:]:
        cost, forced = costs[size]
        pair = {0: runs[_PLAIN], k: runs[size, k]}
        cell = CellRuns(Cell(1, len(groups), repeats), pair, cost, forced)
        speed, _ = compare_speed(cell, k, prompt_set)
        found[size, k] = speed, _gain(runs[WHOLE, k], runs[size, k])
    return found


def _gain(whole: Sequence[Sequence[Timing]], hot: Sequence[Sequence[Timing]]) -> Gain:
    sums_P2 = np.array(
        [
            [median([t.decode_s for t in a]), median([t.decode_s for t in b])]
            for a, b in zip(whole, hot, strict=True)
        ]
    )
    interval = prompt_interval(sums_P2, lambda s: s[:, 0] / s[:, 1], level=LEVEL)
    ratio = float(sums_P2[:, 0].sum() / sums_P2[:, 1].sum())
    return Gain(ratio, interval.low, interval.high)
