"""Acceptance on text that was learnt by heart: counted as long as the decoded text is that text.

Greedy decoding leaves the recorded answer at near ties, in bfloat16 now and then, and a head that
has learnt one text says nothing about another. So a step counts while everything before its first
drafted token, and that token, are the answer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mtp_train.serving.job import DraftCounts


@dataclass(frozen=True)
class DecodedText:
    """One answer as an engine decoded it: token ids, and per verification step how many drafted
    tokens were accepted, in order. The first token comes without a draft.

    An engine that only counts has no steps (``None``); its totals stand for an answer that is
    decoded to its end.
    """

    answer_ids: Sequence[int]  # what the head was trained on
    output_ids: Sequence[int]
    accepted_per_step: Sequence[int] | None
    totals: DraftCounts | None = None


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
    counts, agreed, answered = DraftCounts.none(k), 0, 0
    for text in texts:
        same = shared_prefix(text.answer_ids, text.output_ids)
        agreed += same
        answered += len(text.answer_ids)
        if text.accepted_per_step is not None:
            counts += DraftCounts.of_steps(_steps_within(text.accepted_per_step, same), k)
        elif same == len(text.answer_ids) == len(text.output_ids):
            assert text.totals is not None, "an engine that tells no steps counts"
            counts += text.totals
    return LearntAcceptance(counts.drafts, counts.accepted, agreed, answered)


def _steps_within(accepted_per_step: Sequence[int], length: int) -> list[int]:
    """The steps whose first drafted token is one of the first ``length`` tokens."""
    kept, position = [], 1
    for count in accepted_per_step:
        if position >= length:
            break
        kept.append(count)
        position += count + 1
    return kept


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading elements are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
