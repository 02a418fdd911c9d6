"""The runtime and the user's serving engine on the same prompts: who accepted what, and where the
texts part.

Both sides decode greedily with the exported head, the same token ids, groups, K and stop tokens.
Until the first difference of two texts every verification step must be the same; what comes after
it is about another text and is left out of that comparison.

Shape legend: P prompts, K positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from mtp_train.serving.job import DraftCounts, Served, ServedPrompt, ServingJob
from mtp_train.validate.measure import cut_waves, decode_waves, make_requests
from mtp_train.validate.p2 import bf16_ulp, hidden_sequences
from mtp_train.validate.subject import Subject, dtype_name
from runtime.request import Generation, SpecStep

Serve = Callable[[ServingJob], Served]


@dataclass(frozen=True)
class PromptComparison:
    """One prompt, until its texts part at output index ``divergence`` (``None``: never).

    ``ours`` and ``theirs`` count the steps compared; ``num_wrong`` of them differ. Where the engine
    only counts, a prompt whose texts part cannot be compared (``is_comparable``).
    """

    ours: DraftCounts
    theirs: DraftCounts
    num_wrong: int
    divergence: int | None
    is_comparable: bool = True


@dataclass(frozen=True)
class Divergence:
    """Where two texts part: our logit gap between the two tokens there, and in bf16 ulp of the
    larger logit. Infinite where one text merely ends.
    """

    prompt: int
    index: int
    gap: float
    ulps: float


@dataclass(frozen=True)
class EnginePair:
    """Both sides of one job."""

    k: int
    dtype: torch.dtype
    generations: tuple[Generation, ...] = field(repr=False)
    served: Served = field(repr=False)

    @property
    def prompts(self) -> list[PromptComparison]:
        return [
            compare_prompt(generation, prompt, self.k)
            for generation, prompt in zip(self.generations, self.served.prompts, strict=True)
        ]

    @property
    def our_sums(self) -> np.ndarray:
        """Per prompt drafts, then accepted per position, before trimming: int64 ``[P, 1 + K]``."""
        return _sums([our_counts(g, self.k) for g in self.generations])

    @property
    def their_sums(self) -> np.ndarray:
        """As :attr:`our_sums`, counted by the engine."""
        return _sums([prompt.counts for prompt in self.served.prompts])

    @property
    def counters_differ(self) -> int:
        """How far the engine's totals are from the sum over its own prompts; 0 is right."""
        total, parts = self.served.counters, self.served.attributed
        pairs = zip(total.accepted, parts.accepted, strict=True)
        return abs(total.drafts - parts.drafts) + sum(abs(a - b) for a, b in pairs)


def serve_and_compare(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    dtype: torch.dtype,
    max_tokens: int,
    serve: Serve,
    max_running: int,
    generations: Sequence[Generation] | None = None,
) -> EnginePair:
    """Decode ``prompts`` (token ids) with the runtime and with ``serve``, ``max_running`` together.

    ``subject.head_path`` is the *exported* directory: both sides read it. ``generations`` are the
    runtime's where they are known already. Raises ``ServingError`` when the engine fails.
    """
    if generations is None:
        generations = decode_ours(
            subject, prompts, k=k, dtype=dtype, max_tokens=max_tokens, max_running=max_running
        )
    target = subject.target(dtype)
    waves = cut_waves(make_requests(prompts, max_tokens=max_tokens), max_running=max_running)
    job = ServingJob(
        target=target.path,
        head=subject.head_path,
        k=k,
        dtype=_engine_dtype(dtype),
        groups=tuple(tuple(request.prompt_ids for request in wave) for wave in waves),
        max_tokens=max_tokens,
        stop_token_ids=tuple(sorted(target.eos_token_ids)),
    )
    return EnginePair(k=k, dtype=dtype, generations=tuple(generations), served=serve(job))


def decode_ours(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    dtype: torch.dtype,
    max_tokens: int,
    max_running: int,
) -> list[Generation]:
    """The runtime's side: greedy, arg-maxed drafts, in the groups that the engine gets."""
    return decode_waves(
        subject.target(dtype),
        make_requests(prompts, max_tokens=max_tokens),
        engine_config=subject.engine_config,
        head=subject.head(dtype),
        k=k,
        max_running=max_running,
    )


def compare_prompt(generation: Generation, served: ServedPrompt, k: int) -> PromptComparison:
    """Step by step until the texts part; by totals where the engine does not tell steps."""
    divergence = first_difference(generation.output_ids, served.output_ids)
    steps = generation.steps
    if divergence is not None:
        steps = tuple(s for s in steps if s.start + s.num_accepted < divergence)
    ours = DraftCounts.of_steps([step.num_accepted for step in steps], k)
    if served.accepted_per_step is None:
        if divergence is not None:
            return PromptComparison(ours, DraftCounts.none(k), 0, divergence, is_comparable=False)
        gap = ours - served.counts
        wrong = abs(gap.drafts) + sum(abs(count) for count in gap.accepted)
        return PromptComparison(ours, served.counts, wrong, None)
    accepted = served.accepted_per_step
    if divergence is not None:
        accepted = accepted[: len(steps)]
    pairs = zip((step.num_accepted for step in steps), accepted, strict=False)
    wrong = abs(len(steps) - len(accepted)) + sum(a != b for a, b in pairs)
    return PromptComparison(ours, DraftCounts.of_steps(accepted, k), wrong, divergence)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs; the shorter length when one text merely ends."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def our_counts(generation: Generation, k: int) -> DraftCounts:
    """Steps of one generation, before trimming."""
    return DraftCounts.of_steps([step.num_accepted for step in generation.steps], k)


@torch.inference_mode()
def divergences(subject: Subject, pair: EnginePair) -> list[Divergence]:
    """Where texts part, and how close our own logits of the two tokens are there."""
    parted = [
        (index, comparison.divergence)
        for index, comparison in enumerate(pair.prompts)
        if comparison.divergence is not None
    ]
    if not parted:
        return []
    sequences = [
        [*pair.generations[index].prompt_ids, *pair.generations[index].output_ids[:at]]
        for index, at in parted
    ]
    model = subject.target(pair.dtype).model
    found = []
    hidden = hidden_sequences(subject, sequences, pair.dtype)
    for (index, at), sequence in zip(parted, hidden, strict=True):
        ours = pair.generations[index].output_ids
        theirs = pair.served.prompts[index].output_ids
        if at >= min(len(ours), len(theirs)):
            found.append(Divergence(index, at, float("inf"), float("inf")))
            continue
        logits_V = model.logits(sequence.hidden[-1:])[0].float()
        top = float(logits_V.max())
        # The larger distance from the top: neither token may be far below the best one.
        gap = top - float(torch.minimum(logits_V[ours[at]], logits_V[theirs[at]]))
        found.append(Divergence(index, at, gap, gap / bf16_ulp(top)))
    return found


def as_generation(prompt_ids: Sequence[int], served: ServedPrompt, k: int) -> Generation:
    """The engine's answer as if the runtime had given it, for a replay of it.

    Its drafts are not known. Where steps are not either, one step stands for them all: the engine
    drafts for every token after the first.
    """
    accepted = served.accepted_per_step
    if accepted is None:
        accepted = (max(0, len(served.output_ids) - 2),)
    steps, start = [], 1
    for count in accepted:
        steps.append(SpecStep((-1,) * k, count, start))
        start += count + 1
    return Generation(
        request_id="served",
        prompt_ids=tuple(prompt_ids),
        output_ids=served.output_ids,
        finish_reason="stop" if served.finish_reason == "stop" else "length",
        steps=tuple(steps),
    )


def sum_counts(counts: Sequence[DraftCounts], k: int) -> DraftCounts:
    return sum(counts, DraftCounts.none(k))


def _sums(counts: Sequence[DraftCounts]) -> np.ndarray:
    return np.array([(c.drafts, *c.accepted) for c in counts], dtype=np.int64)


def _engine_dtype(dtype: torch.dtype) -> Literal["float32", "bfloat16"]:
    name = dtype_name(dtype)
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={name}: an engine is asked for float32 or bfloat16")
    return "float32" if name == "float32" else "bfloat16"
