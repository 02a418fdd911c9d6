"""Acceptance, measured: target and head decode prompts together in the runtime.

One definition everywhere (``runtime.metrics``). A figure never travels without what it depends on:
prompt set, K, temperature, draft mode, number of steps, and an interval that resamples prompts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mtp_train.validate.bootstrap import (
    Interval,
    first_rate_of_sums,
    prompt_interval,
    tau_of_sums,
)
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.metrics import Acceptance, pool_acceptance
from runtime.models.base import DraftModel
from runtime.models.loader import Target
from runtime.request import Generation, Request, SamplingParams
from runtime.seeds import derive_seed

Prompts = Sequence[Sequence[int]]
_WAVE_TOKENS = 8192  # prompt rows of one forward: bounds the activations


@dataclass(frozen=True)
class Measured:
    """What one measurement found, and under which settings."""

    prompt_set: str
    k: int
    temperature: float
    draft_mode: str
    max_tokens: int
    acceptance: Acceptance
    tau_interval: Interval
    wall_s: float
    generations: tuple[Generation, ...] = field(repr=False)

    @property
    def num_prompts(self) -> int:
        return len(self.generations)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(generation.output_ids) for generation in self.generations)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall time, prefill included."""
        return self.num_output_tokens / self.wall_s if self.wall_s > 0 else 0.0


def measure_acceptance(
    target: Target,
    head: DraftModel,
    prompts: Prompts,
    *,
    k: int,
    max_tokens: int,
    temperature: float,
    engine_config: EngineConfig,
    prompt_set: str,
    seed: int = 0,
    max_running: int = 0,
) -> Measured:
    """Decode ``prompts`` (token ids) with an engine of their own and pool what was accepted.

    ``max_running`` (0: the engine configuration's) bounds how many decode together. Raises
    ``ValueError`` without prompts.
    """
    requests = make_requests(prompts, max_tokens=max_tokens, temperature=temperature, seed=seed)
    started = time.perf_counter()
    generations = decode_waves(
        target, requests, head=head, k=k, engine_config=engine_config, max_running=max_running
    )
    wall_s = time.perf_counter() - started
    return Measured(
        prompt_set=prompt_set,
        k=k,
        temperature=temperature,
        draft_mode=engine_config.draft_mode,
        max_tokens=max_tokens,
        acceptance=pool_acceptance(generations, k),
        tau_interval=tau_interval(generations, k),
        wall_s=wall_s,
        generations=tuple(generations),
    )


def decode_waves(
    target: Target,
    requests: Sequence[Request],
    *,
    engine_config: EngineConfig,
    head: DraftModel | None = None,
    k: int = 0,
    max_running: int = 0,
) -> list[Generation]:
    """Decode in waves: all prompts of a wave are prefilled together, then decode to their ends.

    A late prompt would make the others decode some tokens without drafting. In waves every token
    after the first is drafted for, so counts do not depend on who shares the batch or the rank.
    """
    if not requests:
        raise ValueError("prompts: none given; at least one is needed to measure anything")
    waves = cut_waves(requests, max_running=max_running or engine_config.max_running)
    config = fit_engine(
        engine_config,
        [len(request.prompt_ids) for request in requests],
        max_tokens=max(request.sampling.max_tokens for request in requests),
        k=k,
        max_running=max(len(wave) for wave in waves),
    )
    prompt_tokens = [sum(len(r.prompt_ids) for r in wave) for wave in waves if len(wave) > 1]
    config = replace(config, max_batch_tokens=max([config.max_batch_tokens, *prompt_tokens]))
    engine = Engine(target.model, config=config, eos_token_ids=target.eos_token_ids, draft=head)
    return [generation for wave in waves for generation in engine.generate(wave)]


def cut_waves(requests: Sequence[Request], *, max_running: int) -> list[list[Request]]:
    """Consecutive requests, at most ``max_running`` and ``_WAVE_TOKENS`` prompt tokens at once (one
    longer prompt makes a wave of its own).
    """
    waves: list[list[Request]] = []
    tokens = 0
    for request in requests:
        size = len(request.prompt_ids)
        if not waves or len(waves[-1]) == max_running or tokens + size > _WAVE_TOKENS:
            waves.append([])
            tokens = 0
        waves[-1].append(request)
        tokens += size
    return waves


def make_requests(
    prompts: Prompts,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    ignore_eos: bool = False,
) -> list[Request]:
    """One request per prompt, each with a seed of its own derived from ``seed``."""
    return [
        Request(
            str(index),
            tuple(prompt),
            SamplingParams(
                temperature=temperature,
                seed=derive_seed(seed, "request", index),
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def fit_engine(
    config: EngineConfig,
    prompt_lens: Sequence[int],
    *,
    max_tokens: int,
    k: int,
    max_running: int,
) -> EngineConfig:
    """``config`` with the capacity that these prompts need, so that nothing is preempted or clipped
    at the model's length limit. K/V memory is the only thing that grows with it. Every step drafts
    exactly ``k`` tokens.
    """
    max_running = max(1, min(max_running, len(prompt_lens)))
    max_model_len = max(prompt_lens) + max_tokens + k + 1
    slots = max_model_len + config.extra_slots(k)
    pages = -(-slots // config.page_size) + 1  # one spare page each, for admission
    return replace(
        config,
        num_draft_tokens=k,
        draft_length="pinned",
        max_running=max_running,
        max_model_len=max_model_len,
        num_pages=pages * max_running,
        max_batch_tokens=max(config.max_batch_tokens, max_running * config.verify_rows(k)),
    )


def tau_interval(generations: Sequence[Generation], k: int, *, level: float = 0.95) -> Interval:
    """Prompt-clustered bootstrap interval of the untrimmed tau."""
    sums_PS = acceptance_sums(generations, k)
    return prompt_interval(sums_PS, tau_of_sums, level=level)


def rate_intervals(
    generations: Sequence[Generation], k: int, *, level: float = 0.95
) -> tuple[Interval, ...]:
    """Prompt-clustered bootstrap intervals of the untrimmed rate of each position."""
    sums_PS = acceptance_sums(generations, k)
    return tuple(
        prompt_interval(sums_PS[:, [0, j]], first_rate_of_sums, level=level)
        for j in range(1, k + 1)
    )


def acceptance_sums(
    generations: Sequence[Generation], k: int, *, trimmed: bool = False
) -> np.ndarray:
    """Per prompt: drafts, then accepted per position; int64 ``[P, 1 + K]``."""
    rows = []
    for generation in generations:
        counts = pool_acceptance([generation], k)
        accepted = counts.accepted_trimmed if trimmed else counts.accepted
        rows.append((counts.num_drafts, *accepted))
    return np.asarray(rows, dtype=np.int64).reshape(len(rows), 1 + k)
