"""The prompts of `tests.bench.context`: exact lengths, whole conversations, shorter ones inside."""

from __future__ import annotations

import pytest

from tests.bench.context import fill, make_contexts

ROWS = [(1, 2, 3), (4, 5), (6, 7, 8, 9)]


def test_contexts_are_whole_rows_and_rows_are_used_once_before_any_is_again() -> None:
    assert make_contexts(ROWS, count=3, length=4) == [
        (1, 2, 3, 4, 5),
        (6, 7, 8, 9),
        (1, 2, 3, 4, 5),
    ]
    with pytest.raises(ValueError, match="no rows"):
        make_contexts([], count=1, length=4)


def test_a_prompt_has_its_length_and_ends_with_the_shorter_ones_context() -> None:
    question, context = (50, 51), tuple(range(20))
    short, long = fill(question, context, 6), fill(question, context, 12)
    assert (len(short), len(long)) == (6, 12)
    assert short == (16, 17, 18, 19, 50, 51)
    assert long[-6:] == short
    assert fill(question, context, 0) == question
    assert fill(question, context, 2) == question, "no room"
