"""`python -m tests.bench.context`: acceptance behind 2k, 4k and 8k tokens of real conversations.

Every question of MT-Bench is asked alone, and behind whole conversations of a token set (`--data`,
as `mtp data data=long_prompts` makes it) that fill the prompt to a length. The longer contexts end
with the shorter ones, so that lengths are compared question by question. Greedy, arg-max drafts,
with the ladder's own measurement. Prints a Markdown table and writes JSON to `--out`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from data_prep.evaluation import evaluation_prompts
from data_prep.token_set import load_token_set
from mtp_train.run_dir import write_json_atomic
from mtp_train.validate.bootstrap import paired_interval, tau_of_sums
from mtp_train.validate.measure import Measured, acceptance_sums, measure_acceptance
from runtime.config import EngineConfig
from runtime.cpu import best_dtype, set_threads
from runtime.head_spec import load_head
from runtime.models.heads import build_head
from runtime.models.loader import load_target

Ids = tuple[int, ...]
MAX_RUNNING = 8


@dataclass(frozen=True)
class Row:
    """`length` 0: the questions alone. `gap`: tau less that of the questions alone."""

    length: int
    measured: Measured
    gap: tuple[float, float, float]

    def to_dict(self) -> dict[str, Any]:
        found = self.measured
        return {
            "length": self.length,
            "prompt_tokens": [len(one.prompt_ids) for one in found.generations],
            "drafts": found.acceptance.num_drafts,
            "tau": found.acceptance.tau,
            "interval": [found.tau_interval.low, found.tau_interval.high],
            "rates": list(found.acceptance.rates),
            "gap": list(self.gap),
        }


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    set_threads(options.threads)
    target = load_target("smollm2-135m-instruct", dtype=best_dtype(), device=torch.device("cpu"))
    spec, tensors = load_head(options.head)
    head = build_head(spec, tensors, target.model)
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    chosen = evaluation_prompts("mtbench", tokenizer, options.prompts)
    questions = [prompt.prompt_ids for prompt in chosen]
    token_set = load_token_set(options.data)
    rows = [row.input_ids for split in ("validation", "train") for row in token_set.rows(split)]
    contexts = make_contexts(rows, count=len(questions), length=max(options.lengths))
    found: list[Row] = []
    for length in (0, *options.lengths):
        prompts = [
            fill(question, context, length)
            for question, context in zip(questions, contexts, strict=True)
        ]
        measured = measure_acceptance(
            target,
            head,
            prompts,
            k=options.k,
            max_tokens=options.tokens,
            temperature=0.0,
            engine_config=EngineConfig(num_threads=options.threads, max_running=MAX_RUNNING),
            prompt_set="mtbench",
        )
        found.append(
            Row(length, measured, _gap(measured, found[0].measured if found else measured))
        )
        sys.stderr.write(f"{found[-1].to_dict()}\n")
        if options.out:
            write_json_atomic(options.out, [row.to_dict() for row in found])
    sys.stdout.write(_table(found))
    return 0


def make_contexts(rows: Sequence[Ids], *, count: int, length: int) -> list[Ids]:
    """`count` runs of whole rows, one behind the other, of at least `length` tokens each. Rows are
    used once, until there are none left; then again.

    Raises `ValueError` without rows.
    """
    if not any(rows):
        raise ValueError("--data: the token set has no rows")
    endless = itertools.cycle(rows)
    contexts = []
    for _ in range(count):
        context: Ids = ()
        while len(context) < length:
            context += next(endless)
        contexts.append(context)
    return contexts


def fill(question: Ids, context: Ids, length: int) -> Ids:
    """The question behind the end of `context`, `length` tokens in all; 0: alone."""
    room = length - len(question)
    return context[-room:] + question if length and room > 0 else question


def _gap(measured: Measured, alone: Measured) -> tuple[float, float, float]:
    own, other = (acceptance_sums(one.generations, one.k) for one in (measured, alone))
    interval = paired_interval(own, other, tau_of_sums)
    gap = measured.acceptance.tau - alone.acceptance.tau
    return gap, interval.low, interval.high


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.context", description=__doc__)
    parser.add_argument("--head", type=Path, required=True, help="native head of SmolLM2")
    parser.add_argument("--data", type=Path, required=True, help="token set of conversations")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 4000, 8000])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def _table(rows: Sequence[Row]) -> str:
    lines = ["| prompt | τ | less the question alone | per position | drafts |", "|---" * 5 + "|"]
    for row in rows:
        found = row.measured
        name = f"{row.length:,} tokens" if row.length else "the question alone"
        gap, low, high = row.gap
        cells = [
            name,
            f"{found.acceptance.tau:.3f} [{found.tau_interval.low:.3f}, "
            f"{found.tau_interval.high:.3f}]",
            f"{gap:+.3f} [{low:+.3f}, {high:+.3f}]" if row.length else "",
            ", ".join(f"{rate:.3f}" for rate in found.acceptance.rates),
            str(found.acceptance.num_drafts),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
