"""``events.jsonl`` into training curves, stage times, and what was out of the ordinary.

Only numbers of an event that this module does not know are repeated: its texts could hold anything.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_train.events import read_events, stage_attempts
from mtp_train.report.facts import (
    Happening,
    Logbook,
    Stage,
    StepPoint,
    ValidationPoint,
)
from mtp_train.report.json_values import mapping, number, numbers, text, whole

MAX_HAPPENINGS = 60  # shown; the first and last of more
_ROUTINE = {"stage_finished", "step", "validation", "token_set", "end"}


def read_logbook(file: Path) -> Logbook:
    """Empty where there is no log."""
    events = [event for event in read_events(file) if _is_whole(event)]
    steps, validations = _curves(events)
    skipped = [event for event in events if event["event"] == "skipped_step"]
    return Logbook(
        steps=steps,
        validations=validations,
        num_skipped=len({event.get("step") for event in skipped}),
        distinct_tokens=next(
            (whole(event.get("distinct_tokens")) for event in reversed(events) if _starts(event)),
            None,
        ),
        stages=_stages(events),
        happenings=_shorten(list(_happenings(events))),
    )


def _starts(event: Mapping[str, Any]) -> bool:
    return event["event"] == "start" and event["stage"] in ("train", "demo")


def _is_whole(event: Mapping[str, Any]) -> bool:
    texts = all(isinstance(event.get(name), str) for name in ("time", "stage", "event"))
    return texts and _time(event["time"]) is not None


def _curves(
    events: Iterable[Mapping[str, Any]],
) -> tuple[tuple[StepPoint, ...], tuple[ValidationPoint, ...]]:
    """Steps and validations of the run as it went in the end: what a resumed run did again counts
    once, and what lay behind its checkpoint is gone.
    """
    steps: dict[int, StepPoint] = {}
    validations: dict[int, ValidationPoint] = {}
    for event in events:
        step = whole(event.get("step"))
        if event["stage"] not in ("train", "demo") or step is None:
            continue
        if event["event"] == "start":
            steps = {at: point for at, point in steps.items() if at <= step}
            validations = {at: point for at, point in validations.items() if at <= step}
        elif event["event"] == "step":
            loss = number(event.get("loss"))
            if loss is not None:
                steps[step] = StepPoint(
                    step, loss, number(event.get("tokens_per_s")), whole(event.get("num_tokens"))
                )
        elif event["event"] == "validation":
            point = _validation(event, step)
            if point is not None:
                validations[step] = point
    return (
        tuple(steps[at] for at in sorted(steps)),
        tuple(validations[at] for at in sorted(validations)),
    )


def _validation(event: Mapping[str, Any], step: int) -> ValidationPoint | None:
    tau = number(event.get("tau"))
    if tau is None:
        return None
    return ValidationPoint(
        step=step,
        loss=number(event.get("loss")),
        tau=tau,
        rates=numbers(event.get("rates")),
        num_drafts=whole(event.get("num_drafts")),
        num_prompts=whole(event.get("num_prompts")),
        is_best=event.get("is_best") is True,
    )


def _stages(events: Sequence[Mapping[str, Any]]) -> tuple[Stage, ...]:
    sizes = {
        event["stage"]: whole(event.get("world_size"))
        for event in events
        if event["event"] == "stage_started"
    }
    return tuple(
        Stage(
            name,
            seconds=sum(attempt.seconds for attempt in attempts),
            num_attempts=len(attempts),
            is_finished=attempts[-1].is_finished,
            world_size=sizes.get(name),
        )
        for name, attempts in stage_attempts(events).items()
    )


def _happenings(events: Iterable[Mapping[str, Any]]) -> Iterable[Happening]:
    open_stages: set[str] = set()
    for event in events:
        name, stage = event["event"], event["stage"]
        what = ""
        if name == "stage_started":
            if stage in open_stages:
                what = "started again: the attempt before did not finish"
            open_stages.add(stage)
        elif name in ("stage_finished", "stage_refused"):
            open_stages.discard(stage)
        elif name == "start":
            if whole(event.get("step")):
                what = f"resumed after step {event['step']:,} of {event.get('total_steps', '?')}"
        elif name == "split_finished":
            if whole(event.get("num_quarantined")):
                bad = event["num_quarantined"]
                what = (
                    f"{bad} sample{'s' * (bad != 1)} of {text(event.get('split'))} quarantined: "
                    "hidden states not finite"
                )
        elif name == "skipped_step":
            what = f"step {event.get('step')} skipped: gradients not finite"
        elif name == "diverged":
            what = f"stopped at step {event.get('step')}: too many steps in a row were not finite"
        elif name not in _ROUTINE:
            what = f"{name} {_numbers_of(event)}".strip()
        if what:
            yield Happening(_time(event["time"]), stage, what)


def _numbers_of(event: Mapping[str, Any]) -> str:
    found = {name: number(value) for name, value in mapping(event).items()}
    return " ".join(f"{name}={value:g}" for name, value in found.items() if value is not None)


def _time(value: str) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(value)
    except ValueError:
        return None


def _shorten(found: list[Happening]) -> tuple[Happening, ...]:
    if len(found) <= MAX_HAPPENINGS:
        return tuple(found)
    half = MAX_HAPPENINGS // 2
    left_out = len(found) - 2 * half
    between = Happening(None, "", f"… {left_out:,} more in events.jsonl …")
    return (*found[:half], between, *found[-half:])
