"""What the parity ladder hands back, and the layout of ``parity.json``.

A rung carries its figures beside the bounds they were held against, so that a verdict can be
checked by hand. Every acceptance figure carries what it depends on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from mtp_train.run_dir import PARITY_NAME
from mtp_train.validate.samples import Samples
from runtime.metrics import Acceptance

Dimension = Literal["task", "script", "context", "trained_length", "token_kind"]


def now() -> str:
    """UTC, to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RungResult:
    """One rung's verdict. ``figures`` and ``bounds`` are JSON values under the same names.

    ``climbed_at``: when it was finished, in UTC (ISO 8601); empty where nobody said.
    """

    name: str
    passed: bool
    figures: Mapping[str, Any] = field(default_factory=dict)
    bounds: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0
    climbed_at: str = ""

    def to_dict(self, head_sha256: Mapping[str, str]) -> dict[str, Any]:
        """Its part of ``parity.json``, where its name is the key. ``head_sha256``: of the files of
        the head that it is of.
        """
        return {
            "climbed_at": self.climbed_at,
            "head_sha256": dict(head_sha256),
            "passed": self.passed,
            "figures": dict(self.figures),
            "bounds": dict(self.bounds),
            "note": self.note,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class PromptCounts:
    """One prompt's part of a measurement. ``digest`` is of its token ids; ``accepted[j]``: drafts
    that got past position j, before trimming.
    """

    digest: str
    num_drafts: int
    accepted: tuple[int, ...]


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
    rate_intervals: tuple[tuple[float, float], ...] = ()  # of each position, at the same level
    prompts: tuple[PromptCounts, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class BreakdownRow:
    """A part of one measurement's drafts: those of one task, context length or kind of token.

    A draft belongs to one label of each dimension, so the labels of a dimension add up to
    ``AcceptanceResult.counts`` of the same prompt set, K and temperature exactly. ``interval``
    bounds tau (bootstrap over the ``num_prompts`` prompts with such drafts); ``None`` for one.
    """

    dimension: Dimension
    label: str
    prompt_set: str
    k: int
    temperature: float
    num_drafts: int
    accepted: tuple[int, ...]  # drafts whose first j tokens were all accepted, before trimming
    interval: tuple[float, float] | None
    num_prompts: int

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(count / self.num_drafts for count in self.accepted)

    @property
    def tau(self) -> float:
        return 1 + sum(self.accepted) / self.num_drafts

    def to_dict(self) -> dict[str, Any]:
        return {
            "dimension": self.dimension,
            "label": self.label,
            "prompt_set": self.prompt_set,
            "k": self.k,
            "temperature": self.temperature,
            "drafts": self.num_drafts,
            "accepted": list(self.accepted),
            "rates": list(self.rates),
            "tau": self.tau,
            "tau_interval": None if self.interval is None else list(self.interval),
            "prompts": self.num_prompts,
        }


@dataclass(frozen=True)
class DecodeSpeed:
    """How one batch decodes. ``inter_token``: between two arrivals at one request (with a draft an
    arrival may bring several tokens); ``first_token``: until every request of the batch has one.
    """

    tokens_per_s: float  # of the whole batch, after the first token of each request
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    first_token_ms: float


@dataclass(frozen=True)
class SpeedResult:
    """Tokens/s with the draft over tokens/s without, and its interval at ``level``.

    ``predicted`` is the cost model's speed-up, ``emitted_per_step / (1 + K c + v)``, with ``c``
    (one more drafted token) and ``v`` (verifying and extending) measured beforehand, in plain
    steps. The interval is over ``groups`` of prompts, where there are fewer than four over single
    runs (``repeats`` of each group).
    """

    prompt_set: str
    batch_size: int
    k: int
    speedup: float
    low: float
    high: float
    emitted_per_step: float
    predicted: float
    c: float
    v: float
    draft: DecodeSpeed
    plain: DecodeSpeed
    level: float = 0.95
    context_len: int = 0  # 0: the prompts as they are; else tokens of every prompt
    groups: int = 1
    repeats: int = 1

    @property
    def model_error(self) -> float:
        """Relative: above 0 the model promised too much."""
        return self.predicted / self.speedup - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_set": self.prompt_set,
            "batch_size": self.batch_size,
            "context_len": self.context_len,
            "k": self.k,
            "speedup": self.speedup,
            "low": self.low,
            "high": self.high,
            "level": self.level,
            "groups": self.groups,
            "repeats": self.repeats,
            "emitted_per_step": self.emitted_per_step,
            "predicted": self.predicted,
            "model_error": self.model_error,
            "c": self.c,
            "v": self.v,
            **asdict(self.draft),
            "plain": asdict(self.plain),
        }


@dataclass(frozen=True)
class ContextLengths:
    """How far a head is known, in tokens; ``None``: not known. Beyond both it may be served, but
    nobody has seen how it drafts there.
    """

    trained: int | None = None  # of the longest sample of the features it was trained on
    measured: int | None = None  # before the furthest draft of any acceptance measurement


@dataclass(frozen=True)
class MeasuredTau:
    """Tokens per step on one target (its fingerprint), with the interval over prompts."""

    target: str
    tau: float
    low: float
    high: float
    prompts: int
    source: str  # where the figure is from


@dataclass(frozen=True)
class TargetChange:
    """``difference``: new minus old tau with its interval. ``lost_share``: of the accepted tokens
    per step; negative where there are more now. ``retrain`` is ``None`` where nothing says what
    the head did on its own target.
    """

    prompt_set: str
    k: int
    new: MeasuredTau
    old: MeasuredTau | None
    difference: tuple[float, float, float] | None  # value, low, high
    is_paired: bool
    lost_share: float | None
    retrain: bool | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For a terminal: both figures, the difference and the verdict."""
        shown = [("old", self.old)] if self.old is not None else []
        lines = [
            f"{name} target {one.target[:12]}: {one.tau:.3f} [{one.low:.3f}, {one.high:.3f}] "
            f"tokens per step on {self.prompt_set} at K={self.k} ({one.source})"
            for name, one in (*shown, ("new", self.new))
        ]
        if self.difference is not None:
            value, low, high = self.difference
            how = "paired" if self.is_paired else "unpaired"
            lines.append(f"difference: {value:+.3f} [{low:+.3f}, {high:+.3f}] ({how})")
        verdict = {True: "yes", False: "no", None: "not known"}[self.retrain]
        return [*lines, f"retrain: {verdict} ({self.reason})"]


@dataclass(frozen=True)
class LadderReport:
    """The ladder's outcome. A rung that was not asked for is not in ``rungs``.

    ``samples`` hold text and are kept out of ``parity.json``: they have a file of their own.
    """

    target: str  # fingerprint
    head: str  # directory
    head_sha256: Mapping[str, str]  # of its files, by name: the figures are of these weights
    rungs: tuple[RungResult, ...]
    acceptance: tuple[AcceptanceResult, ...] = ()
    speed: tuple[SpeedResult, ...] = ()
    breakdown: tuple[BreakdownRow, ...] = ()
    lengths: ContextLengths = ContextLengths()
    samples: Samples | None = field(default=None, repr=False)
    change: TargetChange | None = None  # where the head is of another target

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
            "rungs": {rung.name: rung.to_dict(self.head_sha256) for rung in self.rungs},
            "acceptance": [
                {
                    "prompt_set": row.prompt_set,
                    "temperature": row.temperature,
                    "draft_mode": row.draft_mode,
                    "prompts": row.num_prompts,
                    "max_tokens": row.max_tokens,
                    "tau_interval": [row.tau_low, row.tau_high],
                    "tau_level": row.tau_level,
                    "rate_intervals": [list(interval) for interval in row.rate_intervals],
                    **row.counts.to_dict(),
                }
                for row in self.acceptance
            ],
            "speed": [row.to_dict() for row in self.speed],
            "breakdown": [row.to_dict() for row in self.breakdown],
            "lengths": asdict(self.lengths),
            **({} if self.change is None else {"target_change": self.change.to_dict()}),
        }


def measured_markdown(parity: Mapping[str, Any]) -> str:
    """Acceptance and verdicts of a ``parity.json`` as two tables, for the README of a head."""
    rows = "\n".join(
        f"| {row['prompt_set']} | {row['temperature']:g} | {row['draft_mode']} | {row['k']} "
        f"| {row['tau']:.3f} [{row['tau_interval'][0]:.3f}, {row['tau_interval'][1]:.3f}] "
        f"| {' '.join(f'{rate:.3f}' for rate in row['rates'])} | {row['drafts']} "
        f"| {row['prompts']} |"
        for row in parity.get("acceptance", ())
    )
    verdicts = "\n".join(
        f"| {name} | {'passed' if rung['passed'] else 'FAILED'} | {rung['note']} |"
        for name, rung in parity.get("rungs", {}).items()
    )
    return f"""Tokens per step (tau) is
1 + accepted / verification steps, pooled over prompts, with the bootstrap interval over prompts.

| prompts | temperature | drafts | K | tokens per step | accepted by position | steps | prompts |
|---|---|---|---|---|---|---|---|
{rows}

| rung | verdict | what |
|---|---|---|
{verdicts}

All figures and their bounds are in `{PARITY_NAME}`."""


def lengths_markdown(parity: Mapping[str, Any], *, served: int) -> str:
    """How far the head is known against the ``served`` length, as a sentence or two for a README;
    empty where nothing is known.
    """
    lengths = parity.get("lengths", {})
    trained, measured = lengths.get("trained"), lengths.get("measured")
    parts = [f"Trained on up to {trained:,} tokens"] if trained else []
    parts += [f"measured behind up to {measured:,}"] if measured else []
    if not parts:
        return ""
    text = ", ".join(parts)
    text = f"{text[0].upper()}{text[1:]}; the configuration allows {served:,}."
    if trained and served > trained:
        text += f" Acceptance beyond {max(trained, measured or 0):,} tokens is unknown."
    return text


def fastest_k(parity: Mapping[str, Any]) -> int | None:
    """The fastest K at the smallest batch of a ``parity.json``; ``None``: P5 has not run."""
    rows = parity.get("speed", [])
    if not rows:
        return None
    smallest = min(row["batch_size"] for row in rows)
    best = max((r for r in rows if r["batch_size"] == smallest), key=lambda row: row["speedup"])
    return int(best["k"])
