"""`data_wait`: how long a step of the trainer waits for its features, from a store on the disk.

`MTP_BENCH_RUN` names a run directory with `data/` and `features/` (default: the long recipe's).
Nothing is written into it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mtp_train.config import (
    Config,
    DataConfig,
    FeaturesConfig,
    LossConfig,
    RunConfig,
    TargetConfig,
    TrainerConfig,
)
from mtp_train.distributed import ProcessGroup
from mtp_train.events import read_events
from mtp_train.train_loop import Trainer
from mtp_train.trainer import open_inputs
from tests.bench.harness import BenchResult, NotHereError

STEPS, WARM_UP = 40, 5


def run(group: ProcessGroup) -> BenchResult:
    """Steps per second, and without the wait (peer); `ratio` is the wait's share of a step."""
    run_dir = Path(os.environ.get("MTP_BENCH_RUN", "runs/long"))
    if not (run_dir / "features").is_dir():
        raise NotHereError(
            f"MTP_BENCH_RUN={run_dir}: no features there; make demo recipe=long makes them"
        )
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            run=RunConfig(name="bench", root=folder),
            target=TargetConfig(path="smollm2-135m-instruct"),
            data=DataConfig(path=str(run_dir / "data")),
            features=FeaturesConfig(path=str(run_dir / "features")),
            loss=LossConfig(sub_vocab_size=12_000),
            trainer=TrainerConfig(
                tokens_per_step=1024,
                max_steps=STEPS,
                validate_every=0,
                checkpoint_every=10 * STEPS,
                wandb="disabled",
                tensorboard=False,
            ),
        )
        inputs, _ = open_inputs(config, group=group)
        Trainer(config, inputs, group=group).train()
        events = list(read_events(Path(folder) / "bench" / "events.jsonl", event="step"))
    steps = [event["seconds"] for event in events[WARM_UP:]]
    waited = sum(seconds["data_wait"] for seconds in steps) / len(steps)
    whole = sum(sum(seconds.values()) for seconds in steps) / len(steps)
    return BenchResult(
        name="data_wait",
        ours=1 / whole,
        peer=1 / (whole - waited),
        ratio=waited / whole,
        limit=None,
        share_of_limit=None,
        unit="steps/s",
        command="make bench BENCH=data_wait",
        note=f"{1e6 * waited:.0f} us of {1e3 * whole:.0f} ms, fp8 store on the disk",
    )
