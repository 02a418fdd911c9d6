"""Runs the trainer in child processes of a fork server that has imported everything once."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data_prep.config import DataConfig
from mtp_train.config import (
    Config,
    DeepSpeedConfig,
    LossConfig,
    RunConfig,
    TargetConfig,
    TrainerConfig,
)
from mtp_train.distributed import TorchProcessGroup
from mtp_train.train_loop import Trainer, TrainInputs
from runtime.head_spec import HeadSpec
from tests.unit.trainer.reference import (
    eagle3,
    medusa,
    random_embedding,
    random_head,
    random_sample,
    tiny_spec,
)

DEADLINE_S = 120


@dataclass(frozen=True)
class TinyValidation:
    loss: float
    tau: float
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Job:
    """One training run. Where it dies: at the ``kill_at``-th observed event (from 1; of those
    called ``kill_point``, if that is set), or ``kill_after_s`` seconds after the first event."""

    root: str
    name: str = "run"
    dtype: str = "float32"
    zero_stage: int = 0
    offload: str = "none"
    meters_traffic: bool = False
    loss: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    kept: int = 0
    nan_samples: tuple[int, ...] = ()
    taus: tuple[float, ...] = ()  # of consecutive validations; empty = no validator
    kill_at: int = 0
    kill_point: str = ""
    kill_after_s: float = 0.0
    kill_rank: int = 0
    num_samples: int = 13
    kind: str = "mtp"

    @property
    def spec(self) -> HeadSpec:
        changes = {
            "mtp": {},
            "eagle3": eagle3(draft_vocab=12),
            "medusa": medusa(),
            "medusa_own": medusa(lm_head="own"),
        }
        return tiny_spec(**changes[self.kind])


class TinyStore:
    def __init__(self, job: Job) -> None:
        spec = job.spec
        masks = ("answer", "spans", "none", "answer", "all")
        self.samples = [
            random_sample(spec, 6 + (i * 5) % 17, seed=100 + i, mask=masks[i % 5])
            for i in range(job.num_samples)
        ]
        for index in job.nan_samples:
            self.samples[index].hidden[1:] = float("nan")
        self.lengths = torch.tensor([len(s.input_ids) for s in self.samples])

    def __len__(self) -> int:
        return len(self.samples)

    def get(self, index: int, *, dtype: torch.dtype):
        sample = self.samples[index]
        return dataclasses.replace(sample, hidden=sample.hidden.to(dtype))


def make_config(job: Job) -> Config:
    trainer = {
        "epochs": 2,
        "tokens_per_step": 40,
        "learning_rate": 3e-3,
        "warmup_share": 0.2,
        "clip_norm": 0.5,
        "checkpoint_every": 3,
        "validate_every": 0,
        "keep_last": 2,
        "wandb": "disabled",
        "tensorboard": False,
    }
    loss = {"num_unroll_steps": 2, "step_decay": 0.6, "row_chunk": 16}
    return Config(
        run=RunConfig(name=job.name, root=job.root),
        target=TargetConfig(path="unused"),
        data=DataConfig(),
        loss=LossConfig(**(loss | job.loss)),
        trainer=TrainerConfig(**(trainer | job.trainer)),
        deepspeed=DeepSpeedConfig(zero_stage=job.zero_stage, offload=job.offload),
    )


def hash_bytes(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class TrafficMeter(TorchDispatchMode):
    """Bytes that collectives of this rank were given, whoever called them."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0

    def take(self) -> int:
        """Since the last call."""
        taken, self._bytes = self._bytes, 0
        return taken

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._bytes += sum(x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


def meter_traffic(trainer: Trainer, traffic: list[list[int]]) -> None:
    """One list per step: bytes before the first micro-batch, of each micro-batch up to the next,
    and of the last one with the optimiser's step.
    """
    step, accumulate = trainer._step, trainer._accumulate
    meter = TrafficMeter()

    def metered_step(*args):
        traffic.append([])
        with meter:
            out = step(*args)
        traffic[-1].append(meter.take())
        return out

    def metered_accumulate(*args):
        traffic[-1].append(meter.take())
        return accumulate(*args)

    trainer._step, trainer._accumulate = metered_step, metered_accumulate


def train(job: Job, group: TorchProcessGroup) -> dict[str, Any]:
    """Train one job in this process; the head's tensors come back as lists."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[job.dtype]
    spec = job.spec
    embedding = random_embedding(spec).to(dtype)
    lm_head = random_embedding(spec, seed=8).to(dtype)
    before = hash_bytes(embedding), hash_bytes(lm_head)
    inputs = TrainInputs(
        spec=spec,
        initial=random_head(spec).export_tensors(),
        embedding_VD=embedding,
        lm_head_VD=lm_head,
        samples=TinyStore(job),
        kept_ids=torch.arange(job.kept) if job.kept else None,
        fingerprint={},
    )
    points: list[str] = []
    times: list[float] = []

    def observe(point: str) -> None:
        points.append(point)
        times.append(time.perf_counter())
        if group.rank != job.kill_rank:
            return
        if job.kill_after_s and len(points) == 1:
            die = threading.Timer(job.kill_after_s, os.kill, (os.getpid(), signal.SIGKILL))
            die.daemon = True
            die.start()
        is_counted = job.kill_point in ("", point)
        count = len(points) if not job.kill_point else points.count(job.kill_point)
        if is_counted and count == job.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    taus = dict(enumerate(job.taus))
    validated: list[int] = []

    def validate(step, spec, tensors):
        validated.append(step)
        every = job.trainer["validate_every"]
        digest = sum(t.float().abs().sum().item() for t in tensors.values())
        return TinyValidation(digest, taus[(step - 1) // every], (0.5, 0.25))

    trainer = Trainer(
        make_config(job),
        inputs,
        group=group,
        validator=validate if job.taus else None,
        observe=observe,
    )
    traffic: list[list[int]] = []
    if job.meters_traffic:
        meter_traffic(trainer, traffic)
    report = trainer.train()
    engine = trainer._engine.engine
    return {
        "report": dataclasses.asdict(report),
        "tensors": trainer._engine.tensors(),
        "is_frozen": before == (hash_bytes(embedding), hash_bytes(lm_head)),
        "module_names": [name for name, _ in engine.module.named_parameters()],
        "communication": str(engine.communication_data_type),
        "accumulation": str(engine.get_data_types()[1]),
        "traffic": traffic,
        "validated": validated,
        "points": points,
        "span_s": times[-1] - times[0] if times else 0.0,
    }


def _main(rank: int, world_size: int, store: str, jobs: list[Job], results: str) -> None:
    gc.freeze()  # DeepSpeed collects several times, over everything that was imported
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    group = TorchProcessGroup(
        dist.group.WORLD, device=torch.device("cpu"), local_world_size=world_size
    )
    outcomes = []
    for job in jobs:
        try:
            outcomes.append(train(job, group))
        except (ValueError, RuntimeError) as error:
            outcomes.append({"error": f"{type(error).__name__}: {error}", "trace": _trace()})
    if rank == 0:
        torch.save(outcomes, results)
    dist.destroy_process_group()


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "deepspeed",
            "deepspeed.runtime.zero.muon.muon_optimizer",
            "torch._dynamo",
            "tests.distributed.trainer_worker",
        ]
    )
    return context


def _trace() -> str:
    return traceback.format_exc()


def _stage_main(config: Config, results: str) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    from mtp_train.distributed import init_process_group
    from mtp_train.trainer import run

    group = init_process_group(device="cpu")
    torch.save([run(config, group=group) for _ in range(2)], results)


def run_stage(config: Config, *, scratch: Path) -> list[Any]:
    """The reports of `mtp_train.trainer.run`, called twice in one fresh process."""
    results = scratch / "reports.pt"
    child = _context().Process(target=_stage_main, args=(config, str(results)))
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    return torch.load(results, weights_only=False)


def run_jobs(jobs: list[Job], *, world_size: int, scratch: Path) -> list[dict[str, Any]] | None:
    """Run jobs one after the other on fresh ranks; None when a rank was killed by its job."""
    context = _context()
    scratch.mkdir(parents=True, exist_ok=True)
    store, results = scratch / "store", scratch / "results.pt"
    for path in (store, results):
        path.unlink(missing_ok=True)
    ranks = [
        context.Process(target=_main, args=(rank, world_size, str(store), jobs, str(results)))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + DEADLINE_S
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        multiprocessing.connection.wait([r.sentinel for r in ranks if r.is_alive()], timeout=1)
        if any(rank.exitcode == -signal.SIGKILL for rank in ranks):
            for rank in ranks:  # the others wait for the dead one
                rank.kill()
                rank.join()
            return None
    codes = [rank.exitcode for rank in ranks]
    assert codes == [0] * world_size, f"exit codes {codes}"
    return torch.load(results, weights_only=False)
