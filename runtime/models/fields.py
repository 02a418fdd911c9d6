"""Typed access to fields of a Hugging Face configuration, with messages that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def positive(raw: Mapping[str, Any], name: str, source: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: {name}={value!r}; expected a positive integer")
    return value


def count(raw: Mapping[str, Any], name: str, source: str) -> int:
    """0 where it is missing or null."""
    return positive(raw, name, source) if raw.get(name) else 0


def number(raw: Mapping[str, Any], name: str, source: str) -> float:
    """Above zero."""
    value = raw.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{source}: {name}={value!r}; expected a positive number")
    return float(value)


def flag(raw: Mapping[str, Any], name: str, source: str, *, default: bool = False) -> bool:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{source}: {name}={value!r}; expected true or false")
    return value


def only(raw: Mapping[str, Any], name: str, source: str, *, supported: object) -> None:
    """Refuse what is there unless it is ``supported``, null or left out."""
    value = raw.get(name)
    if value is not None and value != supported:
        raise ValueError(f"{source}: {name}={value!r}; supported: {supported!r}")


def read_choice(raw: Mapping[str, Any], name: str, allowed: tuple[str, ...], source: str) -> str:
    """One of ``allowed``."""
    value = raw.get(name)
    if value not in allowed:
        raise ValueError(f"{source}.{name}={value!r}; allowed: {', '.join(map(repr, allowed))}")
    return str(value)
