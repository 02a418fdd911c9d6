"""Unicode scripts of texts, by the first word of each letter's name (the standard library has no
table of scripts).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping
from functools import cache

NO_LETTERS = "no letters"
_MOST_CHARACTERS = 4000  # of a text that its main script is told by


def script_shares(characters: Mapping[str, int]) -> dict[str, float]:
    """Share of each Unicode script among the letters, largest first."""
    counts = _count(characters)
    total = counts.total()
    return {script: count / total for script, count in counts.most_common()} if total else {}


def main_script(text: str) -> str:
    """The script that most letters of the text's beginning are of, or ``no letters``."""
    counts = _count(Counter(text[:_MOST_CHARACTERS]))
    return counts.most_common(1)[0][0] if counts else NO_LETTERS


def _count(characters: Mapping[str, int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for character, count in characters.items():
        if character.isalpha():
            counts[_script(character)] += count
    return counts


@cache
def _script(character: str) -> str:
    first = unicodedata.name(character, "Unknown").split()[0].split("-")[0]
    return {"CJK": "Han", "FULLWIDTH": "Latin", "HALFWIDTH": "Katakana"}.get(
        first, first.capitalize()
    )
