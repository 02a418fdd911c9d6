"""How numbers are written in the report. One place, so that a figure looks the same everywhere."""

from __future__ import annotations

import math
from types import MappingProxyType

from mtp_train.report.facts import Figure

ABSENT = "–"
TIMES = "\u00d7"
_SET_NAMES = MappingProxyType({"mtbench": "MT-Bench", "humaneval": "HumanEval", "gsm8k": "GSM8K"})
_THIN = "\u202f"  # narrow no-break space


def count(value: int | None) -> str:
    return ABSENT if value is None else f"{value:,}"


def short(value: float) -> str:
    """``250k``, ``3M``, ``0.25``: for ticks."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.3g}"


def decimal(value: float | None, digits: int = 3) -> str:
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:.{digits}f}".replace("-", "\u2212")


def signed(value: float | None, digits: int = 1) -> str:
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:+.{digits}f}".replace("-", "\u2212")


def share(value: float | None, digits: int = 1) -> str:
    """Per cent."""
    return ABSENT if value is None else f"{decimal(100 * value, digits)}{_THIN}%"


def times(value: float | None, digits: int = 2) -> str:
    """``1.23×``."""
    return ABSENT if value is None else f"{decimal(value, digits)}{TIMES}"


def interval(figure: Figure | None, digits: int = 3, *, scale: float = 1.0) -> str:
    """``[1.305, 1.343]``, or a dash."""
    if figure is None or figure.low is None or figure.high is None:
        return ABSENT
    return f"[{decimal(scale * figure.low, digits)}, {decimal(scale * figure.high, digits)}]"


def speedup_digits(figure: Figure) -> int:
    """Three where two would hide on which side of 1 the interval begins."""
    is_near = figure.low is not None and abs(figure.low - 1) < 0.005
    return 3 if is_near else 2


def speedup_interval(figure: Figure) -> str:
    return interval(figure, speedup_digits(figure))


def level(figure: Figure) -> str:
    return f"{100 * figure.level:g}{_THIN}%"


def milliseconds(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:,.{0 if value >= 100 else 1}f}"


def data_size(value: int | None) -> str:
    """Decimal units, as disks are sold."""
    if value is None:
        return ABSENT
    size = float(value)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            digits = 0 if unit == "B" or size >= 100 else 1
            return f"{size:,.{digits}f}{_THIN}{unit}"
        size /= 1000
    raise AssertionError("the loop ends at TB")


def raw(value: object) -> str:
    """A figure as the ladder wrote it, short enough to read."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "\u2212")
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "\u2212")
    if isinstance(value, list):
        shown = ", ".join(raw(item) for item in value)
        return f"[{shown}]" if value else "none"
    return ABSENT if value is None else str(value)


def set_name(prompt_set: str) -> str:
    """The prompt set as people write it."""
    name, _, part = prompt_set.partition("/")
    shown = _SET_NAMES.get(name, name)
    return f"{shown}, {part.replace('turn', 'turn ')}" if part else shown


def decoding(temperature: float, draft_mode: str) -> str:
    drafts = {"argmax": "arg-max drafts", "sampled": "sampled drafts"}.get(draft_mode, draft_mode)
    way = "greedy" if temperature == 0 else f"T = {temperature:g}"
    return f"{way}, {drafts}" if drafts else way
