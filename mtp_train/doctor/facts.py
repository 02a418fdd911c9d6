"""What was found out about a machine. Plain values, so that verdicts can be tested without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mtp_train.doctor.driver import Gpu

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line for the user. ``fix`` is a command or an instruction; empty when all is well."""

    name: str
    verdict: Verdict
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Processor:
    """``limit``: whole or partial cores that the control group grants; ``None`` = no limit."""

    name: str
    flags: frozenset[str]
    physical_cores: int
    usable_cores: int  # physical ones this process may run on
    usable_threads: int
    limit: float | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes. ``limit``: what the control group grants; ``None`` = no limit."""

    total: int
    available: int
    limit: int | None = None

    @property
    def usable(self) -> int:
        return min(self.available, self.limit) if self.limit is not None else self.available


@dataclass(frozen=True)
class Torch:
    """The installed torch; ``error`` says why it cannot be imported, and the rest is empty."""

    version: str = ""
    cuda: str = ""  # the CUDA it is built for; empty = a CPU build
    sees_gpu: bool = False
    error: str = ""


@dataclass(frozen=True)
class Disk:
    """The disk of the run root. Bytes, and bytes per second where measured."""

    path: str
    total: int
    free: int
    is_writable: bool = True
    write_rate: float | None = None
    read_rate: float | None = None


@dataclass(frozen=True)
class Rates:
    """Measured with torch on ``device``: bytes/s of a copy, floating-point operations/s."""

    device: str
    copy: float
    fp32: float
    bf16: float


@dataclass(frozen=True)
class Packages:
    """``wanted``: exact versions (constraints file) or empty text where any version serves."""

    installed: Mapping[str, str] = field(default_factory=dict)
    wanted: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """Everything that the verdicts look at."""

    python: str
    processor: Processor
    memory: Memory
    torch: Torch
    gpus: tuple[Gpu, ...] | None  # None: no working nvidia-smi
    nvcc: str  # versions; empty = not there
    gxx: str
    disk: Disk
    packages: Packages
    flashinfer: str = ""
    rates: tuple[Rates, ...] = ()
    engine_python: str = ""  # `engine.python`
    engine_vllm: str = ""  # vLLM's version there; empty = none
