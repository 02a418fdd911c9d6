"""What `mtp generate` says about an answer: lines for a person, one JSON object for a program."""

from __future__ import annotations

import json
from collections import Counter

import torch

from mtp_train.generation import Answer, Answering, TimedRun
from runtime.detokenize import split_text


def token_origins(run: TimedRun) -> list[int]:
    """Per output token its position in the draft it came from; 0: written by the target."""
    origins = [0] * len(run.output_ids)
    for step in run.steps:
        end = min(step.start + step.num_accepted, len(origins))
        for index in range(step.start, end):
            origins[index] = index - step.start + 1
    return origins


def describe(answer: Answer, answering: Answering) -> str:
    """A few lines of statistics for a person."""
    config, run = answering.config, answer.run
    ended = {"stop": "ended by itself", "length": "length limit", "abort": "stopped"}
    drafts = f"{_drafts(answering)}, " if answering.k else ""
    lines = [
        f"answer  {len(run.output_ids)} tokens ({ended[run.finish_reason]}), {drafts}"
        f"T={config.generate.temperature:g}"
    ]
    name = "draft " if answering.k else "plain "
    lines.append(f"{name}  {_speed(run)}")
    if answer.plain is not None:
        lines.append(f"plain   {_speed(answer.plain)}; {_compare_texts(answer, answering)}")
    if answer.speedup is not None:
        verdict = "faster" if answer.speedup > 1 else "slower"
        has_model = config.generate.draft_model or config.generate.draft_layers
        is_measured = not config.runtime.is_tree and not has_model
        better = "; mtp validate measures it with an interval" if is_measured else ""
        lines.append(
            f"        with the draft {answer.speedup:.2f} times as fast: {verdict} here "
            f"(one run each{better})"
        )
    if answer.acceptance is not None:
        rates = " ".join(f"{rate:.2f}" for rate in answer.acceptance.rates)
        lines.append(
            f"τ       {answer.acceptance.tau:.2f} tokens per step over "
            f"{answer.acceptance.num_drafts} steps; accepted by position {rates}"
        )
    if answering.k and config.runtime.draft_length == "measured":
        lines.append(f"chosen  {_chosen(answer, answering)}")
    return "\n".join(lines)


def to_json(answer: Answer, answering: Answering) -> str:
    """Everything as one JSON object; rates in tokens/s, times in seconds."""
    config, run, acceptance = answering.config, answer.run, answer.acceptance
    pieces = split_text(run.output_ids, answering.decode)
    rows = zip(run.output_ids, pieces, token_origins(run), strict=True)
    tokens = [
        {"id": token, "text": piece, "by": "draft" if position else "target"}
        | ({"position": position} if position else {})
        for token, piece, position in rows
    ]
    values = {
        "prompt": answering.prompt,
        "text": "".join(pieces),
        "finish_reason": run.finish_reason,
        "interrupted": answer.interrupted,
        "prompt_tokens": len(answering.prompt_ids),
        "tokens": tokens,
        "k": answering.k,
        "temperature": config.generate.temperature,
        "seed": config.seed,
        "verify": config.runtime.verify,
        "draft_mode": config.runtime.draft_mode,
        "schedule": config.runtime.schedule,
        "tokens_per_s": run.tokens_per_s,
        "first_token_s": run.first_token_s,
        "acceptance": acceptance.to_dict() if acceptance else None,
        "plain_tokens_per_s": answer.plain.tokens_per_s if answer.plain else None,
        "plain_first_token_s": answer.plain.first_token_s if answer.plain else None,
        "first_difference": answer.first_difference,
        "speedup": answer.speedup,
    }
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def _drafts(answering: Answering) -> str:
    runtime = answering.config.runtime
    if not runtime.is_tree:
        return f"K={answering.k}"
    kind = runtime.schedule.removesuffix("_tree")
    return f"{kind} tree of {runtime.tree_nodes} up to K={answering.k} deep"


def _chosen(answer: Answer, answering: Answering) -> str:
    """How many steps drafted how much, and the last reason for it."""
    counts = Counter(len(step.draft_ids) for step in answer.run.steps)
    emitted = sum(step.num_accepted + 1 for step in answer.run.steps)
    counts[0] += max(0, len(answer.run.output_ids) - 1 - emitted)  # steps without a draft
    assert answering.draft_engine is not None, "nothing drafts without a draft engine"
    chooser = answering.draft_engine.scheduler.chooser
    steps = ", ".join(f"K={k} in {counts[k]} steps" for k in sorted(counts) if counts[k])
    reason = f"; {chooser.choices[-1].reason}" if chooser and chooser.choices else ""
    return steps + reason


def _speed(run: TimedRun) -> str:
    return f"{run.tokens_per_s:.1f} tokens/s, first token after {run.first_token_s:.2f} s"


def _compare_texts(answer: Answer, answering: Answering) -> str:
    assert answer.plain is not None
    config, index = answering.config, answer.first_difference
    if index is None:
        count = len(answer.plain.output_ids)
        return "the same tokens" if count == len(answer.run.output_ids) else f"stopped at {count}"
    if config.runtime.verify == "rejection" and config.generate.temperature > 0:
        return "other tokens (rejection sampling draws anew)"
    if answering.plain_engine.target.dtype is torch.float32:
        return f"OTHER tokens from number {index + 1} on: run mtp validate, rung P4"
    return f"the same up to token {index} (near ties fall either way in bfloat16; P4 checks them)"
