"""What the parity ladder hands back, and the layout of ``parity.json``.

A rung carries its figures beside the bounds they were held against, so that a verdict can be
checked by hand. Every acceptance figure carries what it depends on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.metrics import Acceptance


@dataclass(frozen=True)
class RungResult:
    """One rung's verdict. ``figures`` and ``bounds`` are JSON values under the same names."""

    name: str
    passed: bool
    figures: Mapping[str, Any] = field(default_factory=dict)
    bounds: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class AcceptanceResult:
    """Pooled counts over one prompt set, decoded by the runtime with target and draft together.

    ``tau_low`` and ``tau_high`` bound the untrimmed tau (bootstrap over prompts, ``tau_level``).
    """

    prompt_set: str
    temperature: float
    draft_mode: Literal["argmax", "sampled"]
    counts: Acceptance
    num_prompts: int = 0
    max_tokens: int = 0
    tau_low: float = math.nan
    tau_high: float = math.nan
    tau_level: float = 0.95


@dataclass(frozen=True)
class SpeedResult:
    """Tokens/s with the draft over tokens/s without, and its interval at ``level``."""

    prompt_set: str
    batch_size: int
    k: int
    speedup: float
    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True)
class LadderReport:
    """The ladder's outcome. A rung that was not asked for is not in ``rungs``."""

    target: str  # fingerprint
    head: str  # directory
    head_sha256: Mapping[str, str]  # of its files, by name: the figures are of these weights
    rungs: tuple[RungResult, ...]
    acceptance: tuple[AcceptanceResult, ...] = ()
    speed: tuple[SpeedResult, ...] = ()

    @property
    def passed(self) -> bool:
        """Every rung that ran passed, and at least one did."""
        return bool(self.rungs) and all(rung.passed for rung in self.rungs)

    def to_dict(self) -> dict[str, Any]:
        """The content of ``parity.json``."""
        return {
            "passed": self.passed,
            "target": self.target,
            "head": self.head,
            "head_sha256": dict(self.head_sha256),
            "rungs": {
                rung.name: {
                    "passed": rung.passed,
                    "figures": dict(rung.figures),
                    "bounds": dict(rung.bounds),
                    "note": rung.note,
                    "seconds": rung.seconds,
                }
                for rung in self.rungs
            },
            "acceptance": [
                {
                    "prompt_set": row.prompt_set,
                    "temperature": row.temperature,
                    "draft_mode": row.draft_mode,
                    "prompts": row.num_prompts,
                    "max_tokens": row.max_tokens,
                    "tau_interval": [row.tau_low, row.tau_high],
                    "tau_level": row.tau_level,
                    **row.counts.to_dict(),
                }
                for row in self.acceptance
            ],
            "speed": [
                {
                    "prompt_set": row.prompt_set,
                    "batch_size": row.batch_size,
                    "k": row.k,
                    "speedup": row.speedup,
                    "low": row.low,
                    "high": row.high,
                    "level": row.level,
                }
                for row in self.speed
            ],
        }
