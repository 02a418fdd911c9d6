"""Acceptance on text that was learnt by heart: counted as long as the decoded text is that text.

Greedy decoding leaves the recorded answer at near ties, in bfloat16 now and then, and a head that
has learnt one text says nothing about another. So a step counts while everything before its first
drafted token, and that token, are the answer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodedText:
    """One answer as an engine decoded it: token ids, and per verification step how many drafted
    tokens were accepted, in order. The first token comes without a draft.
    """

    answer_ids: Sequence[int]  # what the head was trained on
    output_ids: Sequence[int]
    accepted_per_step: Sequence[int]


@dataclass(frozen=True)
class LearntAcceptance:
    """``accepted[j]``: counted steps whose first j + 1 drafts were accepted. ``agreed`` of
    ``answered`` answer tokens were decoded before the text left the answer.
    """

    steps: int
    accepted: tuple[int, ...]
    agreed: int
    answered: int

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(count / self.steps if self.steps else 0.0 for count in self.accepted)

    @property
    def agreement(self) -> float:
        return self.agreed / self.answered if self.answered else 0.0


def count_learnt(texts: Iterable[DecodedText], *, k: int) -> LearntAcceptance:
    """Pool the steps of ``texts`` with ``k`` drafted tokens each."""
    steps, accepted, agreed, answered = 0, [0] * k, 0, 0
    for text in texts:
        same = shared_prefix(text.answer_ids, text.output_ids)
        agreed += same
        answered += len(text.answer_ids)
        position = 1
        for count in text.accepted_per_step:
            if position >= same:
                break
            steps += 1
            for j in range(min(count, k)):
                accepted[j] += 1
            position += count + 1
    return LearntAcceptance(steps, tuple(accepted), agreed, answered)


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading elements are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
