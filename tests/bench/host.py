"""`host_*`: what a step costs beside model forwards: scheduling, sampling, verification, commits.

Time inside `forward` and `logits` of target and head is taken step by step; the rest is the host's.
The limit is a step that consists of forwards only. On a GPU that rest hides behind the draft, which
this cannot show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

from data_prep.evaluation import evaluation_prompts
from mtp_train.validate.measure import make_requests
from mtp_train.validate.speed import SpeedBench
from mtp_train.validate.subject import Subject
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.base import Model
from runtime.models.loader import Target
from runtime.request import Request
from tests.bench.harness import BenchResult
from tests.bench.spec import bench_head

NEW_TOKENS = 48
ROUNDS = 3


class ForwardClock:
    """Seconds inside the outermost calls of `forward` and `logits`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def watch(self, model: Model) -> Iterator[None]:
        names = ("forward", "logits")
        originals = {name: getattr(model, name) for name in names}

        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                self._depth += 1
                started = time.perf_counter()
                try:
                    return call(*args, **options)
                finally:
                    self._depth -= 1
                    if not self._depth:
                        self.seconds += time.perf_counter() - started

            return run

        for name in names:
            setattr(model, name, timed(originals[name]))
        try:
            yield
        finally:
            for name in names:
                delattr(model, name)


def run(target: Target, *, batch: int, k: int) -> BenchResult:
    """Greedy steps of ``batch`` requests with ``k`` drafted tokens (0: plain) beside plain ones."""
    subject = Subject(
        target_path=target.path,
        head_path=bench_head("MTP_BENCH_HEAD"),
        runtime_dtype=target.model.dtype,
        engine_config=EngineConfig(),
        device=torch.device("cpu"),
    )
    subject._targets[target.model.dtype] = target
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    prompts = [prompt.prompt_ids for prompt in evaluation_prompts("mtbench", tokenizer, batch)]
    requests = make_requests(prompts, max_tokens=NEW_TOKENS, ignore_eos=True)
    bench = SpeedBench(subject, [requests])
    engines = {length: bench.engine(length) for length in sorted({0, k})}
    clock = ForwardClock()
    steps: dict[int, list[tuple[float, float]]] = {length: [] for length in engines}
    with ExitStack() as stack:
        models: list[Model] = [target.model]
        if k:
            models.append(subject.head(target.model.dtype))
        for model in models:
            stack.enter_context(clock.watch(model))
        for number in range(ROUNDS + 1):
            for length, engine in engines.items():
                timed = time_steps(engine, requests, clock)
                if number:  # the first round warms up
                    steps[length].extend(timed)
    step_s, forward_s = (median(values) for values in zip(*steps[k], strict=True))
    host_s = median(step - forward for step, forward in steps[k])
    plain_s = median(step for step, _ in steps[0])
    name = f"host_mtp{k}_b{batch}" if k else f"host_plain_b{batch}"
    return BenchResult(
        name=name,
        ours=1 / step_s,
        peer=1 / plain_s,
        ratio=plain_s / step_s,
        limit=1 / forward_s,
        share_of_limit=forward_s / step_s,
        unit="steps/s",
        command=f"make bench BENCH={name}",
        note=(
            f"host {1e3 * host_s:.2f} of {1e3 * step_s:.2f} ms per step ({host_s / step_s:.1%}); "
            "peer: plain decoding, limit: forwards alone"
        ),
    )


def time_steps(
    engine: Engine, requests: list[Request], clock: ForwardClock
) -> list[tuple[float, float]]:
    """(step, inside of forwards) in seconds, of the steps in which all requests decode."""
    timed = []
    for request in requests:
        engine.add(request)
    while engine.has_work:
        is_decoding = len(engine.scheduler.running) == len(requests) and all(
            state.output_ids for state in engine.scheduler.running
        )
        clock.seconds, started = 0.0, time.perf_counter()
        engine.step()
        if is_decoding:
            timed.append((time.perf_counter() - started, clock.seconds))
    return timed
