"""Every way to decode, by its name. ``runtime.schedule`` chooses, and this is where a schedule is
plugged in: a name, what its draft has to be, and how it is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from runtime.config import EngineConfig
from runtime.models.base import DraftModel, Model
from runtime.scheduler import StepPlan
from runtime.spec.base import PlainSchedule, Runner
from runtime.spec.draft_target import DraftTargetSchedule, OnLeader
from runtime.spec.mtp import MtpSchedule
from runtime.spec.tree import TreeSchedule
from runtime.transfer import HostTransfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What schedules are made of. ``draft`` is ``None`` where this rank has none."""

    config: EngineConfig
    target: Runner
    draft: Runner | None
    transfer: HostTransfer
    announce: Callable[[StepPlan], None]


def make_schedule(
    config: EngineConfig,
    target: Model,
    draft: Model | OnLeader | None,
    *,
    make_runner: Callable[[Model], Runner],
    transfer: HostTransfer,
    announce: Callable[[StepPlan], None],
) -> PlainSchedule:
    """The schedule that ``config.schedule`` names; plain decoding without a draft.

    Raises ``ValueError`` when the schedule cannot work with this draft, or the draft with K.
    """
    name = _resolve(config, draft)
    if isinstance(draft, DraftModel):
        _check_length(config, draft)
    if config.micro_batch_halves and name == "draft_target":
        raise ValueError(
            "runtime.micro_batch_halves=true with a whole model that drafts: halves are of a "
            "head's chain; use runtime.micro_batch_halves=false"
        )
    parts = Parts(
        config,
        make_runner(target),
        make_runner(draft) if isinstance(draft, Model) else None,
        transfer,
        announce,
    )
    return _MAKERS[name](parts)


def _resolve(config: EngineConfig, draft: Model | OnLeader | None) -> str:
    if draft is None:
        return "plain"
    has_head = isinstance(draft, DraftModel)
    name: str = config.schedule
    if name == "auto":
        return "mtp" if has_head else "draft_target"
    if has_head == (name == "draft_target"):
        needed, given = ("a whole model", "a head") if has_head else ("a head", "a whole model")
        raise ValueError(
            f"runtime.schedule={name}: {needed} has to draft, the draft is {given}; "
            "runtime.schedule=auto goes by the draft"
        )
    return name


def _check_length(config: EngineConfig, draft: DraftModel) -> None:
    most = draft.max_draft_tokens
    if most is not None and config.num_draft_tokens > most:
        raise ValueError(
            f"runtime.num_draft_tokens={config.num_draft_tokens}: this head drafts {most} tokens "
            f"at most (it has one block for each); draft no more than {most}, or train one with "
            "more blocks (head.num_blocks)"
        )


def _plain(parts: Parts) -> PlainSchedule:
    return PlainSchedule(parts.target, num_rows=parts.config.max_running, transfer=parts.transfer)


def _mtp(parts: Parts) -> PlainSchedule:
    assert parts.draft is not None, "every rank has its part of the head"
    if parts.config.micro_batch_halves:
        _check_halves(parts)
    return MtpSchedule(
        parts.target,
        parts.draft,
        num_rows=parts.config.max_running,
        transfer=parts.transfer,
        verify=parts.config.verify,
        draft_mode=parts.config.draft_mode,
        in_halves=parts.config.micro_batch_halves,
    )


def _check_halves(parts: Parts) -> None:
    model = parts.target.model
    if model.backend is not None and not model.backend.plans_at_once:
        raise ValueError(
            f"runtime.micro_batch_halves=true with {type(model.backend).__name__}: it plans for "
            "one batch at a time; use runtime.attention=sdpa"
        )
    if model.group.world_size == 1:
        logger.warning(
            "runtime.micro_batch_halves on one rank: there is no communication to hide, and "
            "weights are read twice"
        )


def _tree(parts: Parts) -> PlainSchedule:
    assert parts.draft is not None, "every rank has its part of the head"
    return TreeSchedule(
        parts.target,
        parts.draft,
        num_rows=parts.config.max_running,
        transfer=parts.transfer,
        config=parts.config,
    )


def _draft_target(parts: Parts) -> PlainSchedule:
    return DraftTargetSchedule(
        parts.target,
        parts.draft,
        group=parts.target.model.group,
        announce=parts.announce,
        num_rows=parts.config.max_running,
        transfer=parts.transfer,
        verify=parts.config.verify,
        draft_mode=parts.config.draft_mode,
    )


_MAKERS: Mapping[str, Callable[[Parts], PlainSchedule]] = MappingProxyType(
    {
        "plain": _plain,
        "mtp": _mtp,
        "fixed_tree": _tree,
        "dynamic_tree": _tree,
        "draft_target": _draft_target,
    }
)
