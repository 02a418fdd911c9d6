"""What a comparison shows, as plain records. ``None`` means "not recorded"; :attr:`RunRow.missing`
says so in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mtp_train.learning_curve.facts import LearningCurve
from mtp_train.report.facts import Acceptance, Figure


@dataclass(frozen=True)
class Condition:
    """What an acceptance figure depends on beside the head. Only equal conditions are compared."""

    prompt_set: str
    k: int
    temperature: float
    draft_mode: str
    max_tokens: int

    @classmethod
    def of(cls, row: Acceptance) -> Condition:
        return cls(row.prompt_set, row.k, row.temperature, row.draft_mode, row.max_tokens)


@dataclass(frozen=True)
class PromptTable:
    """Counts of every prompt. ``counts_PS``: drafts, then accepted by position; int64
    ``[P, 1 + K]``.
    """

    digests: tuple[str, ...]
    counts_PS: np.ndarray


@dataclass(frozen=True)
class Cost:
    """What a run took. Tokens: of the training split; seen while training, every pass counted;
    of these each counted once; kept as features. Seconds by stage, over all attempts.
    """

    data_tokens: int | None = None
    trained_tokens: int | None = None
    distinct_tokens: int | None = None
    steps: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    head_params: int | None = None
    head_bytes: int | None = None
    feature_tokens: int | None = None
    feature_bytes: int | None = None
    codec: str = ""

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class RunRecords:
    """One readable run directory."""

    name: str
    path: str
    target: str  # fingerprint of the measurement; empty: not measured
    settings: Mapping[str, Any] = field(repr=False)  # nested; those that its head depends on
    acceptance: tuple[Acceptance, ...] = field(repr=False)
    prompts: Mapping[Condition, PromptTable] = field(repr=False)
    training_tau: float | None  # best validation during training, on the run's own held-out rows
    verdict: str
    cost: Cost
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """This run minus the baseline. ``kind``: paired by prompt, or two independent intervals."""

    tau: Figure
    first: Figure
    kind: Literal["paired", "unpaired"]
    why_unpaired: str = ""


@dataclass(frozen=True)
class RunRow:
    """One run in the comparison."""

    records: RunRecords
    label: str
    row: Acceptance | None  # at the comparison's condition
    difference: Difference | None  # None for the baseline, and where there is none
    is_baseline: bool
    missing: tuple[str, ...]


@dataclass(frozen=True)
class AnswersPair:
    """Two runs that differ in who wrote the answers. ``difference``: the one on answers that the
    target generated minus the one on recorded answers.
    """

    recorded: str  # label
    regenerated: str
    num_tokens: tuple[int, int]  # distinct, in this order
    difference: Difference


@dataclass(frozen=True)
class Unreadable:
    """An argument that is no run. ``is_error``: a directory that should have been one."""

    path: str
    why: str
    is_error: bool = True


@dataclass(frozen=True)
class SettingDifference:
    """A setting that is not the same everywhere; values by label, ``None``: not recorded."""

    key: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """``condition`` is ``None`` when nothing was measured in any run."""

    condition: Condition | None
    runs: tuple[RunRow, ...]
    settings: tuple[SettingDifference, ...]
    unreadable: tuple[Unreadable, ...] = ()
    curve: LearningCurve = field(default_factory=LearningCurve)
    answers: tuple[AnswersPair, ...] = ()
