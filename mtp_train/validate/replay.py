"""Replay: the acceptance that training would predict, over what the runtime really generated.

The training forward unrolls K steps from each start of the runtime's own greedy output; a start
that accepts a drafts moves on to start + a + 1. Counted after trimming, because only the trimmed
output is there to compare with.

Alignment: with a prompt of P tokens, output index s is token P + s. The first token comes from
prefill (s = 0); the step that emits s first drafted from head row ``P + s - 2``, which took
``g`` of that row and the token before s.

Shape legend: S starts of one generation, K steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from mtp_train.heads.base import TrainingHead
from mtp_train.validate.unroll import HiddenSequence, training_drafts
from runtime.request import Generation, SpecStep


@dataclass(frozen=True)
class ReplayedStep:
    """One predicted verification step; ``num_accepted`` never passes the end of the output."""

    start: int
    draft_ids: tuple[int, ...]
    num_accepted: int


def replay(
    head: TrainingHead,
    generations: Sequence[Generation],
    hidden: Sequence[HiddenSequence],
    *,
    k: int,
    embedding_VD: torch.Tensor,
    lm_heads: Sequence[torch.Tensor],
    draft_columns: torch.Tensor | None = None,
    max_rows: int = 4096,
) -> list[list[ReplayedStep]]:
    """Predicted steps per generation. ``hidden``: the target's states over prompt + output.

    At most about ``max_rows`` rows are packed into one training forward.
    """
    drafts: list[torch.Tensor] = []
    for group in _groups(hidden, max_rows):
        drafts += training_drafts(
            head,
            [hidden[index] for index in group],
            [_starts(generations[index]) for index in group],
            num_steps=k,
            embedding_VD=embedding_VD,
            lm_heads=lm_heads,
            draft_columns=draft_columns,
        )
    return [
        walk(generation, own_SK.tolist())
        for generation, own_SK in zip(generations, drafts, strict=True)
    ]


def walk(generation: Generation, drafts_SK: Sequence[Sequence[int]]) -> list[ReplayedStep]:
    """Walk over the output; ``drafts_SK[s - 1]`` are the drafts for output index s.

    Tokens that the runtime decoded without drafting (it does while a prompt shares the batch) are
    skipped.
    """
    return walk_output(generation.output_ids, drafts_SK, skipped=undrafted_tokens(generation))


def walk_output(
    output: Sequence[int],
    drafts_SK: Sequence[Sequence[int]],
    *,
    skipped: Collection[int] = frozenset(),
) -> list[ReplayedStep]:
    """The steps over an output; indices of it that are ``skipped`` were emitted by none."""
    steps = []
    position = 1
    while position < len(output):
        if position in skipped:
            position += 1
            continue
        drafted = drafts_SK[position - 1]
        accepted = 0
        for token, wanted in zip(drafted, output[position:], strict=False):
            if token != wanted:
                break
            accepted += 1
        steps.append(ReplayedStep(position, tuple(drafted), accepted))
        position += accepted + 1
    return steps


def undrafted_tokens(generation: Generation) -> set[int]:
    """Output indices after the first that no verification step emitted."""
    emitted = {
        index
        for step in generation.steps
        for index in range(step.start, step.start + step.num_accepted + 1)
    }
    return set(range(1, len(generation.output_ids))) - emitted


def trimmed_steps(generation: Generation, k: int) -> list[ReplayedStep]:
    """The runtime's own steps in the replay's terms."""
    for step in generation.steps:
        assert len(step.draft_ids) == k, "a step was clipped at max_model_len; give it room"
    return [ReplayedStep(s.start, s.draft_ids, _kept(s, generation)) for s in generation.steps]


def _kept(step: SpecStep, generation: Generation) -> int:
    return min(step.num_accepted, len(generation.output_ids) - step.start)


def _starts(generation: Generation) -> list[int]:
    first = len(generation.prompt_ids) - 1
    return list(range(first, first + len(generation.output_ids) - 1))


def _groups(hidden: Sequence[HiddenSequence], max_rows: int) -> list[list[int]]:
    groups: list[list[int]] = []
    rows = 0
    for index, sequence in enumerate(hidden):
        size = len(sequence.input_ids)
        if not groups or rows + size > max_rows:
            groups.append([])
            rows = 0
        groups[-1].append(index)
        rows += size
    return groups
