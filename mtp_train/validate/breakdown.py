"""Acceptance by task, by script of the prompt, by context length, inside and beyond the trained
length, by kind of token.

A draft (a verification step with all K tokens) belongs to exactly one label of each dimension, by
where its first token stands; so the labels of a dimension add up to the pooled counts exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mtp_train.validate.measure import Measured, tau_interval
from mtp_train.validate.report import BreakdownRow, Dimension
from mtp_train.validate.token_kinds import KINDS, Kind, token_kinds
from runtime.detokenize import Decode, split_text
from runtime.metrics import pool_acceptance
from runtime.request import Generation, SpecStep

LabelOf = Callable[[int, SpecStep], str]  # index of the generation, step -> label

_FIRST_CONTEXT = 128  # tokens; every further bucket is as wide as all before it
_PROMPT_TAIL = 32  # tokens of the prompt in which a thought may have been opened


def break_down(
    measured: Measured,
    *,
    categories: Sequence[str],
    scripts: Sequence[str] = (),
    decode: Decode | None = None,
    trained_len: int | None = None,
) -> list[BreakdownRow]:
    """Rows of every dimension. ``categories``: one per generation, or none when the prompt set is
    one task; ``scripts``: one each, or none and that dimension is left out. Without ``decode`` the
    kinds of token are left out: there is no text to look at. ``trained_len``: tokens of the longest
    trained sample; without it that dimension is left out.
    """
    generations = measured.generations
    tasks = categories or [measured.prompt_set] * len(generations)
    assert len(tasks) == len(generations), "one category per prompt"
    rows = rows_by_label(measured, "task", lambda index, step: tasks[index])
    if scripts:
        assert len(scripts) == len(generations), "one script per prompt"
        rows += rows_by_label(measured, "script", lambda index, step: scripts[index])
    positions = [context_len(g, step) for g in generations for step in g.steps]
    rows += rows_by_label(
        measured,
        "context",
        lambda index, step: context_label(context_len(generations[index], step)),
        order=[context_label(position) for position in sorted(positions)],
    )
    if trained_len is not None:
        names = (f"up to the trained {trained_len:,}", f"beyond the trained {trained_len:,}")
        rows += rows_by_label(
            measured,
            "trained_length",
            lambda index, step: names[context_len(generations[index], step) > trained_len],
            order=names,
        )
    if decode is not None:
        kinds = [answer_kinds(generation, decode) for generation in generations]
        rows += rows_by_label(
            measured, "token_kind", lambda index, step: kinds[index][step.start], order=KINDS
        )
    return rows


def rows_by_label(
    measured: Measured, dimension: Dimension, label_of: LabelOf, *, order: Sequence[str] = ()
) -> list[BreakdownRow]:
    """One row per label that has drafts: those of ``order`` first, others as they appear."""
    k = measured.k
    parts: dict[str, list[Generation]] = {label: [] for label in order}
    for index, generation in enumerate(measured.generations):
        own: dict[str, list[SpecStep]] = {}
        for step in generation.steps:
            if step.k == k:  # clipped steps are no drafts
                own.setdefault(label_of(index, step), []).append(step)
        for label, steps in own.items():
            parts.setdefault(label, []).append(replace(generation, steps=tuple(steps)))
    return [_row(measured, dimension, label, part) for label, part in parts.items() if part]


def context_len(generation: Generation, step: SpecStep) -> int:
    """Tokens before the first one that ``step`` drafted."""
    return len(generation.prompt_ids) + step.start


def furthest_context(measured: Sequence[Measured]) -> int | None:
    """The longest context that any whole draft had; ``None`` without drafts."""
    return max(
        (
            context_len(generation, step)
            for item in measured
            for generation in item.generations
            for step in generation.steps
            if step.k == item.k
        ),
        default=None,
    )


def context_label(num_tokens: int) -> str:
    """``0–128 tokens``, ``128–256 tokens``, ``256–512 tokens``, ``512–1k tokens``, …"""
    low, high = 0, _FIRST_CONTEXT
    while num_tokens >= high:
        low, high = high, 2 * high
    return f"{_short(low)}–{_short(high)} tokens"


def answer_kinds(generation: Generation, decode: Decode) -> list[Kind]:
    """The kind of every output token."""
    pieces = split_text(generation.output_ids, decode)
    return token_kinds(pieces, prompt=decode(generation.prompt_ids[-_PROMPT_TAIL:]))


def _row(
    measured: Measured, dimension: Dimension, label: str, part: Sequence[Generation]
) -> BreakdownRow:
    counts = pool_acceptance(part, measured.k)
    interval = tau_interval(part, measured.k)
    return BreakdownRow(
        dimension=dimension,
        label=label,
        prompt_set=measured.prompt_set,
        k=measured.k,
        temperature=measured.temperature,
        num_drafts=counts.num_drafts,
        accepted=counts.accepted,
        interval=(interval.low, interval.high) if len(part) > 1 else None,
        num_prompts=len(part),
    )


def _short(num_tokens: int) -> str:
    return f"{num_tokens // 1024}k" if num_tokens >= 1024 else str(num_tokens)
