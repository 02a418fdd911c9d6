"""Answers as recorded against answers of the target itself: runs that differ in nothing else.

Equal budget is demanded, not assumed: both heads have seen about as many tokens, each as often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_train.compare.facts import AnswersPair, RunRecords
from mtp_train.compare.recipe import compared_settings
from mtp_train.compare.statistics import Measured, difference

_ENABLED = "data.regenerate.enabled"
_SAME_BUDGET = 0.1  # tokens may differ by this share
# How answers are got and bounded, how many rows that makes, and where these lie.
_FREE = (
    "data.path",
    "data.max_tokens_total",
    "data.max_conversations",
    "data.max_answer_tokens",
    "data.cut_long_answers",
    "data.regenerate.",
    "features.",
    "trainer.max_tokens",
    "trainer.max_steps",
)


def answers_pairs(measured: Sequence[tuple[str, Measured]]) -> tuple[AnswersPair, ...]:
    """Every pair of equal settings, seed and budget, in the order of the runs."""
    found = []
    for recorded_label, recorded in measured:
        if _is_regenerated(recorded.records) is not False:
            continue
        for label, one in measured:
            if _is_regenerated(one.records) is not True:
                continue
            if not _are_alike(recorded.records, one.records):
                continue
            gap = difference(one, recorded)
            if gap is not None:
                tokens = (_distinct(recorded.records), _distinct(one.records))
                found.append(AnswersPair(recorded_label, label, tokens, gap))
    return tuple(found)


def _is_regenerated(records: RunRecords) -> bool | None:
    value: Any = records.settings
    for part in _ENABLED.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, bool) else None


def _are_alike(one: RunRecords, other: RunRecords) -> bool:
    pairs = (
        (_distinct(one), _distinct(other)),
        (one.cost.trained_tokens or 0, other.cost.trained_tokens or 0),
    )
    if any(not 0 < max(pair) <= (1 + _SAME_BUDGET) * min(pair) for pair in pairs):
        return False
    return compared_settings(one, free=_FREE) == compared_settings(other, free=_FREE)


def _distinct(records: RunRecords) -> int:
    return records.cost.distinct_tokens or 0
