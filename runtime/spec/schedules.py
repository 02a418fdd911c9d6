"""Every way to decode, by its name. ``runtime.schedule`` chooses, and this is where a schedule is
plugged in: a name, what its draft has to be, and how it is made.
"""

from __future__ import annotations

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
    return MtpSchedule(
        parts.target,
        parts.draft,
        num_rows=parts.config.max_running,
        transfer=parts.transfer,
        verify=parts.config.verify,
        draft_mode=parts.config.draft_mode,
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
