"""Pooled acceptance: one definition everywhere (docs/architecture.md).

``tau = 1 + accepted / drafts``; position rate j = drafts whose first j tokens were all accepted /
drafts; conditional rate = ratio of neighbours. Counted before trimming at EOS, stop or length (as
vLLM counts) and after. Steps with fewer than K drafted tokens (at the model's length limit) are
left out and counted. Of a tree K is the depth; position j counts where the path got past it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from runtime.request import Generation, SpecStep


@dataclass(frozen=True)
class Acceptance:
    """Counts that can be added over requests and ranks. ``accepted[j]``: drafts that got past j."""

    k: int
    num_drafts: int
    accepted: tuple[int, ...]
    accepted_trimmed: tuple[int, ...]
    num_clipped: int = 0

    def __post_init__(self) -> None:
        assert len(self.accepted) == len(self.accepted_trimmed) == self.k, "one count per position"

    def __add__(self, other: Acceptance) -> Acceptance:
        assert self.k == other.k, f"cannot pool K={self.k} with K={other.k}"
        return Acceptance(
            self.k,
            self.num_drafts + other.num_drafts,
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
            tuple(
                a + b for a, b in zip(self.accepted_trimmed, other.accepted_trimmed, strict=True)
            ),
            self.num_clipped + other.num_clipped,
        )

    @property
    def tau(self) -> float:
        return 1 + sum(self.accepted) / self.num_drafts if self.num_drafts else 1.0

    @property
    def tau_trimmed(self) -> float:
        return 1 + sum(self.accepted_trimmed) / self.num_drafts if self.num_drafts else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(count / self.num_drafts if self.num_drafts else 0.0 for count in self.accepted)

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        before = (self.num_drafts, *self.accepted)
        return tuple(
            count / reached if reached else 0.0
            for count, reached in zip(self.accepted, before[:-1], strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "k": self.k,
            "drafts": self.num_drafts,
            "accepted": list(self.accepted),
            "accepted_trimmed": list(self.accepted_trimmed),
            "clipped_steps": self.num_clipped,
            "tau": self.tau,
            "tau_trimmed": self.tau_trimmed,
            "rates": list(self.rates),
            "conditional_rates": list(self.conditional_rates),
        }


def pool_acceptance(generations: Iterable[Generation], k: int) -> Acceptance:
    """Count the verification steps of ``generations`` that drafted ``k`` tokens."""
    total = Acceptance(k, 0, (0,) * k, (0,) * k)
    for generation in generations:
        for step in generation.steps:
            total += count_step(step, k, num_output=len(generation.output_ids))
    return total


def count_step(step: SpecStep, k: int, *, num_output: int) -> Acceptance:
    """One step's counts; ``num_output`` is the request's output length after trimming."""
    if step.k != k:
        return Acceptance(k, 0, (0,) * k, (0,) * k, num_clipped=1)
    kept = min(step.num_accepted, max(0, num_output - step.start))
    return Acceptance(
        k,
        1,
        tuple(int(step.num_accepted > j) for j in range(k)),
        tuple(int(kept > j) for j in range(k)),
    )
