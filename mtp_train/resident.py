"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


def is_known() -> bool:
    """Whether this system tells."""
    return _STATUS.exists()


def resident() -> int:
    """Bytes held now."""
    return _read("VmRSS")


def peak() -> int:
    """The most bytes held since the start or :func:`reset_peak`."""
    return _read("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _read(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{_STATUS} has no {field}")
