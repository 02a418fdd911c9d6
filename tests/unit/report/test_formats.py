"""How numbers and names are written."""

from __future__ import annotations

import pytest

from mtp_train.report import formats
from mtp_train.report.facts import Figure


def test_numbers_have_one_spelling() -> None:
    assert formats.share(0.3238) == "32.4\u202f%"
    assert formats.times(1.0) == "1.00×"
    assert formats.decimal(-0.017, 2) == "−0.02"
    assert formats.signed(-1.72) == "−1.7"
    assert formats.signed(1.72) == "+1.7"
    assert formats.count(249954) == "249,954"
    assert formats.milliseconds(11.34) == "11.3"
    assert formats.milliseconds(408.4) == "408"
    assert formats.interval(Figure(1.3, 1.25, 1.35), 2) == "[1.25, 1.35]"
    assert formats.level(Figure(1.0, level=0.95)) == "95\u202f%"


@pytest.mark.parametrize(
    ("size", "text"),
    [(768, "768 B"), (4_393_113, "4.4 MB"), (146_281_106, "146 MB"), (5 * 10**15, "5,000 TB")],
)
def test_sizes_are_decimal(size: int, text: str) -> None:
    assert formats.data_size(size).replace("\u202f", " ") == text


def test_what_is_absent_is_a_dash() -> None:
    absent = [
        formats.share(None),
        formats.times(None),
        formats.count(None),
        formats.data_size(None),
    ]
    absent += [formats.interval(Figure(1.0)), formats.interval(None), formats.decimal(float("nan"))]
    assert set(absent) == {formats.ABSENT}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("mtbench", "MT-Bench"),
        ("mtbench/turn2", "MT-Bench, turn 2"),
        ("own prompts", "own prompts"),
    ],
)
def test_prompt_sets_are_named_as_people_write_them(name: str, shown: str) -> None:
    assert formats.set_name(name) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "yes"),
        (12345, "12,345"),
        (4.005432e-05, "4.005e-05".replace("-", "−")),
        ([0.5, None], "[0.5, –]"),
        ([], "none"),
        ("text", "text"),
        (None, "–"),
    ],
)
def test_figures_of_a_rung_are_short(value: object, text: str) -> None:
    assert formats.raw(value) == text
