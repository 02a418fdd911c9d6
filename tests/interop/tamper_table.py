"""What our check and what a real vLLM say about damaged exports.

    python -m tests.interop.tamper_table HEAD OUT.json      a head of SmolLM2, exported as mimo
    python -m tests.interop.tamper_table eagle3 OUT.json    another layout: tiny targets and heads

Writes the answers down and prints them as a table. Each damage is served in fp32 at K = 1 on the
same prompts. What loads is judged by what the intact directory accepts.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mtp_train.export import check_export
from mtp_train.serving.job import ServingError
from mtp_train.validate.served import EnginePair
from runtime.cpu import set_threads
from runtime.request import Generation
from tests.interop import test_deepseek
from tests.interop.engines import Bench, make_bench
from tests.interop.test_eagle import HEADS
from tests.interop.tiny_heads import make_tiny_bench
from tests.unit.export.tampers import TAMPERS, TAMPERS_OF, Tamper

_MAX_WORDS = 160


@dataclass(frozen=True)
class Answer:
    """One damage. ``accepted`` of ``drafts`` where vLLM loads it, else ``load_error``."""

    tamper: str
    our_check: str
    load_error: str
    drafts: int
    accepted: int
    same_text: bool

    @property
    def vllm(self) -> str:
        """What vLLM does, in a few words."""
        if self.load_error:
            return f"refuses to load: {self.load_error}"
        text = "" if self.same_text else "; **the text changes**"
        return f"loads and accepts {self.accepted} of {self.drafts}{text}"


def ask(bench: Bench, name: str, tamper: Tamper | None, intact: EnginePair | None) -> Answer:
    """Damage a copy of the export, and show it to both."""
    with tempfile.TemporaryDirectory(prefix="mtp-tamper-") as folder:
        directory = Path(folder) / bench.export_dir.name
        shutil.copytree(bench.export_dir, directory)
        if tamper is not None:
            tamper.apply(directory)
        ours = check_words(directory, bench.target_dir)
        generations: tuple[Generation, ...] | None = intact.generations if intact else None
        try:
            pair = bench.compare(k=1, export_dir=directory, generations=generations)
        except ServingError as error:
            return Answer(name, ours, shorten(str(error)), 0, 0, same_text=True)
    texts = [prompt.output_ids for prompt in pair.served.prompts]
    wanted = [generation.output_ids for generation in pair.generations]
    counts = pair.served.counters
    return Answer(name, ours, "", counts.drafts, counts.accepted[0], texts == wanted)


def check_words(directory: Path, target_dir: Path) -> str:
    """What our check says, without the directory's name."""
    try:
        check_export(directory, target_dir=target_dir)
    except ValueError as error:
        return shorten(str(error).replace(f"{directory}/", ""))
    return "passes"


def shorten(text: str) -> str:
    """The last sentence that says something, on one line."""
    line = re.sub(r"\s+", " ", text.strip())
    return line if len(line) <= _MAX_WORDS else line[: _MAX_WORDS - 1] + "…"


def as_markdown(answers: list[Answer]) -> str:
    rows = [
        f"| {a.tamper.replace('_', ' ')} | {a.our_check.replace('|', '/')} "
        f"| {a.vllm.replace('|', '/')} |"
        for a in answers
    ]
    return "\n".join(["| damage | our check | vLLM |", "|---|---|---|", *rows])


def open_bench(which: str, folder: Path) -> tuple[Bench, Mapping[str, Tamper]]:
    if which == "deepseek":
        return test_deepseek.make_bench(folder), TAMPERS_OF[which]
    if which in TAMPERS_OF:
        head = {"eagle3": "reduced"}.get(which, which)
        return make_tiny_bench(folder, HEADS[head]), TAMPERS_OF[which]
    return make_bench(folder, Path(which)), TAMPERS


def main(which: str, out: str) -> None:
    set_threads(1)
    with tempfile.TemporaryDirectory(prefix="mtp-tampers-") as folder:
        bench, tampers = open_bench(which, Path(folder))
        intact = bench.compare(k=1, dtype=torch.float32)
        answers = [ask(bench, "none", None, intact)]
        for name, tamper in tampers.items():
            answers.append(ask(bench, name, tamper, intact))
            sys.stderr.write(f"{name}: {answers[-1].our_check} -- {answers[-1].vllm}\n")
    content = {
        "vllm": intact.served.version,
        "prompts": len(bench.prompts),
        "answers": [asdict(answer) for answer in answers],
    }
    Path(out).write_text(json.dumps(content, indent=2) + "\n")
    sys.stdout.write(as_markdown(answers) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
