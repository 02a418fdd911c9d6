"""Values out of JSON that another version may have written: what is no number is ``None``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def number(value: Any) -> float | None:
    """A finite number; also from text, as NaN and infinities are written."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else round(found)


def text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def numbers(value: Any) -> tuple[float, ...]:
    """A list of numbers; empty when it is none or any entry is not a number."""
    if not isinstance(value, list | tuple):
        return ()
    found = [number(item) for item in value]
    return tuple(item for item in found if item is not None) if None not in found else ()


def pair(value: Any) -> tuple[float, float] | None:
    """An interval ``[low, high]``."""
    found = numbers(value)
    return (found[0], found[1]) if len(found) == 2 else None


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def rows(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The objects of a list of objects."""
    return tuple(item for item in value if isinstance(item, Mapping)) if _is_list(value) else ()


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
