"""`python -m tests.bench.compiled`: forward and backward of 1,024 rows, eager and compiled.

SmolLM2's sizes, random weights, K = 1, samples of 256 tokens, half of each an answer. Times are
the process's own seconds on a processor (one thread), in turns, so that other load on the machine
does not decide.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_train.config import HeadConfig
from mtp_train.heads import build_training_head
from mtp_train.heads.base import TrainingHead
from mtp_train.heads.init import initialise, make_head_spec
from mtp_train.packing import HeadBatch, pack
from runtime.cpu import set_threads
from runtime.models.config import load_config
from runtime.models.loader import default_cache_dir, resolve_target

LENGTH = 256


@dataclass(frozen=True)
class Row:
    """A sample that is in memory."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor
    layers: torch.Tensor | None = None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.bench.compiled", description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1, help="K of the unroll")
    options = parser.parse_args(arguments)
    set_threads(1)
    path = resolve_target("smollm2-135m-instruct", cache_dir=default_cache_dir())
    target = load_config(path)
    spec = make_head_spec(HeadConfig(), target, fingerprint="f" * 64)
    sys.stdout.write(
        "| dtype | eager | compiled | ratio | first call, compiled |\n|---|---|---|---|---|\n"
    )
    for dtype in (torch.float32, torch.bfloat16):
        tensors = initialise(
            spec,
            method="random",
            seed=1,
            initializer_range=0.04,
            num_target_layers=target.num_layers,
            read_target=lambda name: torch.empty(0),
        )
        embedding_VD = torch.randn(target.vocab_size, target.hidden_size).to(dtype)
        heads = []
        for compiled in (False, True):
            head = build_training_head(spec, dtype=dtype, compiled=compiled)
            head.load_tensors(tensors)
            heads.append(head)
        batch = _batch(options.rows, target.hidden_size, target.vocab_size, options.steps)
        batch = batch.to(torch.device("cpu"), dtype)
        first = _seconds(heads[1], batch, embedding_VD)
        _seconds(heads[0], batch, embedding_VD)
        times: list[list[float]] = [[], []]
        for _ in range(options.rounds):
            for head, own in zip(heads, times, strict=True):
                own.append(_seconds(head, batch, embedding_VD))
        eager, compiled_s = (statistics.median(own) for own in times)
        sys.stdout.write(
            f"| {str(dtype)[6:]} | {1000 * eager:.0f} ms | {1000 * compiled_s:.0f} ms "
            f"| {eager / compiled_s:.2f} | {first:.1f} s |\n"
        )
        sys.stdout.flush()
    return 0


def _batch(num_rows: int, width: int, vocab_size: int, num_steps: int) -> HeadBatch:
    generator = torch.Generator().manual_seed(0)
    samples = [
        Row(
            torch.randint(vocab_size, (LENGTH,), generator=generator),
            torch.arange(LENGTH) >= LENGTH // 2,
            torch.randn(LENGTH, width, generator=generator),
        )
        for _ in range(num_rows // LENGTH)
    ]
    return pack(samples, num_steps=num_steps)


def _seconds(head: TrainingHead, batch: HeadBatch, embedding_VD: torch.Tensor) -> float:
    """Of forward and backward, on a processor."""
    head.zero_grad(set_to_none=True)
    started = time.process_time()
    states = head(batch, embedding_VD)
    torch.stack([state.float().square().mean() for state in states]).sum().backward()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
