"""`loss_memory`: peak extra memory of loss and gradients against the naive fp32 loss.

Each side runs in a process of its own, which reports how far its peak resident memory rose above
what it held before (weights and states are there before).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

from mtp_train import resident
from mtp_train.config import LossConfig
from mtp_train.losses import soft_cross_entropy_sum
from tests.bench.harness import BenchResult

ROWS, VOCAB, WIDTH = 6144, 49152, 576


def run() -> BenchResult:
    """Bytes of peak extra memory; ratio and time ratio are ours over the peer's (less is
    better).
    """
    naive, ours, bf16 = (_in_process(kind) for kind in ("naive", "ours", "bf16"))
    error = float((ours["grad"] - naive["grad"]).norm() / naive["grad"].norm())
    bf16_error = float((bf16["grad"] - naive["grad"]).norm() / naive["grad"].norm())
    return BenchResult(
        name="loss_memory",
        ours=ours["bytes"] / 1e6,
        peer=naive["bytes"] / 1e6,
        ratio=ours["bytes"] / naive["bytes"],
        limit=None,
        share_of_limit=None,
        unit="MB (less is better)",
        command="make bench BENCH=loss_memory",
        note=(
            f"{ROWS} rows; time {ours['seconds'] / naive['seconds']:.2f}x, "
            f"gradient off by {error:.1e}; "
            f"bf16: {bf16['bytes'] / 1e6:.0f} MB, time {bf16['seconds'] / naive['seconds']:.2f}x, "
            f"gradient off by {bf16_error:.1e}"
        ),
    )


def _in_process(kind: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.loss", kind],
        capture_output=True,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    report["grad"] = torch.tensor(report["grad"])
    return report


def _measure(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    # The same values on every side: what bf16 can hold.
    lm_head = (torch.randn(VOCAB, WIDTH, generator=generator) * 0.1).bfloat16().to(dtype)
    target = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().to(dtype)
    noise = torch.randn(ROWS, WIDTH, generator=generator)
    state = (target.float() + 0.5 * noise).bfloat16().to(dtype).requires_grad_()
    weight = torch.ones(ROWS)
    config = LossConfig()

    def once(rows: int) -> None:
        state.grad = None
        if kind == "naive":
            probs = F.linear(target[:rows], lm_head).softmax(-1)
            logits = F.linear(state[:rows], lm_head)
            loss = -(probs * logits.log_softmax(-1)).sum()
        else:
            loss = soft_cross_entropy_sum(
                state[:rows],
                target[:rows],
                weight[:rows],
                lm_head,
                row_chunk=config.row_chunk,
                vocab_chunk=config.vocab_chunk,
            )
        (loss / ROWS).backward()

    once(8)  # thread pools and library buffers
    resident.reset_peak()
    before = resident.resident()
    started = time.perf_counter()
    once(ROWS)
    seconds = time.perf_counter() - started
    assert state.grad is not None
    return {
        "bytes": resident.peak() - before,
        "seconds": seconds,
        "grad": state.grad[::97].float().tolist(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(sys.argv[1])) + "\n")
