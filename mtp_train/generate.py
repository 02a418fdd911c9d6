"""`mtp generate`: a prompt on the command line, its answer on the terminal.

The prompt is taken out of the arguments before Hydra reads them, so that no character of it means
anything to the command line. The answer goes to standard output and nothing else does; legend,
statistics and hints go to standard error. No file is written.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mtp_train.app import Stage, refuse, run_command
from mtp_train.config import Config
from mtp_train.settings import known_keys

if TYPE_CHECKING:
    from rich.console import Console

    from mtp_train.generation import Answer, Answering

STDIN = "-"
INTERRUPTED = 130
_OPTION = re.compile(r"--?[A-Za-z][\w-]*(=\S*)?")


def take_prompt(stage: Callable[..., int], arguments: Sequence[str]) -> tuple[Stage, list[str]]:
    """The stage bound to its prompt, and the arguments that are left for Hydra.

    Exits with 2 when there is no prompt, or when a setting stands where the prompt belongs.
    """
    if not arguments or _OPTION.fullmatch(arguments[0]):
        if {"-h", "--help", "--cfg", "-c", "--hydra-help"} & set(arguments):
            return stage, list(arguments)
        refuse('generate: no prompt; write it first, as in mtp generate "Why?" run.name=mine')
    prompt, *rest = arguments
    key, equals, _ = prompt.partition("=")
    looks_like_a_setting = equals and not re.search(r"\s", prompt)
    if looks_like_a_setting and key.lstrip("+~") in {*known_keys(), "experiment", "recipe"}:
        refuse(
            f"generate: {prompt}: the prompt comes first, settings after it "
            "(a prompt that looks like a setting can be given on standard input, with -)"
        )
    return functools.partial(stage, prompt=prompt), rest


def run_generate(config: Config, prompt: str = STDIN) -> int:
    """Answer one prompt; 130 when the user stopped it, with what there was until then."""
    from mtp_train.console import make_console, setup_logging

    text = _read_prompt(prompt)
    out, info = make_console(), make_console(stderr=True)
    setup_logging(info, level=30)
    from mtp_train.generation import open_answering
    from mtp_train.generation_report import to_json

    with info.status("loading"):
        answering = open_answering(config, text)
    if answering.hint:
        info.print(answering.hint, markup=False, soft_wrap=True)
    if config.generate.json:
        answer = answering.answer(lambda event: None)
        out.file.write(to_json(answer, answering) + "\n")
    else:
        answer = _stream(answering, out, info)
    return INTERRUPTED if answer.interrupted else 0


def _read_prompt(prompt: str) -> str:
    text = sys.stdin.read().removesuffix("\n") if prompt == STDIN else prompt
    if not text.strip():
        raise ValueError("the prompt is empty; give at least one word")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the prompt is not valid UTF-8")
    return text


def _stream(answering: Answering, out: Console, info: Console) -> Answer:
    from mtp_train.generation_report import describe
    from mtp_train.token_colours import TokenPrinter

    printer = TokenPrinter(out, answering.decode)
    if answering.k:
        printer.print_legend(info, answering.k)
    answer = answering.answer(printer.write, printer.finish)
    info.print(describe(answer, answering), markup=False, soft_wrap=True)
    return answer


def main() -> None:
    stage, sys.argv[1:] = take_prompt(run_generate, sys.argv[1:])
    run_command("generate", stage)


if __name__ == "__main__":
    main()
