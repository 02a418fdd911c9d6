"""NVIDIA drivers: what is there, and what a CUDA build of torch needs. Standard library only.

`make setup GPU=1` runs this file with the system's Python before anything is installed, and again
with ``--torch`` when torch is there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

# Oldest Linux driver of each CUDA major version; within a major version any driver serves.
DRIVER_FLOORS: Mapping[int, str] = MappingProxyType({12: "525.60.13", 13: "580.65.06"})
DEFAULT_CUDA = 13  # of the torch release that constraints.txt pins
_QUERY = ("name", "memory.total", "driver_version", "compute_cap")

Run = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Gpu:
    """One device as nvidia-smi lists it."""

    name: str
    memory_bytes: int
    driver: str
    capability: str


def run_program(command: Sequence[str]) -> str | None:
    """Its standard output; ``None`` when it is missing, fails or takes longer than 20 seconds."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, check=True, timeout=20, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def list_gpus(run: Run = run_program) -> tuple[Gpu, ...] | None:
    """The devices, or ``None`` without a working nvidia-smi."""
    query = f"--query-gpu={','.join(_QUERY)}"
    output = run(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    if output is None:
        return None
    gpus = []
    for line in output.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_QUERY):
            name, memory, driver, capability = values
            mebibytes = int(memory) if memory.isdigit() else 0
            gpus.append(Gpu(name, mebibytes * 2**20, driver, capability))
    return tuple(gpus)


def driver_problem(driver: str, cuda: str) -> str:
    """Why ``driver`` cannot run a build for ``cuda`` (as in ``13.0``); empty when it can."""
    major = int(cuda.partition(".")[0])
    floor = DRIVER_FLOORS.get(major)
    if floor is None or _parts(driver) >= _parts(floor):
        return ""
    return f"driver {driver} is too old for CUDA {cuda}, which needs {floor} or newer"


def driver_fix(driver: str) -> str:
    """What to do about :func:`driver_problem`."""
    older = [
        major for major, floor in sorted(DRIVER_FLOORS.items()) if _parts(driver) >= _parts(floor)
    ]
    update = "update the driver"
    if not older:
        return update
    return (
        f"{update}, or install a build for CUDA {older[-1]}: make clean, then "
        f"make setup GPU=1 TORCH_CUDA={older[-1]} TORCH_INDEX=<index of such a build>"
    )


def main(arguments: Sequence[str], run: Run = run_program) -> int:
    """``[CUDA major]``: is the driver new enough; ``--torch``: is torch a CUDA build. 0 if so."""
    if list(arguments) == ["--torch"]:
        return _check_torch()
    cuda = arguments[0] if arguments else str(DEFAULT_CUDA)
    gpus = list_gpus(run)
    if not gpus:
        return _complain(
            "GPU=1 needs an NVIDIA device and a working nvidia-smi; none was found. Install "
            f"driver {DRIVER_FLOORS[DEFAULT_CUDA]} or newer, or run make setup without GPU=1"
        )
    problem = driver_problem(gpus[0].driver, cuda)
    if problem:
        return _complain(f"{problem}: {driver_fix(gpus[0].driver)}")
    sys.stdout.write(
        f"{len(gpus)} x {gpus[0].name}, driver {gpus[0].driver}: good for CUDA {cuda}\n"
    )
    return 0


def _check_torch() -> int:
    import torch

    if torch.version.cuda is None:
        return _complain(
            f"torch {torch.__version__} is a CPU build: make clean, then name an index that has "
            "CUDA builds, make setup GPU=1 TORCH_INDEX=..."
        )
    return 0


def _complain(message: str) -> int:
    sys.stderr.write(f"setup: {message}\n")
    return 1


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
