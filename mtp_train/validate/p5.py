"""P5: is it faster, and where does it stop?

Plain and speculative decoding of the same requests, interleaved, over batch sizes and context
lengths; beside them the cost model with c and v measured beforehand. The rung is passed when every
cell was measured and, at batch 1, the model predicts the measured speed-up within 25 %. A speed-up
below one is a figure, not a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mtp_train.validate.bootstrap import prompt_interval
from mtp_train.validate.measure import make_requests
from mtp_train.validate.report import DecodeSpeed, RungResult, SpeedResult
from mtp_train.validate.speed import CostModel, SpeedBench, Timing, fit_cost_model, median
from mtp_train.validate.subject import Subject
from runtime.request import Request

MODEL_TOLERANCE = 0.25
LEVEL = 0.95
NOISE = 0.03  # v is a difference of timings: this far below zero it says nothing
_FORCED_TOKENS = 17  # wrong drafts take a step per token: 16 steps


@dataclass(frozen=True)
class Cell:
    """One batch size and context. ``context_len = 0``: the prompts as they are."""

    batch_size: int
    num_groups: int
    repeats: int
    context_len: int = 0

    @property
    def name(self) -> str:
        context = f"_context{self.context_len}" if self.context_len else ""
        return f"batch{self.batch_size}{context}"


CELLS = (Cell(1, 8, 2), Cell(4, 1, 3), Cell(16, 1, 2), Cell(1, 2, 2, context_len=512))


@dataclass(frozen=True)
class CellRuns:
    """Timings of one cell, ``[group][repeat]`` per K (0: plain)."""

    cell: Cell
    runs: dict[int, list[list[Timing]]]
    cost: CostModel
    forced: dict[str, float]

    def sums(self, k: int) -> np.ndarray:
        """Per group: seconds plain, seconds with K (medians over repeats); ``[P, 2]``."""
        return np.array(
            [
                [median([t.decode_s for t in plain]), median([t.decode_s for t in spec])]
                for plain, spec in zip(self.runs[0], self.runs[k], strict=True)
            ]
        )


def check(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    draft_lengths: Sequence[int],
    prompt_set: str,
    max_tokens: int = 48,
    cells: Sequence[Cell] = CELLS,
) -> tuple[RungResult, tuple[SpeedResult, ...]]:
    """Time every cell at every K of ``draft_lengths`` (at least one)."""
    figures: dict[str, Any] = {
        "target_kv_bytes_per_token": _bytes_per_token(subject, draft=False),
        "draft_kv_bytes_per_token": _bytes_per_token(subject, draft=True),
    }
    bounds: dict[str, Any] = {}
    speeds = []
    for cell in cells:
        measured = run_cell(
            subject, prompts, cell, draft_lengths=draft_lengths, max_tokens=max_tokens
        )
        plain = [timing for group in measured.runs[0] for timing in group]
        figures[f"{cell.name}_plain"] = asdict(_describe(plain))
        figures[f"{cell.name}_cost"] = {
            "c": measured.cost.c,
            "v": measured.cost.v,
            **measured.forced,
        }
        for k in draft_lengths:
            row, entry = compare_speed(measured, k, prompt_set)
            speeds.append(row)
            figures[f"{cell.name}_k{k}"] = entry
            if cell.batch_size == 1 and not cell.context_len:
                figures[f"model_error_k{k}"] = entry["model_error"]
                bounds[f"model_error_k{k}"] = MODEL_TOLERANCE
    is_complete = all(np.isfinite([row.speedup, row.low, row.high]).all() for row in speeds)
    passed = is_complete and all(abs(figures[name]) <= bound for name, bound in bounds.items())
    batches = ", ".join(str(size) for size in sorted({cell.batch_size for cell in cells}))
    note = (
        f"with drafts against plain at batch {batches}, {max_tokens} tokens per request; passed "
        "means measured and predicted, not faster"
    )
    noisy = [cell.name for cell in cells if figures[f"{cell.name}_cost"]["v"] < -NOISE]
    if noisy:
        note += (
            f"; at {', '.join(noisy)} verification came out faster than plain decoding (v below "
            f"{-NOISE}): the machine was busy, measure on a quiet one"
        )
    return RungResult("P5", passed, figures, bounds, note=note), tuple(speeds)


def run_cell(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    cell: Cell,
    *,
    draft_lengths: Sequence[int],
    max_tokens: int,
) -> CellRuns:
    """Forced drafts first (the cost model), then plain and every K in turn, group by group."""
    groups = make_groups(prompts, cell, max_tokens=max_tokens)
    bench = SpeedBench(subject, groups)
    cost, forced = measure_cost(bench, groups[0], draft_lengths, max_tokens=max_tokens)
    lengths = [0, *draft_lengths]
    for k in lengths:
        bench.run(groups[0], k)  # warm: first use of every shape
    runs: dict[int, list[list[Timing]]] = {k: [[] for _ in groups] for k in lengths}
    for repeat in range(cell.repeats):
        for index, group in enumerate(groups):
            for k in lengths if repeat % 2 == 0 else reversed(lengths):
                runs[k][index].append(bench.run(group, k))
    return CellRuns(cell, runs, cost, forced)


def make_groups(
    prompts: Sequence[Sequence[int]], cell: Cell, *, max_tokens: int
) -> list[list[Request]]:
    """Batches of requests of equal output length; prompts are repeated when there are too few."""
    num = cell.batch_size * cell.num_groups
    if cell.context_len:
        stream = [token for prompt in prompts for token in prompt]
        stream = stream * (1 + num * cell.context_len // len(stream))
        chosen: list[Sequence[int]] = [
            stream[index * cell.context_len : (index + 1) * cell.context_len]
            for index in range(num)
        ]
    else:
        chosen = [prompts[index * len(prompts) // num % len(prompts)] for index in range(num)]
    requests = make_requests(chosen, max_tokens=max_tokens, ignore_eos=True)
    size = cell.batch_size
    return [requests[start : start + size] for start in range(0, num, size)]


def measure_cost(
    bench: SpeedBench, requests: Sequence[Request], draft_lengths: Sequence[int], *, max_tokens: int
) -> tuple[CostModel, dict[str, float]]:
    """c and v from forced drafts at K = 1 and the largest of ``draft_lengths`` (2 at least), over a
    few tokens of ``requests`` decoded together; and the figures that they were taken from.
    """
    limit = min(_FORCED_TOKENS, max_tokens)
    group = [replace(r, sampling=replace(r.sampling, max_tokens=limit)) for r in requests]
    lengths = sorted({1, max(2, *draft_lengths)})
    answers = bench.plain_answers(group)
    plain: list[float] = []
    steps: dict[tuple[int, bool], list[float]] = {}
    emitted: dict[tuple[int, bool], float] = {}
    for _ in range(2):  # interleaved: a slow moment of the machine hits all of them
        plain.append(bench.run(group, 0).step_s)
        for k in lengths:
            for is_right in (True, False):
                timings = bench.run_forced(group, k, answers, is_right=is_right, repeats=1)
                steps.setdefault((k, is_right), []).extend(t.step_s for t in timings)
                last = timings[-1]
                emitted[k, is_right] = last.num_tokens / last.num_steps / len(group)
    base = min(plain)
    ratios = {k: min(steps[k, False]) / base for k in lengths}
    forced: dict[str, float] = {"plain_step_ms": 1e3 * base}
    for (k, is_right), seconds in steps.items():
        name = f"k{k}_{'right' if is_right else 'wrong'}"
        forced[f"{name}_step_ms"] = 1e3 * min(seconds)
        forced[f"{name}_emitted"] = emitted[k, is_right]
    return fit_cost_model(ratios), forced


def compare_speed(
    measured: CellRuns, k: int, prompt_set: str
) -> tuple[SpeedResult, dict[str, Any]]:
    """Speed at ``k`` against plain decoding, as a record and as figures of the rung."""
    cell, sums_P2 = measured.cell, measured.sums(k)
    if len(sums_P2) < 4:  # too few groups to resample: resample single runs
        pairs = zip(measured.runs[0], measured.runs[k], strict=True)
        runs = [(a.decode_s, b.decode_s) for x, y in pairs for a, b in zip(x, y, strict=True)]
        interval = prompt_interval(np.array(runs), lambda s: s[:, 0] / s[:, 1], level=LEVEL)
    else:
        interval = prompt_interval(sums_P2, lambda s: s[:, 0] / s[:, 1], level=LEVEL)
    speedup = float(sums_P2[:, 0].sum() / sums_P2[:, 1].sum())
    timings = [timing for group in measured.runs[k] for timing in group]
    emitted = sum(t.num_tokens for t in timings) / sum(t.num_steps for t in timings)
    emitted /= cell.batch_size
    context = f"/context{cell.context_len}" if cell.context_len else ""
    row = SpeedResult(
        prompt_set=prompt_set + context,
        batch_size=cell.batch_size,
        k=k,
        speedup=speedup,
        low=interval.low,
        high=interval.high,
        emitted_per_step=emitted,
        predicted=measured.cost.speedup(emitted, k),
        c=measured.cost.c,
        v=measured.cost.v,
        draft=_describe(timings),
        plain=_describe([timing for group in measured.runs[0] for timing in group]),
        level=LEVEL,
        context_len=cell.context_len,
        groups=cell.num_groups,
        repeats=cell.repeats,
    )
    entry = {
        **asdict(row.draft),
        "speedup": speedup,
        "interval": [interval.low, interval.high],
        "emitted_per_step": emitted,
        "predicted_speedup": row.predicted,
        "model_error": row.model_error,
    }
    return row, entry


def _describe(timings: Sequence[Timing]) -> DecodeSpeed:
    gaps = np.concatenate([np.asarray(t.gaps_s) for t in timings])
    return DecodeSpeed(
        tokens_per_s=sum(t.num_tokens for t in timings) / sum(t.decode_s for t in timings),
        inter_token_p50_ms=1e3 * float(np.quantile(gaps, 0.5)),
        inter_token_p99_ms=1e3 * float(np.quantile(gaps, 0.99)),
        first_token_ms=1e3 * median([t.first_token_s for t in timings]),
    )


def _bytes_per_token(subject: Subject, *, draft: bool) -> int:
    dtype = subject.runtime_dtype
    model = subject.head(dtype) if draft else subject.target(dtype).model
    return model.new_pool(1).num_bytes()
