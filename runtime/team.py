"""The ranks that one target is spread over, as an engine sees them: one leads, the others follow.

The leader owns requests, scheduler and page allocator. Before it enqueues a step it broadcasts the
step's buffer; a follower rebuilds the plan and enqueues the same step with its own part of the
weights and of the K/V. Whoever follows calls ``engine.follow()``, which returns once the leader
dismisses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch

from runtime.config import EngineConfig
from runtime.kv_cache import SlotTable
from runtime.models.base import Model
from runtime.scheduler import StepPlan
from runtime.step_buffer import MessageKind, StepBuffer


class Enqueues(Protocol):
    """What a follower needs of a schedule."""

    def enqueue(self, plan: StepPlan) -> Any: ...


class Team(ABC):
    """Everything but :meth:`follow` is for the leader."""

    @abstractmethod
    def tell_step(self, plan: StepPlan) -> None:
        """The step that is enqueued next: one broadcast."""

    @abstractmethod
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """The target's logits of rows of its own states, outside of a step."""

    @abstractmethod
    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(target, *arguments)`` on every rank at once; the leader's result.

        Function and arguments are pickled: a function of a module, and not for the decode path.
        """

    @abstractmethod
    def dismiss(self) -> None:
        """Let the followers return from :meth:`follow`."""

    @abstractmethod
    def follow(self, schedule: Enqueues) -> None:
        """Do what the leader says until it dismisses everybody."""


class SoloTeam(Team):
    """One process has nobody to tell."""

    def __init__(self, target: Model) -> None:
        self._target = target

    def tell_step(self, plan: StepPlan) -> None:
        return None

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return self._target.logits(hidden_MD)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self._target, *arguments)

    def dismiss(self) -> None:
        return None

    def follow(self, schedule: Enqueues) -> None:
        raise ValueError("follow: this process is alone, there is no leader to follow")


class RankTeam(Team):
    """The ranks of ``target.group``."""

    def __init__(self, target: Model, table: SlotTable, config: EngineConfig) -> None:
        self._target = target
        self._group = target.group
        self._table = table
        self._buffer = StepBuffer(config)

    def tell_step(self, plan: StepPlan) -> None:
        self._buffer.pack(plan, self._table)
        self._send()

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        self._buffer.set(MessageKind.LOGITS, count=len(hidden_MD))
        self._send()
        return self._logits(hidden_MD[:, : self._target.width].contiguous())

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._buffer.set(MessageKind.CALL)
        self._send()
        self._group.broadcast_object((function, arguments))
        return function(self._target, *arguments)

    def dismiss(self) -> None:
        self._buffer.set(MessageKind.STOP)
        self._send()

    def follow(self, schedule: Enqueues) -> None:
        if self._group.is_leader:
            raise ValueError("follow: rank 0 of the group leads")
        buffer, target = self._buffer, self._target
        while True:
            self._group.broadcast_host(buffer.tensor)
            if buffer.kind is MessageKind.STOP:
                return
            if buffer.kind is MessageKind.STEP:
                schedule.enqueue(buffer.unpack(self._table))
            elif buffer.kind is MessageKind.CALL:
                function, arguments = self._group.broadcast_object(None)
                function(target, *arguments)
            else:
                shape = (buffer.count, target.width)  # of g alone
                self._logits(torch.empty(shape, dtype=target.dtype, device=target.device))

    def _send(self) -> None:
        if not self._group.is_leader:
            raise ValueError(
                f"rank {self._group.rank} of the group follows: call follow(), requests are for "
                "rank 0"
            )
        self._group.broadcast_host(self._buffer.tensor)

    def _logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return self._target.logits(self._group.broadcast(hidden_MD))


def team_for(target: Model, table: SlotTable, config: EngineConfig) -> Team:
    """The team of an engine over ``target``."""
    if target.group.world_size == 1:
        return SoloTeam(target)
    return RankTeam(target, table, config)
