"""The command: probe, measure, judge, show. Exit code 1 when something has to be fixed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mtp_train.app import Stage
from mtp_train.config import Config
from mtp_train.doctor.checks import check_machine, uses_gpu, worst
from mtp_train.doctor.facts import Finding, Machine
from mtp_train.doctor.probes import probe_machine
from mtp_train.events import to_jsonable

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def take_flags(stage: Callable[..., int], arguments: Sequence[str]) -> tuple[Stage, list[str]]:
    """``--json`` for ``doctor.json=true``."""
    return stage, ["doctor.json=true" if a == "--json" else a for a in arguments]


def run_doctor(config: Config) -> int:
    """Say what this machine can do and what to fix; 1 when a verdict is ``fail``."""
    from mtp_train.console import make_console

    console = make_console()
    machine, findings = examine(config)
    if config.doctor.json:
        console.file.write(to_json(machine, findings) + "\n")
    else:
        _show(findings, console)
    return 1 if worst(findings) == "fail" else 0


def examine(config: Config) -> tuple[Machine, list[Finding]]:
    """The machine as it is, and all verdicts on it and on the configured target."""
    from mtp_train.console import make_console

    with make_console(stderr=True).status("looking"):
        machine = probe_machine(config)
    if config.doctor.measure:
        with make_console(stderr=True).status("measuring"):
            machine = _measure(machine, config)
    findings = check_machine(machine, min_free_disk_share=config.features.min_free_disk_share)
    if config.target.path and not machine.torch.error:
        from mtp_train.doctor.feasibility import check_target

        findings += check_target(config, machine)
    return machine, findings


def to_json(machine: Machine, findings: Sequence[Finding]) -> str:
    """``{"verdict", "findings": [{"name", "verdict", "text", "fix"}], "machine"}``."""
    facts = to_jsonable(replace(machine, processor=replace(machine.processor, flags=frozenset())))
    facts["processor"]["flags"] = sorted(machine.processor.flags)
    values: dict[str, Any] = {
        "verdict": worst(list(findings)),
        "findings": to_jsonable(list(findings)),
        "machine": facts,
    }
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


def _measure(machine: Machine, config: Config) -> Machine:
    from mtp_train.doctor.measure import measure_disk, measure_rates

    machine = replace(machine, disk=measure_disk(machine.disk))
    if machine.torch.error:
        return machine
    from runtime.cpu import set_threads

    set_threads(config.runtime.num_threads)
    devices = ["cpu", "cuda"] if uses_gpu(machine) else ["cpu"]
    return replace(machine, rates=tuple(measure_rates(device) for device in devices))


def _show(findings: Sequence[Finding], console: Any) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        style = _STYLES[finding.verdict]
        table.add_row(f"[{style}]{finding.verdict}[/]", finding.name, escape(finding.text))
    console.print(table)
    todo = [finding for finding in findings if finding.verdict != "ok"]
    console.print(f"\n{'What to fix' if todo else 'Nothing to fix.'}", style="bold")
    for finding in todo:
        line = f"{finding.verdict}  {finding.name}: {finding.fix}"
        console.print(line, markup=False, soft_wrap=True)
