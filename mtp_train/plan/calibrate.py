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
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from data_prep.ids import hash_token_ids
from mtp_train.config import Config
from mtp_train.distributed import ProcessGroup, init_process_group
from mtp_train.doctor.measure import measure_disk
from mtp_train.doctor.probes import probe_disk, probe_memory
from mtp_train.features.manifest import Fingerprint
from mtp_train.features.sources import RuntimeSource
from mtp_train.features.target import target_directory, target_dtype
from mtp_train.features.writer import FeatureWriter, recover_store
from mtp_train.losses import target_log_normaliser
from mtp_train.phases import PhaseSeconds
from mtp_train.plan.bill import LARGEST_HOT
from mtp_train.plan.facts import TargetFacts, count_weights, plan_head_spec
from mtp_train.plan.hardware import DISK_BYTES_PER_S, Hardware, Line, Speeds
from mtp_train.plan.memory_parts import lasting_bytes
from mtp_train.plan.step_cost import Rows, StepCost, StepCosts
from mtp_train.plan.training_run import MeasuredRun, measure_training
from mtp_train.targets import open_target
from mtp_train.trainer import training_dtype
from mtp_train.validate.measure import make_requests
from runtime.cpu import set_threads
from runtime.engine import Engine
from runtime.models.base import Model
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import load_config
from runtime.request import Request

logger = logging.getLogger(__name__)

_SMALL_TOKENS = {"cpu": 768, "cuda": 8192}  # of the small run's steps
_LARGE = 3  # times as many in the large run's
_STEPS = 16
_DECODE_TOKENS = 40
_DUMP_SECONDS = 6.0
_NORMALISER_ROWS = 512
_MIN_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class _TrainRun:
    """A measured run, and what a step of its and its largest step were counted to cost."""

    measured: MeasuredRun
    config: Config
    cost: StepCost
    largest: StepCost

    @property
    def phases(self) -> PhaseSeconds:
        return self.measured.phases


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
    dtype, train_dtype = target_dtype(config.target, device), training_dtype(config, device)
    directory = target_directory(config.target)
    rows = Rows(config.plan.row_tokens, config.plan.answer_tokens)
    model_config = load_config(directory)
    count = max(1, round(_SMALL_TOKENS[device.type] / rows.num_tokens))
    columns = min(config.loss.sub_vocab_size or LARGEST_HOT, facts.vocab_size // 4)
    if config.head.kind == "eagle3":  # its loss is over its draft vocabulary
        columns = 0
    full, hot = _with_steps(config, 1, columns=0), _with_steps(config, 2, columns=columns)
    small, large = (
        _train(one, facts, rows, num_tokens=number * rows.num_tokens, dtype=train_dtype)
        for one, number in ((full, count), (hot, _LARGE * count))
    )
    base, factor = 0.0, 1.0
    if device.type == "cpu" and small.measured.peak_bytes:
        base, factor = fit_memory(
            *(
                (
                    run.measured.peak_bytes - _lasting(facts, run, dtype=train_dtype),
                    run.largest.peak_bytes,
                )
                for run in (small, large)
            )
        )
    checkpoint = Checkpoint.of(directory, model_config)
    _, lm_head = checkpoint.read_vocabulary(dtype=train_dtype, device=device)
    normaliser_s = _normaliser_seconds(lm_head, row_chunk=config.loss.row_chunk)
    del lm_head  # the target brings its own
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
        # Of the run without target normalisers, which the bill counts apart.
        pack=Line(0.0, small.measured.num_tokens / (small.phases.pack + small.phases.data_wait)),
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
        train_dtype=str(train_dtype).removeprefix("torch."),
        decode_batch=batch,
    )


def _with_steps(config: Config, count: int, *, columns: int) -> Config:
    """With a loss over so many steps and frequent ids (0: all), and no block without a step."""
    loss = replace(config.loss, num_unroll_steps=count, sub_vocab_size=columns)
    blocks = count if config.head.kind == "medusa" else 0
    head = replace(config.head, init="random", num_blocks=blocks)
    validate = replace(config.validate, k=min(config.validate.k, blocks or config.validate.k))
    return replace(config, loss=loss, head=head, validate=validate)


def _train(
    config: Config,
    facts: TargetFacts,
    rows: Rows,
    *,
    num_tokens: int,
    dtype: torch.dtype,
) -> _TrainRun:
    """A few steps, and what they were counted to cost."""
    measured = measure_training(config, facts, rows, num_tokens=num_tokens, num_steps=_STEPS)
    costs = StepCosts(plan_head_spec(facts, config.head), config.loss, rows, dtype=dtype)
    largest = costs.of(num_tokens + rows.num_tokens)
    return _TrainRun(measured, config, costs.of(measured.num_tokens), largest)


def _lasting(facts: TargetFacts, run: _TrainRun, *, dtype: torch.dtype) -> float:
    tokens_read = run.measured.num_tokens * run.measured.num_steps
    return lasting_bytes(run.config, facts, dtype=dtype, tokens_read=tokens_read)


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


def _capacity(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    memory = probe_memory()
    return float(min(memory.total, memory.limit or memory.total))
