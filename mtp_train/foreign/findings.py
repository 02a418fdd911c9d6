"""What is said about a head directory: one line each, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # worst first


@dataclass(frozen=True)
class Finding:
    """``field``: a tensor, a key of ``config.json`` or a file. ``value``: what is there;
    ``allowed``: what should be; ``action``: what to do about it.
    """

    severity: Severity
    code: str
    field: str
    value: str
    allowed: str
    action: str

    def __str__(self) -> str:
        allowed = f"; expected {self.allowed}" if self.allowed else ""
        action = f"; {self.action}" if self.action else ""
        return f"{self.field}: {self.value}{allowed}{action}"


@dataclass(frozen=True)
class OpenChoice:
    """Something that the files leave open and the arithmetic depends on; ``option`` settles it."""

    option: str  # as typed
    question: str


def worst(findings: Iterable[Finding]) -> Severity | None:
    """``None`` where nothing was found."""
    there = {finding.severity for finding in findings}
    return next((severity for severity in SEVERITIES if severity in there), None)
