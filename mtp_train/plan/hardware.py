"""How fast what machine does what: published peaks with assumed shares, or a calibration."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

# Shares of the published peaks, assumed and never measured.
TRAIN_SHARE = 0.3
DUMP_SHARE = 0.4
DECODE_SHARE = 0.5  # of the memory's rate
STEP_OVERHEAD_S = 4e-3  # of one decoding step
DISK_BYTES_PER_S = 2e9  # of the whole machine


@dataclass(frozen=True)
class Line:
    """``fixed_s + work / per_s`` seconds."""

    fixed_s: float
    per_s: float

    def seconds(self, work: float) -> float:
        return self.fixed_s + work / self.per_s


@dataclass(frozen=True)
class Speeds:
    """Of one device. Work of the training phases is operations of one micro-batch."""

    forward: Line
    backward: Line
    loss_full: Line
    loss_hot: Line  # over a sub-vocabulary
    normaliser: Line  # the target's whole logits, once per answer token of a run over one
    optimiser: Line  # weights of the head
    pack: Line  # tokens
    dump: Line  # operations of the target's forward
    decode: Line  # bytes of weights read per step
    disk_bytes_per_s: float  # of the machine
    base_bytes: float = 0.0  # of a training process without any tensor
    heap_factor: float = 1.0  # what the allocator holds, times what is alive, of passing tensors


@dataclass(frozen=True)
class Hardware:
    """``num_devices`` equal devices. ``measured_on``: the target that a calibration ran with."""

    name: str
    num_devices: int
    memory_bytes: float  # per device
    speeds: Speeds
    is_cpu: bool = False
    measured_on: str = ""
    dtype: str = "bfloat16"  # of the target
    train_dtype: str = "bfloat16"
    decode_batch: int = 0  # requests per step of the measured decoding; 0 = as configured

    @property
    def is_measured(self) -> bool:
        return bool(self.measured_on)


# Published by the vendor: bytes of memory, bf16 operations/s without sparsity, memory bytes/s.
_DEVICES: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {
        "a100": (80e9, 312e12, 2.039e12),
        "h100": (80e9, 989e12, 3.35e12),
        "h200": (141e9, 989e12, 4.8e12),
    }
)


def find_hardware(name: str) -> Hardware:
    """``8xh100`` and the like. Raises ``ValueError`` naming what is known."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z]\w*)", name.lower())
    if match is None or match[2] not in _DEVICES:
        raise ValueError(
            f"plan.hardware={name}: known are here (this machine, calibrated) and "
            f"{', '.join(_DEVICES)}, with a number in front as in 8xh100"
        )
    memory, peak, bandwidth = _DEVICES[match[2]]
    free = Line(0.0, float("inf"))
    training = Line(0.0, TRAIN_SHARE * peak)
    return Hardware(
        name=name.lower(),
        num_devices=int(match[1] or 1),
        memory_bytes=memory,
        speeds=Speeds(
            forward=training,
            backward=training,
            loss_full=training,
            loss_hot=training,
            normaliser=training,
            optimiser=free,
            pack=free,
            dump=Line(0.0, DUMP_SHARE * peak),
            decode=Line(STEP_OVERHEAD_S, DECODE_SHARE * bandwidth),
            disk_bytes_per_s=DISK_BYTES_PER_S,
        ),
    )


def save_calibration(hardware: Hardware, file: Path) -> None:
    from mtp_train.run_dir import write_json_atomic

    file.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(file, asdict(hardware))


def load_calibration(file: Path) -> Hardware:
    """Inverse of :func:`save_calibration`. Raises ``ValueError`` saying how to make one."""
    if not file.is_file():
        raise ValueError(
            f"plan.hardware=here: {file} is missing; measure this machine with plan.calibrate=true"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        speeds: dict[str, Any] = {
            name: Line(**value) if isinstance(value, dict) else value
            for name, value in raw["speeds"].items()
        }
        return Hardware(**(raw | {"speeds": Speeds(**speeds)}))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: damaged ({error}); measure again: plan.calibrate=true"
        ) from error
