"""`mtp <command> key=value …`: dispatch to the commands, each of which is a Hydra app."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtp_train import check_render, demo, generate, reproduce, stages
from mtp_train.app import Stage, run_command
from mtp_train.bench.command import run_bench, take_lists
from mtp_train.compare.command import run_compare, take_runs
from mtp_train.doctor.command import run_doctor, take_flags
from mtp_train.inspect.command import run_inspect, take_head
from mtp_train.plan.command import run_plan
from mtp_train.plan.command import take_flags as take_plan_flags

Prepare = Callable[[Callable[..., int], Sequence[str]], tuple[Stage, list[str]]]


def _as_given(stage: Callable[..., int], arguments: Sequence[str]) -> tuple[Stage, list[str]]:
    return stage, list(arguments)


@dataclass(frozen=True)
class Command:
    """A subcommand: what it runs, and what it takes and leaves.

    ``prepare`` takes out of the arguments what is not Hydra's and binds it to the stage. ``words``:
    how it is typed, where that is not its name.
    """

    name: str
    stage: Stage
    reads: str
    writes: str
    prepare: Prepare = _as_given
    words: str = ""

    @property
    def typed(self) -> str:
        return self.words or self.name


COMMANDS = (
    Command("preflight", stages.run_preflight, "prompts, target", "preflight.json"),
    Command("data", stages.run_data, "prompts, conversations", "data/"),
    Command(
        "data_check_render",
        check_render.run_check_render,
        "prompts, a server",
        "render_check.json",
        words="data check-render",
    ),
    Command("precompute", stages.run_precompute, "data/, target", "features/"),
    Command("train", stages.run_train, "features/, target", "checkpoints/, head/"),
    Command("validate", stages.run_validate, "head/, target", "parity.json, report.html"),
    Command(
        "hot_vocab",
        stages.run_hot_vocab,
        "head/, data/, target",
        "hot_vocab.json, hot_vocab/",
        words="hot-vocab",
    ),
    Command("export", stages.run_export, "head/, target", "export/"),
    Command(
        "generate",
        generate.run_generate,
        "head/, target, a prompt",
        "nothing: prints the answer",
        generate.take_prompt,
    ),
    Command("inspect", run_inspect, "a head's directory", "nothing: says what it is", take_head),
    Command("report", stages.run_report, "what is there of the run", "report.html"),
    Command(
        "plan",
        run_plan,
        "a target's config.json",
        "nothing: memory, disk, hours",
        take_plan_flags,
    ),
    Command(
        "bench",
        run_bench,
        "exported heads or servers, prompts",
        "bench.json: speed, latency, τ by load",
        take_lists,
    ),
    Command("compare", run_compare, "records of several runs", "nothing: shows them", take_runs),
    Command(
        "reproduce",
        reproduce.run_reproduce,
        "records of a run",
        "nothing: prints its commands",
        reproduce.take_run,
    ),
    Command("doctor", run_doctor, "this machine", "nothing: says what to fix", take_flags),
    Command("demo", demo.run_demo, "nothing: all of it on a small model", "summary.json"),
)


def main() -> None:
    """Entry point of the console script ``mtp``."""
    given = sys.argv[1:]
    if not given or given[0] in ("-h", "--help", "help"):
        _print_overview()
        return
    if given[0] == "--version":
        _print_version()
        return
    name = given[0]
    command, rest = find_command(given)
    if command is None:
        names = [c.typed for c in COMMANDS]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"commands are {', '.join(names)}"
        sys.stderr.write(f"mtp: {name}: unknown command; {hint}\n")
        sys.exit(2)
    stage, rest = command.prepare(command.stage, rest)
    sys.argv = [f"mtp {command.typed}", *rest]
    run_command(command.name, stage)


def find_command(arguments: Sequence[str]) -> tuple[Command | None, list[str]]:
    """The command that is typed first, and the arguments behind it. The longer one wins."""
    for command in sorted(COMMANDS, key=lambda c: -len(c.typed.split())):
        words = command.typed.split()
        if list(arguments[: len(words)]) == words:
            return command, list(arguments[len(words) :])
    return None, list(arguments)


def _print_overview() -> None:
    from mtp_train.console import make_console, make_table

    console = make_console()
    console.print("Train draft heads for speculative decoding; measure them as they are served.")
    rows = [(f"mtp {c.typed}", c.reads, c.writes) for c in COMMANDS]
    console.print(make_table("", ("command", "reads", "writes in runs/<name>/"), rows))
    console.print(
        "Usage:     mtp <command> key=value ...\n"
        "Examples:  mtp <command> --help\n"
        "Settings:  mtp <command> --cfg job\n"
        "Ranks:     torchrun --nproc-per-node N -m mtp_train.<command> key=value ...",
        markup=False,
    )


def _print_version() -> None:
    import importlib.metadata

    sys.stdout.write(f"mtp-train {importlib.metadata.version('mtp-train')}\n")


if __name__ == "__main__":
    main()
