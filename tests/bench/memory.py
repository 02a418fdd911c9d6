"""Resident memory of this process, for benchmarks that run each side in a process of its own."""

from __future__ import annotations

from pathlib import Path


def resident() -> int:
    """Bytes held now."""
    return _read("VmRSS")


def peak() -> int:
    """The most bytes held since :func:`reset_peak`."""
    return _read("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _read(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")
