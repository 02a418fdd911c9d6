"""The processor as the system describes it. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path


def processor_flags() -> frozenset[str]:
    """Feature flags as Linux names them; empty elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return frozenset(
        flag
        for line in lines
        if line.startswith(("flags", "Features"))
        for flag in line.partition(":")[2].split()
    )


def count_physical_cores() -> int:
    """Physical cores this process may run on (hyper-threads of one core count once)."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:
        return os.cpu_count() or 1
    cores: set[str] = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.is_file() else str(cpu))
    return max(1, len(cores))
