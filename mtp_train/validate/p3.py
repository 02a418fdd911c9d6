"""P3: is the acceptance that training would predict the one that the runtime measures?

In fp32 the replayed steps must *equal* the runtime's, drafts and accepted counts alike. In the
run's dtype the conditional rates may differ by 1.5 points. Too few drafts is a failure, not a pass.
Few drafts get as far as the later positions: one decided for fewer drafts than the minimum fails
when its whole prompt-clustered bootstrap interval (family-wise 99 %) lies beyond the bound, and is
reported as undecided, which is no pass of that position, when its interval touches the bound.

Shape legend: P prompts, K positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mtp_train.validate.bootstrap import prompt_interval
from mtp_train.validate.measure import decode_waves, make_requests
from mtp_train.validate.p2 import hidden_sequences
from mtp_train.validate.rates import (
    MAX_GAP,
    all_sums,
    conditional_rates,
    gap_intervals,
    judge_position,
    tau_of,
)
from mtp_train.validate.replay import ReplayedStep, replay, trimmed_steps, undrafted_tokens
from mtp_train.validate.report import RungResult
from mtp_train.validate.subject import Subject, dtype_name
from mtp_train.validate.tree_replay import TreeReplay, replay_trees
from runtime.config import TREE_SCHEDULES, ScheduleName
from runtime.request import Generation

TREE_NODES = 8
_TREE_PROMPTS = 4


def check(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_tokens: int,
    min_drafts: int,
    served: Sequence[Generation] = (),
) -> RungResult:
    """``prompts`` are decoded in fp32. ``served`` are greedy generations of the runtime in the
    run's dtype; they are ignored where that is fp32: the first part is the stronger statement.
    """
    requests = make_requests(prompts, max_tokens=max_tokens)
    exact = decode_waves(
        subject.target(torch.float32),
        requests,
        engine_config=subject.engine_config,
        head=subject.head(torch.float32),
        k=k,
    )
    predicted = replay_generations(subject, exact, k, torch.float32)
    wrong, total, drafts = _compare_steps(predicted, exact, k)
    figures: dict[str, Any] = {"float32_steps": total, "float32_steps_that_differ": wrong}
    figures["float32_drafts_that_differ"] = drafts
    skipped = sum(len(undrafted_tokens(generation)) for generation in exact)
    figures["float32_tokens_without_draft"] = skipped
    bounds: dict[str, Any] = {"float32_steps_that_differ": 0, "float32_tokens_without_draft": 0}
    passed = total > 0 and wrong == 0 and skipped == 0
    exactly = subject.unrounded()  # a tree's attention is merged: last bits differ from a chain's
    for schedule in TREE_SCHEDULES:
        trees = _replay_trees(exactly, prompts[:_TREE_PROMPTS], schedule, k, max_tokens)
        figures[f"float32_{schedule}_nodes"] = trees.num_nodes
        for what, count in (("nodes", trees.wrong_nodes), ("steps", trees.wrong_steps)):
            figures[f"float32_{schedule}_{what}_that_differ"] = count
            bounds[f"float32_{schedule}_{what}_that_differ"] = 0
        passed = passed and trees.num_nodes > 0 and not trees.wrong_nodes + trees.wrong_steps
    if subject.runtime_dtype is torch.float32:
        figures |= _rate_figures("float32", all_sums(predicted, k), _served_sums(exact, k), k)
    else:
        is_close, more, limits = _compare_rates(subject, served, k, min_drafts)
        figures |= more
        bounds |= limits
        passed = passed and is_close
    name = dtype_name(subject.runtime_dtype)
    note = f"acceptance replayed by the training forward, K={k}, greedy, arg-max drafts: "
    note += (
        f"step by step over {len(prompts)} prompts in float32, trees of {TREE_NODES} nodes node "
        f"by node over {len(prompts[:_TREE_PROMPTS])}"
    )
    if exactly is not subject:
        note += " (without rounded inputs)"
    if subject.runtime_dtype is not torch.float32:
        note += f", by rate over {len(served)} in {name}"
        note += _describe_undecided(figures, name, min_drafts)
    return RungResult("P3", passed, figures, bounds, note=note)


def replay_generations(
    subject: Subject, generations: Sequence[Generation], k: int, dtype: torch.dtype
) -> list[list[ReplayedStep]]:
    """Training-side replay of runtime generations in ``dtype``."""
    hidden = hidden_sequences(subject, [[*g.prompt_ids, *g.output_ids] for g in generations], dtype)
    return replay(
        subject.training_head(dtype),
        generations,
        hidden,
        k=k,
        embedding_VD=subject.embedding(dtype),
        lm_heads=subject.draft_lm_heads(dtype),
        draft_columns=subject.draft_columns(),
    )


def _replay_trees(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    schedule: ScheduleName,
    k: int,
    max_tokens: int,
) -> TreeReplay:
    dtype = torch.float32
    config = replace(
        subject.engine_config,
        schedule=schedule,
        tree_nodes=TREE_NODES,
        verify="greedy",
        draft_mode="argmax",
    )
    generations = decode_waves(
        subject.target(dtype),
        make_requests(prompts, max_tokens=max_tokens),
        engine_config=config,
        head=subject.head(dtype),
        k=k,
    )
    sequences = [[*g.prompt_ids, *g.output_ids] for g in generations]
    return replay_trees(
        subject.training_head(dtype),
        generations,
        hidden_sequences(subject, sequences, dtype),
        embedding_VD=subject.embedding(dtype),
        lm_heads=subject.draft_lm_heads(dtype),
        draft_columns=subject.draft_columns(),
    )


def _compare_steps(
    predicted: Sequence[Sequence[ReplayedStep]], generations: Sequence[Generation], k: int
) -> tuple[int, int, int]:
    """Steps that differ, steps in all, and single drafts that differ."""
    wrong = total = drafts = 0
    for ours, generation in zip(predicted, generations, strict=True):
        theirs = trimmed_steps(generation, k)
        total += max(len(ours), len(theirs))
        wrong += abs(len(ours) - len(theirs))
        for a, b in zip(ours, theirs, strict=False):
            wrong += a != b
            drafts += sum(x != y for x, y in zip(a.draft_ids, b.draft_ids, strict=True))
    return wrong, total, drafts


def _compare_rates(
    subject: Subject, generations: Sequence[Generation], k: int, min_drafts: int
) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    name = dtype_name(subject.runtime_dtype)
    num_drafts = sum(len(generation.steps) for generation in generations)
    figures: dict[str, Any] = {f"{name}_drafts": num_drafts}
    bounds: dict[str, Any] = {f"{name}_drafts_at_least": min_drafts, f"{name}_gap": MAX_GAP}
    if num_drafts < min_drafts or not generations:
        return False, figures, bounds
    predicted = replay_generations(subject, generations, k, subject.runtime_dtype)
    ours, theirs = all_sums(predicted, k), _served_sums(generations, k)
    figures |= _rate_figures(name, ours, theirs, k)
    gaps = figures[f"{name}_gap"]
    intervals = gap_intervals(ours, theirs)
    figures[f"{name}_gap_interval"] = [[i.low, i.high] for i in intervals]
    reached = theirs.sum(0)[:-1]  # drafts that position j was decided for
    verdicts = [
        judge_position(gap, interval, num_drafts=count, min_drafts=min_drafts)
        for gap, count, interval in zip(gaps, reached, intervals, strict=True)
    ]
    # Indices into the lists above, from 0.
    figures[f"{name}_undecided"] = [j for j, v in enumerate(verdicts) if v == "undecided"]
    return "differs" not in verdicts, figures, bounds


def _rate_figures(name: str, ours: np.ndarray, theirs: np.ndarray, k: int) -> dict[str, Any]:
    """Both sides' conditional rates, their gap, and both sides' tau with its 95 % interval.

    ``ours`` and ``theirs``: sums per prompt, ``[P, 1 + K]``.
    """
    trained = conditional_rates(ours.sum(0)[None])[0]
    served = conditional_rates(theirs.sum(0)[None])[0]
    figures: dict[str, Any] = {
        f"{name}_prompts": len(ours),
        f"{name}_training": trained.tolist(),
        f"{name}_runtime": served.tolist(),
        f"{name}_gap": (trained - served).tolist(),
    }
    for side, sums in (("training", ours), ("runtime", theirs)):
        interval = prompt_interval(sums, tau_of)
        figures[f"{name}_{side}_tau"] = float(tau_of(sums.sum(0)[None])[0])
        figures[f"{name}_{side}_tau_interval"] = [interval.low, interval.high]
    return figures


def _describe_undecided(figures: Mapping[str, Any], name: str, min_drafts: int) -> str:
    """Positions as people count them, from 1; empty when all are decided."""
    undecided = figures.get(f"{name}_undecided")
    if not undecided:
        return ""
    positions = " and ".join(str(j + 1) for j in undecided)
    return (
        f"; undecided at position {positions}: fewer than {min_drafts} drafts get that far, too "
        "few to tell whether the rates agree"
    )


def _served_sums(generations: Sequence[Generation], k: int) -> np.ndarray:
    return all_sums([trimmed_steps(generation, k) for generation in generations], k)
