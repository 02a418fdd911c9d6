"""The command: find the target's facts, measure if asked, plan, show. Writes a calibration only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_train.app import Stage
from mtp_train.config import Config
from mtp_train.events import to_jsonable

if TYPE_CHECKING:
    from rich.console import Console

    from mtp_train.plan.bill import Plan
    from mtp_train.plan.facts import TargetFacts

CALIBRATION_NAME = "calibration.json"


def take_flags(stage: Callable[..., int], arguments: Sequence[str]) -> tuple[Stage, list[str]]:
    """``--json`` for ``plan.json=true``, ``--calibrate`` for ``plan.calibrate=true``."""
    flags = {"--json": "plan.json=true", "--calibrate": "plan.calibrate=true"}
    return stage, [flags.get(a, a) for a in arguments]


def run_plan(config: Config) -> int:
    """Say what a run will need; 1 when no ZeRO stage makes it fit."""
    from mtp_train.console import make_console

    if not config.data.max_tokens_total:
        raise ValueError(
            "data.max_tokens_total=0: say how many tokens to train on, as in tokens=100000000"
        )
    console = make_console()
    plan = plan_for(config)
    if config.plan.json:
        console.file.write(to_json(plan) + "\n")
    else:
        show(plan, console)
    return 0 if plan.advice.zero_stage is not None else 1


def plan_for(config: Config) -> Plan:
    """The plan of a configuration, on the hardware that it names."""
    from mtp_train.plan.bill import make_plan
    from mtp_train.plan.hardware import find_hardware, load_calibration, save_calibration

    facts = target_facts(config)
    if config.plan.hardware != "here":
        hardware = find_hardware(config.plan.hardware)
    else:
        file = Path(config.run.root) / config.run.name / CALIBRATION_NAME
        if config.plan.calibrate:
            from mtp_train.console import make_console
            from mtp_train.plan.calibrate import calibrate

            # The trainer's progress is not the plan: standard output may be read by a program.
            with make_console(stderr=True).status("measuring"), redirect_stdout(sys.stderr):
                measured = calibrate(config, facts)
            save_calibration(measured, file)
        hardware = load_calibration(file)
    return make_plan(config, facts, hardware, num_tokens=config.data.max_tokens_total)


def target_facts(config: Config) -> TargetFacts:
    """Of a directory, a ``config.json``, a built-in target or a known name, in this order.

    Raises ``ValueError`` naming what is known.
    """
    from mtp_train.plan.facts import find_known, known_targets, parse_facts, read_facts
    from runtime.models.gguf import BUILT_IN

    path = config.target.path
    if not path:
        raise ValueError(
            "target.path is not set; name a model directory, a config.json or one of "
            f"{', '.join(known_targets())}"
        )
    place = Path(path).expanduser()
    if place.is_dir() or place.suffix == ".json":
        return read_facts(place)
    if path in BUILT_IN or place.suffix == ".gguf":
        from mtp_train.features.target import target_directory

        return replace(read_facts(target_directory(config.target)), name=path)
    found = find_known(path)
    if found is None:
        raise ValueError(
            f"target.path={path}: no such directory or config.json, and not one of "
            f"{', '.join((*known_targets(), *BUILT_IN))}"
        )
    name, raw = found
    return parse_facts(raw, name=name, source=f"known target {name}")


def to_json(plan: Plan) -> str:
    """All of the plan, sums included."""
    values: dict[str, Any] = to_jsonable(asdict(plan))
    values["is_estimated"] = not plan.is_measured
    values["features"] = dict(plan.features)
    for use, shown in zip(plan.memory, values["memory"], strict=True):
        shown |= {"total": use.total, "fits": use.fits}
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def show(plan: Plan, console: Console) -> None:
    """Tables for a person."""
    from mtp_train.console import format_bytes, format_duration, make_table

    target, kind = plan.target, "measured here" if plan.is_measured else "estimated"
    active = ""
    if target.num_active_weights != target.num_weights:
        active = f" ({target.num_active_weights / 1e9:.2f}G active)"
    console.print(
        f"{target.name}: {target.num_weights / 1e9:.2f}G weights{active}; head "
        f"{plan.num_head_weights / 1e6:.1f}M; {plan.num_tokens:,} tokens in rows of "
        f"{plan.rows.num_tokens} ({plan.rows.num_answer_tokens} answer); {plan.hardware}, {kind}"
    )
    for use in plan.memory:
        rows = [(part.name, format_bytes(part.num_bytes), part.formula) for part in use.parts]
        verdict = "fits" if use.fits else "does not fit"
        rows.append(("total", format_bytes(use.total), f"{verdict} {format_bytes(use.capacity)}"))
        console.print(make_table(f"memory per device: {use.stage}", ("part", "bytes", ""), rows))
    disk = [
        (codec, format_bytes(size), "chosen" if codec == plan.codec else "")
        for codec, size in plan.features
    ]
    console.print(make_table("disk: features", ("codec", "bytes", ""), disk))
    times = [(t.name, format_duration(t.seconds), t.formula) for t in plan.times]
    times.append(("all", format_duration(sum(t.seconds for t in plan.times)), ""))
    console.print(make_table(f"time ({kind})", ("stage", "time", "formula"), times))
    options = [
        (o.zero_stage, format_bytes(o.state_bytes), f"{o.max_micro_batch:,}" or "none")
        for o in plan.zero_options
    ]
    columns = ("ZeRO", "states of the head", "tokens of a micro-batch that fit on a rank")
    console.print(make_table("stages", columns, options))
    advice = plan.advice
    if advice.zero_stage is None:
        console.print("recommended: nothing fits; validate.placement=subprocess or other hardware")
    else:
        console.print(
            f"recommended: {' '.join(advice.settings)} "
            f"({advice.micro_batch_tokens:,} tokens per micro-batch and rank)",
            markup=False,
            soft_wrap=True,
        )
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
