"""P6: does the user's engine agree?

The exported directory, served by the engine itself, against the runtime on the same directory.

In fp32 every verification step until the first difference of two texts must be *equal*: drafts and
accepted per position. Texts may part only where the fp64 oracle's gap of the two best logits is
below 1e-4, at most once in 10,000 tokens. In bf16 texts part often, at near ties: the gap in our
logits is at most 4 bf16 ulp. There the engine's own texts are replayed with our head: 95 % of the
steps must accept the same, and the conditional rates must be within P3's bound, judged as P3
judges; the rates of the two runs, which are about different texts, must not differ beyond it with
certainty. Counted as engines count, before trimming at EOS or length; a replay only knows the
trimmed text, and is compared trimmed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mtp_train.validate.p3 import replay_generations
from mtp_train.validate.p4 import TIE_GAP, TOKENS_PER_TIE, oracle_gaps
from mtp_train.validate.rates import (
    MAX_GAP,
    all_sums,
    conditional_rates,
    gap_intervals,
    judge_position,
    tau_of,
)
from mtp_train.validate.replay import trimmed_steps
from mtp_train.validate.report import RungResult
from mtp_train.validate.served import (
    Divergence,
    EnginePair,
    as_generation,
    divergences,
    sum_counts,
)
from mtp_train.validate.subject import Subject, dtype_name

MAX_ULP = 4.0  # the 2 of P2 on either side: two roundings of one computation
MIN_AGREEMENT = 0.95  # of steps, in bf16: near ties of the head's own logits are one in a hundred


@dataclass(frozen=True)
class EngineRun:
    """One dtype and one K. ``set_names``: the evaluation set of every prompt of ``pair``."""

    pair: EnginePair
    set_names: tuple[str, ...] = field(repr=False)


def check(
    subject: Subject,
    runs: Sequence[EngineRun],
    *,
    min_drafts: int,
    inputs: Mapping[str, Any] | None = None,
) -> RungResult:
    """``subject`` holds the exported directory. ``inputs``: what the figures are of, kept with
    them.
    """
    figures: dict[str, Any] = {}
    bounds: dict[str, Any] = {}
    passed = bool(runs)
    rows: list[dict[str, Any]] = []
    for run in runs:
        pair = run.pair
        prefix = f"{dtype_name(pair.dtype)}_k{pair.k}_"
        if pair.dtype is torch.float32:
            result = check_exact(subject, pair)
        else:
            result = check_rates(subject, pair, min_drafts=min_drafts)
        own = {
            f"{prefix}counters_that_differ": pair.counters_differ,
            f"{prefix}clipped_steps": pair.served.clipped_steps,
        }
        figures |= {prefix + name: value for name, value in result.figures.items()} | own
        bounds |= {prefix + name: value for name, value in result.bounds.items()}
        bounds |= dict.fromkeys(own, 0)
        passed = passed and result.passed and not any(own.values())
        rows += [_set_row(run, name) for name in dict.fromkeys(run.set_names)]
    engine = describe_engine([run.pair for run in runs])
    figures |= {"engine": engine, "sets": rows, "inputs": dict(inputs or {})}
    note = f"{engine}: {_describe(runs)}"
    return RungResult("P6", passed, figures, bounds, note=note)


def check_exact(subject: Subject, pair: EnginePair) -> RungResult:
    """fp32: equal steps until the texts part, and texts that part at ties only."""
    compared = pair.prompts
    ours = sum_counts([prompt.ours for prompt in compared if prompt.is_comparable], pair.k)
    theirs = sum_counts([prompt.theirs for prompt in compared if prompt.is_comparable], pair.k)
    parted = [i for i, prompt in enumerate(compared) if prompt.divergence is not None]
    gaps = oracle_gaps(
        subject,
        [
            (
                pair.generations[i],
                as_generation(pair.generations[i].prompt_ids, pair.served.prompts[i], pair.k),
            )
            for i in parted
        ],
    )
    num_ties = sum(gap < TIE_GAP for gap in gaps)
    num_tokens = sum(len(generation.output_ids) for generation in pair.generations)
    figures: dict[str, Any] = {
        "prompts": len(compared),
        "tokens": num_tokens,
        "drafts": ours.drafts,
        "drafts_served": theirs.drafts,
        "accepted": list(ours.accepted),
        "accepted_served": list(theirs.accepted),
        "steps_that_differ": sum(prompt.num_wrong for prompt in compared),
        "prompts_not_comparable": sum(not prompt.is_comparable for prompt in compared),
        "texts_that_part_at_ties": num_ties,
        "texts_that_part": len(parted) - num_ties,
    }
    limit = max(1, num_tokens // TOKENS_PER_TIE)  # one tie in fewer tokens says nothing
    bounds: dict[str, Any] = {
        "steps_that_differ": 0,
        "texts_that_part_at_ties": limit,
        "texts_that_part": 0,
        "accepted_at_least": 1,  # equal counts of nothing would say nothing
    }
    passed = (
        figures["steps_that_differ"] == 0
        and num_ties <= limit
        and len(parted) == num_ties
        and ours.accepted[0] >= 1
    )
    return RungResult("P6", passed, figures, bounds)


def check_rates(subject: Subject, pair: EnginePair, *, min_drafts: int) -> RungResult:
    """bf16: texts that part at near ties only, and rates within the bound."""
    ours, theirs = pair.our_sums, pair.their_sums
    replayed = _replay(subject, pair)
    parted = divergences(subject, pair)
    num_drafts = int(theirs[:, 0].sum())
    figures: dict[str, Any] = {
        "prompts": len(ours),
        "drafts": int(ours[:, 0].sum()),
        "drafts_served": num_drafts,
        "accepted": ours[:, 1:].sum(0).tolist(),
        "accepted_served": theirs[:, 1:].sum(0).tolist(),
        "rates": _rates(ours),
        "rates_served": _rates(theirs),
        "rates_replayed": _rates(replayed.ours),
        "replay_agreement": replayed.agreement,
        "tau": float(tau_of(ours.sum(0)[None])[0]),
        "tau_served": float(tau_of(theirs.sum(0)[None])[0]),
        "texts_that_part": len(parted),
        "part_ulp": max((item.ulps for item in parted), default=0.0),
        "part_ulp_counts": _count_ulps(parted),
    }
    bounds: dict[str, Any] = {
        "drafts_served_at_least": min_drafts,
        "part_ulp": MAX_ULP,
        "gap": MAX_GAP,
        "replay_gap": MAX_GAP,
        "replay_agreement_at_least": MIN_AGREEMENT,
    }
    verdicts = []
    for name, left, right, is_paired in (
        ("replay_gap", replayed.ours, replayed.theirs, True),
        ("gap", ours, theirs, False),
    ):
        gaps = [a - b for a, b in zip(_rates(left), _rates(right), strict=True)]
        intervals = gap_intervals(left, right)
        reached = right.sum(0)[:-1]
        judged = [
            # Different texts: the gap alone says less about the head than its interval does.
            judge_position(
                gap, interval, num_drafts=int(count) if is_paired else 0, min_drafts=min_drafts
            )
            for gap, interval, count in zip(gaps, intervals, reached, strict=True)
        ]
        figures[name] = gaps
        figures[f"{name}_interval"] = [[i.low, i.high] for i in intervals]
        figures[f"{name}_undecided"] = [j for j, v in enumerate(judged) if v == "undecided"]
        verdicts += judged
    passed = (
        num_drafts >= min_drafts
        and figures["part_ulp"] <= MAX_ULP
        and (replayed.agreement is None or replayed.agreement >= MIN_AGREEMENT)
        and "differs" not in verdicts
    )
    return RungResult("P6", passed, figures, bounds)


def describe_engine(pairs: Sequence[EnginePair]) -> str:
    """``vllm 0.32.0``; several versions would each be named."""
    names = dict.fromkeys(f"{pair.served.engine} {pair.served.version}" for pair in pairs)
    return ", ".join(names) or "no engine"


@dataclass(frozen=True)
class _Replay:
    """Our head over the engine's own texts: sums per prompt ``[P, 1 + K]`` of either side, trimmed,
    and the share of the engine's steps in which both accept the same (``None``: it only counts).
    """

    ours: np.ndarray
    theirs: np.ndarray
    agreement: float | None


def _replay(subject: Subject, pair: EnginePair) -> _Replay:
    answers = [
        as_generation(generation.prompt_ids, served, pair.k)
        for generation, served in zip(pair.generations, pair.served.prompts, strict=True)
    ]
    predicted = replay_generations(subject, answers, pair.k, pair.dtype)
    ours = all_sums(predicted, pair.k)
    if any(served.accepted_per_step is None for served in pair.served.prompts):
        # Untrimmed on their side: at most one step of a prompt counts for more.
        return _Replay(ours, pair.their_sums, None)
    theirs = [trimmed_steps(answer, pair.k) for answer in answers]
    num_equal = 0
    for own, other in zip(predicted, theirs, strict=True):
        accepted = {step.start: step.num_accepted for step in own}
        num_equal += sum(accepted.get(step.start) == step.num_accepted for step in other)
    num_steps = sum(len(steps) for steps in theirs)
    return _Replay(ours, all_sums(theirs, pair.k), num_equal / num_steps if num_steps else 0.0)


def _count_ulps(parted: Sequence[Divergence]) -> list[int]:
    """Texts that part within 0, 1, … ulp (rounded up), and at last beyond the bound."""
    last = int(MAX_ULP) + 1
    counts = [0] * (last + 1)
    for item in parted:
        counts[math.ceil(min(item.ulps, last))] += 1
    return counts


def _rates(sums: np.ndarray) -> list[float]:
    """Pooled conditional rates of sums per prompt."""
    rates: list[float] = conditional_rates(sums.sum(0)[None])[0].tolist()
    return rates


def _set_row(run: EngineRun, name: str) -> dict[str, Any]:
    """One evaluation set's part of a run, as engines count."""
    pair = run.pair
    own = np.array([each == name for each in run.set_names])
    ours, theirs = pair.our_sums[own], pair.their_sums[own]
    parted = [
        prompt.divergence is not None
        for prompt, is_own in zip(pair.prompts, own, strict=True)
        if is_own
    ]
    return {
        "set": name,
        "dtype": dtype_name(pair.dtype),
        "k": pair.k,
        "prompts": int(own.sum()),
        "drafts": int(ours[:, 0].sum()),
        "drafts_served": int(theirs[:, 0].sum()),
        "accepted": ours[:, 1:].sum(0).tolist(),
        "accepted_served": theirs[:, 1:].sum(0).tolist(),
        "rates": _rates(ours),
        "rates_served": _rates(theirs),
        "tau": float(tau_of(ours.sum(0)[None])[0]),
        "tau_served": float(tau_of(theirs.sum(0)[None])[0]),
        "texts_that_part": sum(parted),
    }


def _describe(runs: Sequence[EngineRun]) -> str:
    parts = []
    for run in runs:
        pair = run.pair
        drafts = int(pair.their_sums[:, 0].sum())
        how = "step by step" if pair.dtype is torch.float32 else "by rate"
        parts.append(
            f"K={pair.k} {how} over {len(pair.generations)} prompts, {drafts} drafts in "
            f"{dtype_name(pair.dtype)}"
        )
    return "; ".join(parts) + "; greedy, arg-max drafts"
