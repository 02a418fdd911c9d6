"""Measures this machine with the configured target: training phases, dump, decoding, disk, memory.

Everything goes through the code that a run uses: the trainer, the feature writer, the engine. Rows
are random tokens; what they are does not matter to time. Two minutes at most on two cores for a
target of 135M weights.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from data_prep.ids import hash_token_ids
from mtp_train.config import Config, RunConfig, TrainerConfig
from mtp_train.distributed import ProcessGroup, init_process_group
from mtp_train.doctor.measure import measure_disk
from mtp_train.doctor.probes import probe_disk, probe_memory
from mtp_train.events import read_events
from mtp_train.features.manifest import Fingerprint
from mtp_train.features.sources import RuntimeSource
from mtp_train.features.target import target_directory, target_dtype
from mtp_train.features.writer import FeatureWriter, recover_store
from mtp_train.heads.init import OwnHead, initialise
from mtp_train.losses import target_log_normaliser
from mtp_train.packing import Sample
from mtp_train.phases import PhaseSeconds
from mtp_train.plan.bill import LARGEST_HOT, lasting_bytes
from mtp_train.plan.facts import TargetFacts, count_weights, plan_head_spec
from mtp_train.plan.hardware import DISK_BYTES_PER_S, Hardware, Line, Speeds
from mtp_train.plan.step_cost import Rows, StepCost, StepCosts
from mtp_train.targets import open_target
from mtp_train.train_loop import TrainInputs
from mtp_train.trainer import Trainer  # with all that a training process loads
from mtp_train.validate.measure import make_requests
from runtime.cpu import set_threads
from runtime.engine import Engine
from runtime.head_spec import HeadSpec, hash_vocab_ids
from runtime.models.base import Model
from runtime.models.config import load_config
from runtime.models.loader import Checkpoint
from runtime.request import Request

logger = logging.getLogger(__name__)

_SMALL_TOKENS = {"cpu": 768, "cuda": 8192}  # of a training step; the large one has twice as many
_STEPS = 10
_WARM_STEPS = 3
_DECODE_TOKENS = 40
_DUMP_SECONDS = 6.0
_NORMALISER_ROWS = 512
_MIN_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class _Sample:
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor
    layers: torch.Tensor | None = None


class _Samples:
    """Rows of one length with random states, held in memory."""

    def __init__(self, rows: Rows, count: int, spec: HeadSpec) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.full((count,), rows.num_tokens)
        mask = torch.arange(rows.num_tokens) >= rows.num_tokens - rows.num_answer_tokens
        self._samples = [
            _Sample(
                torch.randint(0, spec.vocab_size, (rows.num_tokens,), generator=generator),
                mask,
                torch.randn(rows.num_tokens, spec.hidden_size, generator=generator),
                torch.randn(rows.num_tokens, spec.input_size, generator=generator)
                if spec.reads_layers
                else None,
            )
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def get(self, index: int, *, dtype: torch.dtype) -> Sample:
        sample = self._samples[index]
        layers = None if sample.layers is None else sample.layers.to(dtype)
        return replace(sample, hidden=sample.hidden.to(dtype), layers=layers)


@dataclass(frozen=True)
class _TrainRun:
    """Median phases of a step, what such a step was counted to cost, and the peak in memory."""

    phases: PhaseSeconds
    cost: StepCost
    num_tokens: int
    peak_bytes: float  # 0 = not known


def calibrate(config: Config, facts: TargetFacts) -> Hardware:
    """Measure. ``config.target`` has to be on this machine.

    Raises ``ValueError`` when it is not, or is of a kind that the runtime does not load.
    """
    group = init_process_group(device=config.target.device)
    device = group.device
    if device.type == "cpu":
        set_threads(config.runtime.num_threads)
    try:
        return _measure(config, facts, group)
    finally:
        group.close()


def _measure(config: Config, facts: TargetFacts, group: ProcessGroup) -> Hardware:
    device = group.device
    dtype = target_dtype(config.target, device)
    directory = target_directory(config.target)
    rows = Rows(config.plan.row_tokens, config.plan.answer_tokens)
    model_config = load_config(directory)
    checkpoint = Checkpoint(
        directory, model_config.tensor_shapes(), tied=model_config.tie_word_embeddings
    )
    embedding, lm_head = checkpoint.read_vocabulary(dtype=dtype, device=device)
    count = max(1, round(_SMALL_TOKENS[device.type] / rows.num_tokens))
    columns = min(config.loss.sub_vocab_size or LARGEST_HOT, facts.vocab_size // 4)
    if config.head.kind == "eagle3":  # its loss is over its draft vocabulary
        columns = 0
    full, hot = _with_steps(config, 1, columns=0), _with_steps(config, 2, columns=columns)
    small, large = (
        _train(one, facts, group, rows, embedding, lm_head, num_rows=number)
        for one, number in ((full, count), (hot, 2 * count))
    )
    normaliser_s = _normaliser_seconds(lm_head, row_chunk=config.loss.row_chunk)
    base, factor = 0.0, 1.0
    if device.type == "cpu" and small.peak_bytes:
        base, factor = fit_memory(
            *(
                (
                    run.peak_bytes - lasting_bytes(one, facts, one.loss, dtype=dtype),
                    run.cost.peak_bytes,
                )
                for run, one in ((small, full), (large, hot))
            )
        )
    del embedding, lm_head  # the target brings its own
    target = open_target(config.target, device=device, runtime=config.runtime)
    batch, decode_s = _decode(config, target.model, rows, facts)
    dump_rate = _dump(config, target.model, rows, facts)
    disk = measure_disk(probe_disk(Path(config.run.root)))
    disk_rate = min(disk.read_rate or DISK_BYTES_PER_S, disk.write_rate or DISK_BYTES_PER_S)
    speeds = Speeds(
        forward=_line(small, large, "forward"),
        backward=_line(small, large, "backward"),
        loss_full=Line(0.0, small.cost.loss_flops / small.phases.loss),
        loss_hot=Line(0.0, large.cost.loss_flops / large.phases.loss),
        normaliser=Line(
            0.0, 2.0 * _NORMALISER_ROWS * facts.vocab_size * facts.hidden_size / normaliser_s
        ),
        optimiser=Line(
            0.0,
            sum(count_weights(plan_head_spec(facts, one.head)) for one in (full, hot))
            / (small.phases.optimiser + large.phases.optimiser),
        ),
        pack=Line(0.0, large.num_tokens / (large.phases.pack + large.phases.data_wait)),
        dump=Line(0.0, 2.0 * facts.num_active_weights * dump_rate),
        decode=Line(0.0, facts.num_weights * dtype.itemsize / decode_s),
        disk_bytes_per_s=disk_rate,
        base_bytes=base,
        heap_factor=factor,
    )
    return Hardware(
        name="here",
        num_devices=1,
        memory_bytes=_capacity(device),
        speeds=speeds,
        is_cpu=device.type == "cpu",
        measured_on=facts.name,
        dtype=str(dtype).removeprefix("torch."),
        decode_batch=batch,
    )


def _with_steps(config: Config, count: int, *, columns: int) -> Config:
    """With a loss over so many steps and frequent ids (0: all), and no block without a step."""
    loss = replace(config.loss, num_unroll_steps=count, sub_vocab_size=columns)
    blocks = count if config.head.kind == "medusa" else 0
    return replace(config, loss=loss, head=replace(config.head, num_blocks=blocks))


def _train(
    config: Config,
    facts: TargetFacts,
    group: ProcessGroup,
    rows: Rows,
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    *,
    num_rows: int,
) -> _TrainRun:
    """A few steps of the whole trainer, with ``num_rows`` rows per step, in a passing folder."""
    spec, loss, own_head = plan_head_spec(facts, config.head), config.loss, None
    if spec.lm_head == "own":
        ids = torch.arange(spec.draft_vocab_size) if spec.draft_vocab else None
        if spec.draft_vocab is not None and ids is not None:
            draft_vocab = replace(spec.draft_vocab, ids_sha256=hash_vocab_ids(ids))
            spec = replace(spec, draft_vocab=draft_vocab)
        own_head = OwnHead(ids, lm_head[: spec.draft_vocab_size])
    tokens = num_rows * rows.num_tokens
    samples = _Samples(rows, 2 * num_rows, spec)
    initial = initialise(
        spec,
        method="random",
        seed=1,
        initializer_range=0.02,
        num_target_layers=facts.num_layers,
        read_target=_no_tensor,
        own_head=own_head,
    )
    kept = torch.arange(loss.sub_vocab_size) if loss.sub_vocab_size else None
    inputs = TrainInputs(spec, initial, embedding, lm_head, samples, kept, {"plan": "calibration"})
    trainer = TrainerConfig(
        max_steps=_STEPS,
        tokens_per_step=tokens,
        validate_every=0,
        checkpoint_every=10 * _STEPS,
        wandb="disabled",
        tensorboard=False,
    )
    _reset_peak(group.device)
    with tempfile.TemporaryDirectory() as folder:
        run = RunConfig(name="calibration", root=folder)
        Trainer(replace(config, run=run, trainer=trainer), inputs, group=group).train()
        steps = list(read_events(Path(folder) / run.name / "events.jsonl", event="step"))
    phases = {
        name: statistics.median(float(step["seconds"][name]) for step in steps[_WARM_STEPS:])
        for name in asdict(PhaseSeconds())
    }
    cost = StepCosts(spec, loss, rows, dtype=embedding.dtype).of(tokens)
    return _TrainRun(PhaseSeconds(**phases), cost, tokens, _peak(group.device))


def fit_memory(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """Base and factor of ``peak = base + factor * passing`` through two runs, each given as (peak
    without lasting tensors, passing tensors) in bytes. The factor is 1 at least.
    """
    (peak_1, passing_1), (peak_2, passing_2) = small, large
    factor = max(1.0, (peak_2 - peak_1) / (passing_2 - passing_1))
    return max(0.0, peak_1 - factor * passing_1), factor


def _line(small: _TrainRun, large: _TrainRun, phase: str) -> Line:
    """Through both runs; through the origin where that would give a negative part."""
    (x1, y1), (x2, y2) = (
        (getattr(run.cost, f"{phase}_flops"), getattr(run.phases, phase)) for run in (small, large)
    )
    if y2 > y1:
        per_s = (x2 - x1) / (y2 - y1)
        fixed = y1 - x1 / per_s
        if fixed >= 0:
            return Line(fixed, per_s)
    return Line(0.0, (x1 + x2) / (y1 + y2))


def _decode(config: Config, model: Model, rows: Rows, facts: TargetFacts) -> tuple[int, float]:
    """Requests that decode together, and the median seconds of a step in which all of them do."""
    batch = config.runtime.max_running
    prompt = min(rows.num_tokens - rows.num_answer_tokens, config.runtime.max_model_len // 2)
    prompts = _random_rows(batch, prompt, facts.vocab_size)
    tokens = min(_DECODE_TOKENS, config.runtime.max_model_len - prompt)
    requests = make_requests(prompts, max_tokens=tokens, ignore_eos=True)
    engine = Engine(model, config=config.runtime)
    for request in requests:
        engine.add(request)
    seconds = []
    while engine.has_work:
        is_decoding = _all_decode(engine, requests)
        started = time.perf_counter()
        engine.step()
        if is_decoding:
            seconds.append(time.perf_counter() - started)
    if not seconds:
        raise ValueError(
            f"runtime.max_running={batch}: K/V memory does not hold so many requests of "
            f"{prompt + tokens} tokens; raise runtime.num_pages or lower it"
        )
    return batch, statistics.median(seconds)


def _all_decode(engine: Engine, requests: Sequence[Request]) -> bool:
    running = engine.scheduler.running
    return len(running) == len(requests) and all(state.output_ids for state in running)


def _dump(config: Config, model: Model, rows: Rows, facts: TargetFacts) -> float:
    """Tokens per second from token ids to shards on the disk of the run."""
    batch_tokens = config.features.max_batch_tokens
    source = RuntimeSource(model, max_batch_tokens=batch_tokens, max_len=rows.num_tokens)
    at_once = max(1, max(batch_tokens, _MIN_BATCH_TOKENS) // rows.num_tokens)
    fingerprint = Fingerprint("plan", "plan", "plan", facts.hidden_size, config.features.codec)
    root = Path(probe_disk(Path(config.run.root)).path)
    list(source.hidden(_random_rows(1, rows.num_tokens, facts.vocab_size)))
    with tempfile.TemporaryDirectory(dir=root, prefix=".mtp-plan-") as folder:
        recover_store(Path(folder), fingerprint)
        started, num_tokens = time.perf_counter(), 0
        with FeatureWriter(
            Path(folder),
            fingerprint=fingerprint,
            shard_tokens=config.features.shard_tokens,
            max_quarantined=0,
        ) as writer:
            for number in itertools.count():
                sequences = _random_rows(at_once, rows.num_tokens, facts.vocab_size, seed=number)
                for item in source.hidden(sequences):
                    ids = torch.tensor(item.token_ids)
                    mask = torch.ones(len(ids), dtype=torch.bool)
                    writer.add(hash_token_ids(item.token_ids), ids, mask, item.hidden_TD)
                    num_tokens += len(ids)
                if time.perf_counter() - started > _DUMP_SECONDS:
                    break
        return num_tokens / (time.perf_counter() - started)


def _random_rows(count: int, length: int, vocab: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, vocab, (count, length), generator=generator).tolist()
    return ids


def _normaliser_seconds(lm_head_VD: torch.Tensor, *, row_chunk: int) -> float:
    """Median seconds of the target's log-sum-exp of a few hundred rows."""
    device = lm_head_VD.device
    shape = (_NORMALISER_ROWS, lm_head_VD.shape[1])
    rows = torch.randn(shape, dtype=lm_head_VD.dtype, device=device)
    taken = []
    for _ in range(4):
        started = time.perf_counter()
        target_log_normaliser(rows, lm_head_VD, row_chunk=row_chunk)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _no_tensor(name: str) -> torch.Tensor:
    raise AssertionError(f"{name}: a random head reads nothing of the target")


def _capacity(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    memory = probe_memory()
    return float(min(memory.total, memory.limit or memory.total))


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    switch = Path("/proc/self/clear_refs")
    if switch.exists():
        switch.write_text("5")


def _peak(device: torch.device) -> float:
    """Bytes at the peak since the last reset; 0 where the system does not tell."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM"):
            return 1024.0 * int(line.split()[1])
    return 0.0
