"""What a serving engine is asked to decode, and what it says about it.

Both ways of asking (:mod:`mtp_train.serving.process`, :mod:`mtp_train.serving.server`) take a
:class:`ServingJob` and return a :class:`Served`. Counts are the engine's own, before trimming at
EOS or length. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Attribution = Literal["request", "one_at_a_time"]


class ServingError(ValueError):
    """The engine could not be started, asked, or believed; the message is for the user.

    ``stage``: ``import``, ``load``, ``decode`` or ``reach``.
    """

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True)
class DraftCounts:
    """Verification steps, and how many of them got past each position."""

    drafts: int
    accepted: tuple[int, ...]

    @classmethod
    def none(cls, k: int) -> DraftCounts:
        return cls(0, (0,) * k)

    @classmethod
    def of_steps(cls, accepted_per_step: Sequence[int], k: int) -> DraftCounts:
        return cls(
            len(accepted_per_step),
            tuple(sum(count > j for count in accepted_per_step) for j in range(k)),
        )

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return self._combine(other, 1)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return self._combine(other, -1)

    def _combine(self, other: DraftCounts, sign: int) -> DraftCounts:
        pairs = zip(self.accepted, other.accepted, strict=True)
        return DraftCounts(self.drafts + sign * other.drafts, tuple(a + sign * b for a, b in pairs))


@dataclass(frozen=True)
class ServingJob:
    """Greedy decoding of prompts with one head at one K. Lengths are in tokens.

    A group of prompts is served together and ends before the next one starts. ``stop_token_ids``
    end an answer and stay in it. ``head`` is an exported directory; ``k=0`` decodes without it.
    """

    target: Path
    head: Path
    k: int
    dtype: Literal["float32", "bfloat16"]
    groups: tuple[tuple[tuple[int, ...], ...], ...] = field(repr=False)
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(prompt for group in self.groups for prompt in group)

    @property
    def max_model_len(self) -> int:
        """Room for every prompt, its answer and three steps more.

        An engine that schedules ahead decodes and drafts once more before it sees that a request
        has ended. vLLM 0.32.0 without that room lets such a draft spoil the next one of the other
        requests (K = 3, fp32: 2 of 8 answers drafted worse for one step, no text changed).
        """
        longest = max(len(prompt) for prompt in self.prompts)
        return longest + self.max_tokens + 3 * (self.k + 1)


@dataclass(frozen=True)
class ServedPrompt:
    """One answer. ``accepted_per_step`` is ``None`` where the engine only counts."""

    output_ids: tuple[int, ...]
    finish_reason: str
    counts: DraftCounts
    accepted_per_step: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Served:
    """One job's outcome. ``counters`` are the engine's totals over the prompts; ``warm_up`` is
    what it had counted before the first of them. ``clipped_steps`` drafted fewer than K tokens.
    """

    engine: str
    version: str
    k: int
    dtype: str
    prompts: tuple[ServedPrompt, ...] = field(repr=False)
    counters: DraftCounts
    warm_up: DraftCounts
    attribution: Attribution
    clipped_steps: int = 0
    load_s: float = 0.0
    decode_s: float = 0.0

    @property
    def attributed(self) -> DraftCounts:
        """Sum over prompts; equals ``counters`` unless the engine contradicts itself."""
        return sum((prompt.counts for prompt in self.prompts), DraftCounts.none(self.k))


@dataclass(frozen=True)
class EngineLayout:
    """How an engine is told about a head of one export format."""

    method: str
    hf_overrides: Mapping[str, Any]


_VLLM_LAYOUTS: Mapping[str, EngineLayout] = MappingProxyType(
    {
        "mimo": EngineLayout("mtp", MappingProxyType({"num_nextn_predict_layers": 1})),
        "deepseek": EngineLayout("mtp", MappingProxyType({"num_nextn_predict_layers": 1})),
        "eagle3": EngineLayout("eagle3", MappingProxyType({})),
        "speculators": EngineLayout("eagle3", MappingProxyType({})),
        "eagle": EngineLayout("eagle", MappingProxyType({})),
        "medusa": EngineLayout("medusa", MappingProxyType({})),
    }
)


def vllm_layout(format: str) -> EngineLayout:
    """vLLM's names for it. The override of MTP layouts makes room for one draft layer in the
    target's configuration; it changes nothing else. Raises ``ValueError`` for a format that it
    cannot read.
    """
    if format not in _VLLM_LAYOUTS:
        allowed = ", ".join(_VLLM_LAYOUTS)
        raise ValueError(f"export.format={format!r}; vLLM is asked for: {allowed}")
    return _VLLM_LAYOUTS[format]


def has_vllm_layout(format: str) -> bool:
    """Whether vLLM is asked for heads of that format."""
    return format in _VLLM_LAYOUTS


def counts_from(raw: Mapping[str, Any]) -> DraftCounts:
    return DraftCounts(int(raw["drafts"]), tuple(int(value) for value in raw["accepted"]))
