"""What a token set covers: its rows and answer tokens by domain and by script of the prompt.

A domain is what the record itself says (``category``, ``domain``, …), inside its source; where it
says nothing the source stands alone. The evaluation sets' own mix stands in the parity report,
by task and script, beside the acceptance on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_prep.scripts import main_script

OTHERS = "others"
_DOMAIN_KEYS = ("domain", "domain1", "category", "task", "subset", "topic", "dataset")
_LONGEST_DOMAIN = 60
_MOST_PARTS = 40  # of each kind that are kept; the smallest of more are `others`


@dataclass(frozen=True)
class Origin:
    """Where a row came from. ``prompt``: what was asked, as text."""

    source: str
    domain: str = ""
    prompt: str = ""

    @property
    def label(self) -> str:
        """``source: domain``, or the source."""
        return f"{self.source}: {self.domain}" if self.domain else self.source


@dataclass(frozen=True)
class Part:
    """One domain or script of a split."""

    num_rows: int = 0
    num_answer_tokens: int = 0  # under the loss mask

    def plus(self, num_rows: int, num_answer_tokens: int) -> Part:
        return Part(self.num_rows + num_rows, self.num_answer_tokens + num_answer_tokens)


@dataclass
class CoverageCounter:
    """Counts rows one by one."""

    domains: dict[str, Part] = field(default_factory=dict)
    prompt_scripts: dict[str, Part] = field(default_factory=dict)

    def add(self, origin: Origin, num_answer_tokens: int) -> None:
        script = main_script(origin.prompt)
        for parts, label in ((self.domains, origin.label), (self.prompt_scripts, script)):
            parts[label] = parts.get(label, Part()).plus(1, num_answer_tokens)


def largest_parts(parts: Mapping[str, Part], *, most: int = _MOST_PARTS) -> dict[str, Part]:
    """Largest first by rows; what is beyond ``most`` as one part, so that the sums stay."""
    ordered = sorted(parts.items(), key=lambda item: (-item[1].num_rows, item[0]))
    found = dict(ordered[:most])
    for _, part in ordered[most:]:
        found[OTHERS] = found.get(OTHERS, Part()).plus(part.num_rows, part.num_answer_tokens)
    return found


def record_domain(row: Mapping[str, Any]) -> str:
    """The domain that a raw record names, or an empty text."""
    for key in _DOMAIN_KEYS:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return " ".join(value.split())[:_LONGEST_DOMAIN]
    return ""
