"""``samples.json``: a few answers, token by token by who wrote them, and one training row.

A few of what was measured anyway: the first answer of each category, not the best one. The file
holds text of prompts and answers and is not written where ``report.samples`` is false.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any, Literal

from data_prep.token_set import TokenRow
from runtime.detokenize import Decode, split_text
from runtime.metrics import pool_acceptance
from runtime.request import Generation

MAX_SAMPLES = 8
_MAX_ROW_TOKENS = 512
_ROWS_LOOKED_AT = 256


@dataclass(frozen=True)
class SampleToken:
    """One output token. ``position``: which of the draft's tokens, from 1; 0 when the target wrote
    it.
    """

    text: str
    position: int

    @property
    def by(self) -> Literal["target", "draft"]:
        return "draft" if self.position else "target"


@dataclass(frozen=True)
class Sample:
    """One answer. ``prompt`` is the text that the model saw; ``tau`` is this answer's alone."""

    prompt_set: str
    category: str
    prompt: str
    tokens: tuple[SampleToken, ...]
    tau: float


@dataclass(frozen=True)
class TrainingRow:
    """One row of the token set. ``tokens``: text, and whether the loss counts it."""

    sample_id: str
    tokens: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Samples:
    """The content of ``samples.json``."""

    k: int
    samples: tuple[Sample, ...]
    training_row: TrainingRow | None = None

    def to_dict(self) -> dict[str, Any]:
        row = self.training_row
        return {
            "k": self.k,
            "samples": [
                {
                    "prompt_set": sample.prompt_set,
                    "category": sample.category,
                    "prompt": sample.prompt,
                    "tokens": [_token_dict(token) for token in sample.tokens],
                    "tau": sample.tau,
                }
                for sample in self.samples
            ],
            "training_row": row
            and {
                "sample_id": row.sample_id,
                "tokens": [{"text": text, "mask": mask} for text, mask in row.tokens],
            },
        }


@dataclass(frozen=True)
class Answered:
    """The generations of one prompt set and the category of each."""

    prompt_set: str
    categories: Sequence[str]
    generations: Sequence[Generation]


def choose_samples(answered: Sequence[Answered], decode: Decode, *, k: int) -> tuple[Sample, ...]:
    """At most :data:`MAX_SAMPLES`, each of another category; the prompt sets take turns."""
    firsts = []
    for item in answered:
        pairs = zip(item.categories, item.generations, strict=True)
        by_category: dict[str, Generation] = {}
        for category, generation in pairs:
            by_category.setdefault(category, generation)
        firsts.append([(item.prompt_set, *pair) for pair in by_category.items()])
    in_turn = [entry for entry in chain(*zip_longest(*firsts)) if entry is not None]
    return tuple(
        make_sample(prompt_set, category, generation, decode, k=k)
        for prompt_set, category, generation in in_turn[:MAX_SAMPLES]
    )


def make_sample(
    prompt_set: str, category: str, generation: Generation, decode: Decode, *, k: int
) -> Sample:
    """``generation`` as text with the origin of every token."""
    pieces = split_text(generation.output_ids, decode)
    return Sample(
        prompt_set=prompt_set,
        category=category,
        prompt=decode(generation.prompt_ids),
        tokens=tuple(map(SampleToken, pieces, token_origins(generation))),
        tau=pool_acceptance([generation], k).tau,
    )


def token_origins(generation: Generation) -> list[int]:
    """Per output token its position in the draft that brought it, from 1; 0: the target's own."""
    origins = [0] * len(generation.output_ids)
    for step in generation.steps:
        accepted = range(step.start, step.start + step.num_accepted)
        for position, index in enumerate(accepted, start=1):
            if index < len(origins):  # the rest was trimmed
                origins[index] = position
    return origins


def choose_training_row(rows: Iterable[TokenRow], decode: Decode) -> TrainingRow | None:
    """The first row that is short enough to be read, else the shortest of the first few."""
    candidates = list(islice(rows, _ROWS_LOOKED_AT))
    if not candidates:
        return None
    short = (row for row in candidates if len(row.input_ids) <= _MAX_ROW_TOKENS)
    row = next(short, min(candidates, key=lambda row: len(row.input_ids)))
    pieces = split_text(row.input_ids, decode)
    return TrainingRow(row.sample_id, tuple(zip(pieces, row.loss_mask, strict=True)))


def _token_dict(token: SampleToken) -> dict[str, Any]:
    if token.position:
        return {"text": token.text, "by": token.by, "position": token.position}
    return {"text": token.text, "by": token.by}
