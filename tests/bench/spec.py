"""`spec_b1`: target and head together at batch 1 against the same runtime decoding plainly.

c and v of the cost model are measured first, with forced drafts on prompts of their own; then both
sides decode the MT-Bench prompts in turns. `MTP_BENCH_HEAD` names the native head directory
(default: the long recipe's), `MTP_BENCH_HOT_HEAD` that of `spec_b1_hot` (default: 8192 ids, as
`mtp hot-vocab` writes it).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from data_prep.evaluation import evaluation_prompts
from mtp_train.validate.bootstrap import prompt_interval
from mtp_train.validate.measure import make_requests
from mtp_train.validate.speed import SpeedBench, Timing, fit_cost_model, median
from mtp_train.validate.subject import Subject
from runtime.config import EngineConfig
from runtime.head_spec import CONFIG_NAME
from runtime.models.loader import Target
from runtime.request import Request
from tests.bench.harness import BenchResult, NotHereError

_HEADS = {
    "MTP_BENCH_HEAD": ("runs/long/head", "make demo recipe=long trains it"),
    "MTP_BENCH_HOT_HEAD": ("runs/long/hot_vocab/8192", "mtp hot-vocab recipe=long writes it"),
}
NEW_TOKENS = 128
COST_TOKENS = 33
REPEATS = 3
LEVEL = 0.95


def run(target: Target, *, k: int, hot: bool = False, tree_nodes: int = 0) -> BenchResult:
    """All first turns of MT-Bench, greedy, 128 tokens each, one at a time; with ``hot`` drafting
    from a list of ids, else from the whole vocabulary; with ``tree_nodes`` a fixed tree ``k`` deep.
    """
    what = f"tree{tree_nodes}" if tree_nodes else f"k{k}"
    name = f"spec_b1_hot_{what}" if hot else f"spec_b1_{what}"
    head = bench_head("MTP_BENCH_HOT_HEAD" if hot else "MTP_BENCH_HEAD")
    config = EngineConfig()
    if tree_nodes:
        config = replace(config, schedule="fixed_tree", tree_nodes=tree_nodes)
    subject = Subject(
        target_path=target.path,
        head_path=head,
        runtime_dtype=target.model.dtype,
        engine_config=config,
        device=torch.device("cpu"),
    )
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    prompts = [prompt.prompt_ids for prompt in evaluation_prompts("mtbench", tokenizer)]
    requests = make_requests(prompts, max_tokens=NEW_TOKENS, ignore_eos=True)
    costs = measure_costs(subject, requests[::10], {k} if tree_nodes else {1, max(2, k)})
    bench = SpeedBench(subject, [[request] for request in requests])
    for length in (0, k):
        bench.run(requests[:1], length)  # warm
    runs: dict[int, list[list[Timing]]] = {length: [[] for _ in requests] for length in (0, k)}
    for repeat in range(REPEATS):
        for index, request in enumerate(requests):
            for length in (0, k) if (repeat + index) % 2 == 0 else (k, 0):
                runs[length][index].append(bench.run([request], length))
    seconds_P2 = np.array(
        [
            [median([t.decode_s for t in plain]), median([t.decode_s for t in spec])]
            for plain, spec in zip(runs[0], runs[k], strict=True)
        ]
    )
    speedup = float(seconds_P2[:, 0].sum() / seconds_P2[:, 1].sum())
    interval = prompt_interval(seconds_P2, lambda s: s[:, 0] / s[:, 1], level=LEVEL)
    timings = [timing for repeats in runs[k] for timing in repeats]
    tokens = sum(t.num_tokens for t in timings)
    emitted = tokens / sum(t.num_steps for t in timings)
    if tree_nodes:
        predicted, why = emitted / costs[k], f"a step of wrong drafts is {costs[k]:.3f} plain steps"
    else:
        cost = fit_cost_model(costs)
        predicted, why = cost.speedup(emitted, k), f"c={cost.c:.3f} v={cost.v:.3f}"
    note = (
        f"{LEVEL:.0%} interval {interval.low:.3f} to {interval.high:.3f}; {emitted:.3f} tokens "
        f"per step; {why}; predicted {predicted:.3f} ({predicted / speedup - 1:+.1%})"
    )
    per_side = len(requests) * (NEW_TOKENS - 1)
    return BenchResult(
        name=name,
        ours=per_side / float(seconds_P2[:, 1].sum()),
        peer=per_side / float(seconds_P2[:, 0].sum()),
        ratio=speedup,
        limit=None,
        share_of_limit=None,
        unit="tokens/s",
        command=f"make bench BENCH={name}",
        note=note,
    )


def bench_head(variable: str) -> Path:
    """The head that ``variable`` names, or its default. Raises :class:`NotHereError`."""
    default, how = _HEADS[variable]
    path = Path(os.environ.get(variable, default))
    if not (path / CONFIG_NAME).is_file():
        raise NotHereError(f"{variable}={path}: no head there; {how}")
    return path


def measure_costs(
    subject: Subject, requests: Sequence[Request], lengths: Collection[int]
) -> dict[int, float]:
    """By K, a step with forced wrong drafts in plain steps: one token each, so that contexts are
    those of plain steps.
    """
    short = [
        replace(request, sampling=replace(request.sampling, max_tokens=COST_TOKENS))
        for request in requests
    ]
    bench = SpeedBench(subject, [[request] for request in short])
    answers = {}
    for request in short:
        answers |= bench.plain_answers([request])
    lengths = sorted(lengths)
    engines = {length: bench.forced(length, answers, is_right=False) for length in lengths}
    steps: dict[int, list[list[float]]] = {n: [[] for _ in short] for n in (0, *lengths)}
    for repeat in range(REPEATS + 1):
        for index, request in enumerate(short):
            order = [0, *lengths] if (repeat + index) % 2 == 0 else [*reversed(lengths), 0]
            for length in order:
                timing = engines[length]([request]) if length else bench.run([request], 0)
                if repeat:  # the first round warms up
                    steps[length][index].append(timing.step_s)
    total = {n: sum(median(times) for times in rows) for n, rows in steps.items()}
    return {n: total[n] / total[0] for n in lengths}
