"""P4: is output unchanged by speculation, and is the draft's state right?

All in fp32. Greedy output may leave plain decoding only at a tie (fp64 gap of the two best logits
below 1e-4), at most once in 10,000 tokens; keyed output may not. Rejection sampling is held against
exact scores of a tiny model, and after every step the draft's K/V and relay state against a
from-scratch recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtp_train.validate.measure import decode_waves, fit_engine, make_requests
from mtp_train.validate.recompute import draft_state_errors
from mtp_train.validate.rejection import joint_g_test, tiny_pair
from mtp_train.validate.report import RungResult
from mtp_train.validate.subject import Subject
from runtime.config import TREE_SCHEDULES, ScheduleName, VerifyMode
from runtime.request import Generation

TIE_GAP = 1e-4
TOKENS_PER_TIE = 10_000
STATE_BOUND = 1e-4
KEYED_TEMPERATURE = 0.8


@dataclass(frozen=True)
class P4Sizes:
    """How much is decoded: prompts and tokens for the output, requests and steps for the state."""

    max_tokens: int = 64
    state_requests: int = 3
    state_tokens: int = 16
    triples: int = 6_000


def check(
    subject: Subject, prompts: Sequence[Sequence[int]], *, k: int, sizes: P4Sizes | None = None
) -> RungResult:
    """``prompts``: token ids; every second is also decoded keyed, the first ``state_requests`` are
    also used for the state.
    """
    sizes = sizes or P4Sizes()
    greedy = compare_outputs(subject, prompts, k=k, max_tokens=sizes.max_tokens, temperature=0.0)
    keyed = compare_outputs(
        subject, prompts[::2], k=k, max_tokens=sizes.max_tokens, temperature=KEYED_TEMPERATURE
    )
    num_ties = sum(gap < TIE_GAP for gap in greedy.gaps)
    figures: dict[str, Any] = {
        "greedy_tokens": greedy.num_tokens,
        "greedy_ties": num_ties,
        "greedy_differences": len(greedy.gaps) - num_ties,
        "keyed_tokens": keyed.num_tokens,
        "keyed_differences": keyed.num_different,
    }
    bounds: dict[str, Any] = {
        # One tie in fewer tokens says nothing about the rate.
        "greedy_ties": max(1, greedy.num_tokens // TOKENS_PER_TIE),
        "greedy_differences": 0,
        "keyed_differences": 0,
    }
    exactly = subject.unrounded()  # a tree's attention is merged: last bits differ from a chain's
    for schedule in TREE_SCHEDULES:  # exact at any temperature, by keyed draws
        trees = compare_outputs(
            exactly,
            prompts[::4],
            k=k,
            max_tokens=sizes.max_tokens,
            temperature=KEYED_TEMPERATURE,
            schedule=schedule,
        )
        figures[f"{schedule}_keyed_differences"] = trees.num_different
        bounds[f"{schedule}_keyed_differences"] = 0
    model, head = tiny_pair()
    for mode in ("argmax", "sampled"):
        test = joint_g_test(model, head, k=2, draft_mode=mode, count=sizes.triples)
        figures[f"rejection_{mode}_g"], bounds[f"rejection_{mode}_g"] = test.statistic, test.limit
    worst, checked = state_error(
        subject,
        prompts[: sizes.state_requests],
        k=k,
        max_tokens=sizes.state_tokens,
    )
    figures["draft_state_error"], bounds["draft_state_error"] = worst, STATE_BOUND
    figures["draft_states_checked"] = checked
    passed = (
        greedy.num_tokens > 0
        and checked > 0
        and all(figures[name] <= bound for name, bound in bounds.items())
    )
    note = (
        f"output with drafts against plain output over {len(prompts)} prompts, K={k}, greedy and "
        f"keyed (T={KEYED_TEMPERATURE}), "
        f"trees keyed{'' if exactly is subject else ' (without rounded inputs)'}; rejection "
        "sampling against exact probabilities; draft state against a recompute"
    )
    return RungResult("P4", passed, figures, bounds, note=note)


@dataclass(frozen=True)
class OutputComparison:
    """Speculative against plain output. ``gaps``: fp64 gap of the two best logits at the first
    difference of each prompt whose output differs (greedy only).
    """

    num_tokens: int
    num_different: int
    gaps: tuple[float, ...]


def compare_outputs(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_tokens: int,
    temperature: float,
    schedule: ScheduleName = "auto",
) -> OutputComparison:
    """Decode the prompts twice in fp32, with and without the head."""
    dtype = torch.float32
    requests = make_requests(prompts, max_tokens=max_tokens, temperature=temperature)
    verify: VerifyMode = "keyed" if temperature else "greedy"
    config = replace(subject.engine_config, verify=verify, draft_mode="argmax")
    target = subject.target(dtype)
    plain = decode_waves(target, requests, engine_config=config)
    drafting = replace(config, schedule=schedule)
    spec = decode_waves(target, requests, engine_config=drafting, head=subject.head(dtype), k=k)
    pairs = [(a, b) for a, b in zip(plain, spec, strict=True) if a.output_ids != b.output_ids]
    return OutputComparison(
        num_tokens=sum(len(generation.output_ids) for generation in plain),
        num_different=len(pairs),
        gaps=tuple(oracle_gaps(subject, pairs)) if not temperature else (),
    )


def state_error(
    subject: Subject, prompts: Sequence[Sequence[int]], *, k: int, max_tokens: int
) -> tuple[float, int]:
    """Largest relative error of any draft state after any step, and how many were compared.

    Requests arrive every third step, so that prefill, mixed and speculative steps all occur.
    """
    requests = make_requests(prompts, max_tokens=max_tokens, ignore_eos=True)
    config = fit_engine(
        subject.engine_config,
        [len(prompt) for prompt in prompts],
        max_tokens=max_tokens,
        k=k,
        max_running=len(prompts),
    )
    engine = subject.engine(torch.float32, replace(config, check_integrity=True), with_head=True)
    waiting, worst, checked, steps = list(requests), 0.0, 0, 0
    while waiting or engine.has_work:
        if waiting and steps % 3 == 0:
            engine.add(waiting.pop(0))
        if engine.has_work:
            engine.step()
            for item in draft_state_errors(engine):
                worst = max(worst, item.error)
                checked += 1
        steps += 1
    return worst, checked


def oracle_gaps(subject: Subject, pairs: Sequence[tuple[Generation, Generation]]) -> list[float]:
    """Gap of the two best logits at the first difference of each pair, Hugging Face in fp64."""
    if not pairs:
        return []
    from transformers import AutoModelForCausalLM

    path = str(subject.target(torch.float32).path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    gaps = []
    for plain, spec in pairs:
        same = next(
            (
                index
                for index, (a, b) in enumerate(zip(plain.output_ids, spec.output_ids, strict=False))
                if a != b
            ),
            None,
        )
        if same is None:  # one output is longer: no tie explains that
            gaps.append(float("inf"))
            continue
        ids = torch.tensor([[*plain.prompt_ids, *plain.output_ids[:same]]])
        with torch.inference_mode():
            best = model(ids).logits[0, -1].topk(2)
        is_about_these = set(best.indices.tolist()) == {
            plain.output_ids[same],
            spec.output_ids[same],
        }
        gaps.append(float(best.values[0] - best.values[1]) if is_about_these else float("inf"))
    return gaps
