"""The training loop: packed features in, the best head out.

A step is decided by (seed, epoch, step) alone, so that any world size sees the same samples and a
resumed run repeats what the killed one would have done. Each step: pack, count the active positions
of all ranks, accumulate gradients of the global mean, agree on whether they are finite, step.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from mtp_train import checkpoint
from mtp_train.attention import choose_attention
from mtp_train.checkpoint import Observer, TrainerState
from mtp_train.config import Config
from mtp_train.distributed import ProcessGroup
from mtp_train.draft_loss import DraftTarget, draft_head_loss
from mtp_train.errors import StageRefusedError
from mtp_train.feature_noise import add_uniform_noise
from mtp_train.heads import build_training_head
from mtp_train.losses import SubVocabulary, TailSampler, head_loss, loss_weight
from mtp_train.losses import target_log_normaliser as log_normaliser
from mtp_train.metrics import Best, StepMetrics, TrainReport, Validator
from mtp_train.optim import learning_rate
from mtp_train.packing import (
    HeadBatch,
    Sample,
    choose_part,
    count_active,
    idle_batch,
    pack,
    plan_epoch,
    read_rows,
    split_step,
)
from mtp_train.phases import PhaseClock
from mtp_train.resume_settings import deciding_settings
from mtp_train.run_dir import PARITY_NAME, RunDirectory
from mtp_train.sequence_parallel import (
    ALONE,
    HeadExchange,
    Ulysses,
    check_divides_heads,
    share_rows,
)
from mtp_train.train_log import TrainLog
from mtp_train.zero import HeadEngine, ensure_process_group
from runtime.head_spec import DRAFT_VOCAB_NAME, HeadSpec, save_head
from runtime.parallel import TorchProcessGroup
from runtime.seeds import derive_seed

logger = logging.getLogger(__name__)


class TrainingDivergedError(StageRefusedError):
    """Too many steps in a row were not finite."""


class SampleSource(Protocol):
    """What the trainer reads of a feature store."""

    lengths: torch.Tensor  # int64 [n]

    def __len__(self) -> int: ...

    def get(self, index: int, *, dtype: torch.dtype) -> Sample: ...


@dataclass(frozen=True)
class TrainInputs:
    """Everything a run trains with. Embedding and ``lm_head`` are read, never written."""

    spec: HeadSpec
    initial: Mapping[str, torch.Tensor]  # the head's first tensors
    embedding_VD: torch.Tensor
    lm_head_VD: torch.Tensor
    samples: SampleSource
    kept_ids: torch.Tensor | None  # int64: the loss's sub-vocabulary; None = everything
    fingerprint: Mapping[str, Any]  # what besides the configuration decides the result
    # Sample index -> fp32 [T], the target's log-sum-exp; the trainer adds what it had to compute.
    normalisers: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)


def ignore(_: str) -> None:
    """The observer of nobody."""


class Trainer:
    """One run on one rank. :meth:`train` is a collective."""

    def __init__(
        self,
        config: Config,
        inputs: TrainInputs,
        *,
        group: ProcessGroup,
        validator: Validator | None = None,
        observe: Observer = ignore,
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._group = group
        self._validator = validator
        self._observe = observe
        self._dtype = inputs.lm_head_VD.dtype
        self._run = RunDirectory.from_config(config)
        self._lengths = inputs.samples.lengths.tolist()
        self._num_steps = config.loss.num_unroll_steps
        self._plan = self._plan_run()
        # ranks with other samples; ranks with other rows of the same samples
        self._data: ProcessGroup = group
        self._rows: ProcessGroup | None = None
        self._exchange: HeadExchange = ALONE
        if config.trainer.sequence_parallel > 1:
            check_divides_heads(inputs.spec, config.trainer.sequence_parallel)
            mesh = group.split(config.trainer.sequence_parallel)
            assert isinstance(mesh.tensor, TorchProcessGroup), "more than one rank"
            self._data, self._rows = mesh.data, mesh.tensor
            self._exchange = Ulysses(mesh.tensor)
        self._attention = choose_attention(
            config.trainer.attention,
            device=group.device,
            dtype=self._dtype,
            head_dim=inputs.spec.attention_width,
        )
        self._sampler = None
        if inputs.kept_ids is not None and config.loss.logit_weight:
            self._sampler = TailSampler(
                inputs.kept_ids, inputs.lm_head_VD, sample_size=config.loss.tail_sample_size
            )
        self._draft_target: DraftTarget | None = None
        if inputs.spec.lm_head == "own":
            ids_W = inputs.initial.get(DRAFT_VOCAB_NAME)
            self._draft_target = DraftTarget.of(inputs.lm_head_VD, ids_W)
        self._needs_lse = self._sampler is not None or inputs.spec.draft_vocab is not None
        self._target_lse = inputs.normalisers  # kept over epochs
        self._clock = PhaseClock(group.device)

    def train(self) -> TrainReport:
        """Train to the end, from the run's newest checkpoint if there is one."""
        head = build_training_head(
            self._inputs.spec,
            dtype=self._dtype,
            attention=self._attention,
            activation_checkpointing=self._config.trainer.activation_checkpointing,
            exchange=self._exchange,
            compiled=self._config.trainer.compile,
        )
        head.load_tensors(self._inputs.initial)
        head.to(self._group.device)
        ensure_process_group(self._group)
        self._engine = HeadEngine(
            head,
            config=self._config.trainer,
            sharding=self._config.deepspeed,
            dtype=self._dtype,
            group=self._group,
        )
        self._state = self._restore()
        events = self._run.event_log("train", is_leader=self._group.is_leader)
        with (
            events,
            TrainLog(
                self._config,
                events,
                root=self._run.root,
                total_steps=len(self._plan),
                first_step=self._state.step,
                is_leader=self._group.is_leader,
            ) as log,
            ThreadPoolExecutor(max_workers=1) as reader,
        ):
            return self._loop(log, reader)

    def _plan_run(self) -> list[tuple[int, list[int]]]:
        """(epoch, sample indices) of every step: ``max_steps`` of them, else ``epochs``' worth."""
        trainer = self._config.trainer
        part = choose_part(
            self._lengths,
            max_tokens=trainer.max_tokens,
            seed=derive_seed(self._config.seed, "part"),
        )
        lengths = [self._lengths[index] for index in part]
        if trainer.max_tokens:
            logger.info("training on %d of %d samples, %d tokens", *self._size_of(part))
        plan: list[tuple[int, list[int]]] = []
        for epoch in itertools.count() if trainer.max_steps else range(trainer.epochs):
            steps = plan_epoch(
                lengths,
                tokens_per_step=trainer.tokens_per_step,
                seed=derive_seed(self._config.seed, "order"),
                epoch=epoch,
            )
            assert steps, "a run has at least one sample"
            plan += [(epoch, [part[place] for place in places]) for places in steps]
            if 0 < trainer.max_steps <= len(plan):
                return plan[: trainer.max_steps]
        return plan

    def _size_of(self, part: Sequence[int]) -> tuple[int, int, int]:
        return len(part), len(self._lengths), sum(self._lengths[index] for index in part)

    def _count_distinct(self) -> int:
        """Tokens of the samples that the run sees, each counted once."""
        used = {index for _, indices in self._plan for index in indices}
        return sum(self._lengths[index] for index in used)

    @property
    def head_dir(self) -> Path:
        """The native head directory: always the best head so far."""
        return self._run.root / "head"

    def settings(self) -> dict[str, Any]:
        """Settings that a continuation must share for its steps to be the same."""
        return {
            **deciding_settings(self._config, self._group.device),
            "world_size": self._group.world_size,
            "dtype": str(self._dtype),
            "num_samples": len(self._lengths),
            **self._inputs.fingerprint,
        }

    def _restore(self) -> TrainerState:
        directory = self._run.checkpoints
        if self._group.is_leader:
            checkpoint.clean(directory)
        found = checkpoint.find_checkpoints(directory)
        newest = self._group.broadcast_object(found[-1] if found else None)
        if newest is None:
            return TrainerState(0, 0, 0, 0, 0, None, self.settings())
        state = checkpoint.load(
            self._engine, newest, run_checkpoints=directory, settings=self.settings()
        )
        if self._group.is_leader and state.best is not None:
            checkpoint.point_best(directory, state.best.step)
        logger.info("continuing after step %d from %s", state.step, newest)
        return state

    def _loop(self, log: TrainLog, reader: ThreadPoolExecutor) -> TrainReport:
        trainer, total = self._config.trainer, len(self._plan)
        first, tokens, started = self._state.step, 0, time.perf_counter()
        if self._is_out_of_patience:  # killed after the checkpoint that ended the run
            total = first
        log.event(
            "start",
            step=first,
            total_steps=total,
            world_size=self._group.world_size,
            distinct_tokens=self._count_distinct(),
        )
        metrics: StepMetrics | None = None
        ahead: Future[list[list[tuple[int, Sample]]]] | None = None
        for step in range(first, total):
            with self._clock.phase("data_wait"):
                samples = ahead.result() if ahead is not None else self._read(step)
            ahead = reader.submit(self._read, step + 1) if step + 1 < total else None
            metrics = self._step(step, samples)
            tokens += metrics.num_tokens
            log.step(metrics, tokens_per_s=tokens / (time.perf_counter() - started))
            self._observe("step")
            self._check_diverged(log)
            is_last = step + 1 == total
            is_best = False
            if self._validator is not None and (
                is_last or (trainer.validate_every and (step + 1) % trainer.validate_every == 0)
            ):
                paused = time.perf_counter()
                is_best = self._validate(log, self._validator)
                started += time.perf_counter() - paused  # speed is that of training
                is_last = is_last or self._is_out_of_patience
            if is_last and self._state.best is None:
                self._write_head()
            if is_last or is_best or (step + 1) % trainer.checkpoint_every == 0:
                checkpoint.save(
                    self._engine,
                    self._state,
                    self._run.checkpoints,
                    keep_last=trainer.keep_last,
                    group=self._group,
                    observe=self._observe,
                )
            if is_last:
                break
        state = self._state
        speed = tokens / max(time.perf_counter() - started, 1e-9)
        log.event("end", step=state.step, updates=state.updates, skipped=state.skipped)
        return TrainReport(
            state.step,
            state.updates,
            state.skipped,
            metrics,
            state.best,
            speed,
            str(self.head_dir),
        )

    def _read(self, step: int) -> list[list[tuple[int, Sample]]]:
        """This rank's samples of a step, one list per micro-batch (runs on the reader thread)."""
        if step >= len(self._plan):
            return []
        world, micro = self._data.world_size, self._config.trainer.gradient_accumulation
        parts = split_step(self._plan[step][1], self._lengths, num_parts=world * micro)
        own = parts[self._data.rank :: world]
        samples = self._inputs.samples
        return [[(index, samples.get(index, dtype=self._dtype)) for index in p] for p in own]

    def _step(self, step: int, samples: list[list[tuple[int, Sample]]]) -> StepMetrics:
        config, state = self._config, self._state
        counts = self._data.all_reduce_ints(self._count(samples))
        weight = max(loss_weight(counts, step_decay=config.loss.step_decay), 1e-30)
        sub_vocab = None
        if self._sampler is not None:
            sub_vocab = self._sampler.draw(seed=derive_seed(config.seed, "tail", step))
        # [unusable gradients, loss, hidden part, logit part], summed over ranks
        sums = torch.zeros(4, dtype=torch.float64, device=self._group.device)
        for number, part in enumerate(samples):
            with self._clock.phase("pack"):
                batch = self._pack(step, part)
            sums[1:] += self._accumulate(batch, weight, sub_vocab)
            if number + 1 < len(samples):
                self._engine.end_micro_batch()
        sums[0] = self._engine.take_nonfinite()
        bad, loss, hidden, logit = (float(x) for x in self._group.all_reduce(sums).tolist())
        is_finite = bad == 0 and abs(loss) < float("inf")  # NaN compares false
        rate = learning_rate(state.updates, total=len(self._plan), config=config.trainer)
        with self._clock.phase("optimiser"):
            norm = self._engine.step(learning_rate=rate, is_finite=is_finite)
        epoch, indices = self._plan[step]
        self._state = dataclasses.replace(
            state,
            step=step + 1,
            epoch=epoch,
            updates=state.updates + is_finite,
            skipped=state.skipped + (not is_finite),
            nonfinite_run=0 if is_finite else state.nonfinite_run + 1,
        )
        return StepMetrics(
            step=step + 1,
            epoch=epoch,
            loss=loss / weight,
            hidden_loss=hidden / weight,
            logit_loss=logit / weight,
            learning_rate=rate,
            grad_norm=norm if is_finite else float("nan"),
            num_tokens=sum(self._lengths[index] for index in indices),
            num_active=sum(counts),
            updates=self._state.updates,
            skipped=self._state.skipped,
            seconds=self._clock.take(),
        )

    def _accumulate(
        self, batch: HeadBatch, weight: float, sub_vocab: SubVocabulary | None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns its loss sums (fp64 ``[3]``)."""
        loss, lm_head = self._config.loss, self._inputs.lm_head_VD
        target, embedding_VD = self._draft_target, self._inputs.embedding_VD
        with self._clock.phase("forward"):
            if target is not None:
                outputs = self._engine(batch, embedding_VD, with_lm_head=True)
                states, own = outputs[: self._num_steps], outputs[self._num_steps :]
            else:
                drafts_by = lm_head if loss.own_tokens else None
                states = self._engine(batch, embedding_VD, drafts_by)
        with self._clock.phase("loss"):
            if target is not None:
                parts = draft_head_loss(states, batch, own, target, config=loss)
            else:
                parts = head_loss(states, batch, lm_head, config=loss, sub_vocab=sub_vocab)
        with self._clock.phase("backward"):
            self._engine.backward(parts.total / weight)
        return torch.stack((parts.total.detach(), parts.hidden, parts.logit)).double()

    def _count(self, samples: list[list[tuple[int, Sample]]]) -> list[int]:
        totals = [0] * self._num_steps
        for part in samples:
            for _, sample in part:
                active = count_active(sample.loss_mask, self._num_steps)
                totals = [a + b for a, b in zip(totals, active, strict=True)]
        return totals

    def _pack(self, step: int, part: Sequence[tuple[int, Sample]]) -> HeadBatch:
        needs_lse, spec = self._needs_lse, self._inputs.spec
        amplitude = self._config.trainer.feature_noise
        if not part:
            batch = idle_batch(
                spec.hidden_size,
                num_steps=self._num_steps,
                with_lse=needs_lse,
                input_size=spec.input_size,
            )
        else:
            lse = [self._normaliser(i, sample) for i, sample in part] if needs_lse else None
            noisy = [self._noisy(step, i, sample) for i, sample in part] if amplitude else None
            batch = pack(
                [sample for _, sample in part],
                num_steps=self._num_steps,
                target_lse=lse,
                input_hidden=noisy,
                of_layers=spec.reads_layers,
            )
        if self._rows is not None:
            ranks = self._rows
            batch = share_rows(batch, rank=ranks.rank, num_ranks=ranks.world_size)
        return batch.to(self._group.device, self._dtype)

    def _noisy(self, step: int, index: int, sample: Sample) -> torch.Tensor:
        """The states that the head reads. Keyed by step and sample, not by rank, so that every
        world size and a resumed run draw the same.
        """
        return add_uniform_noise(
            read_rows(sample, of_layers=self._inputs.spec.reads_layers),
            amplitude=self._config.trainer.feature_noise,
            seed=derive_seed(self._config.seed, "feature noise", step, index),
        )

    def _normaliser(self, index: int, sample: Sample) -> torch.Tensor:
        """The target's log-sum-exp of one sample, where a loss can need it.

        Computed sample by sample, so that its bits do not depend on who shares the batch: a resumed
        run has lost this memory and computes it again.
        """
        if index not in self._target_lse:
            rows = sample.loss_mask[2:].nonzero()[:, 0] + 1
            values = torch.full((len(sample.loss_mask),), float("nan"))
            hidden = sample.hidden[rows].to(self._group.device, self._dtype)
            lm_head = self._inputs.lm_head_VD
            chunk = self._config.loss.row_chunk
            values[rows] = log_normaliser(hidden, lm_head, row_chunk=chunk).cpu()
            self._target_lse[index] = values
        return self._target_lse[index]

    def _check_diverged(self, log: TrainLog) -> None:
        run, limit = self._state.nonfinite_run, self._config.trainer.max_nonfinite_run
        if not run:
            return
        log.event("skipped_step", step=self._state.step, run=run)
        logger.warning("step %d: gradients are not finite, skipped", self._state.step)
        if run >= limit:
            log.event("diverged", step=self._state.step, run=run)
            raise TrainingDivergedError(
                f"{run} steps in a row had non-finite gradients, the last at step "
                f"{self._state.step} (trainer.max_nonfinite_run={limit}): lower "
                "trainer.learning_rate, or look for damaged features with `mtp precompute`"
            )

    def _validate(self, log: TrainLog, validator: Validator) -> bool:
        """Measure acceptance on all ranks; the leader decides whether it is the best so far."""
        tensors = self._engine.tensors()
        result = validator(self._state.step, self._inputs.spec, tensors)
        best = self._state.best
        is_best, is_higher = self._group.broadcast_object(
            (best is None or best.is_beaten_by(result), best is None or result.tau > best.tau)
        )
        log.validation(self._state.step, result, is_best=is_best)
        stale = 0 if is_higher else self._state.stale + 1
        self._state = dataclasses.replace(self._state, stale=stale)
        if is_best:
            best = Best(self._state.step, result.tau, result.loss)
            self._state = dataclasses.replace(self._state, best=best)
            self._write_head(tensors)
        if self._is_out_of_patience:
            assert best is not None
            log.event("early_stop", step=self._state.step, best_step=best.step, tau=best.tau)
            logger.info(
                "step %d: no higher tau than %.3f in %d validations (trainer.patience); the head "
                "of step %d is kept",
                self._state.step,
                best.tau,
                stale,
                best.step,
            )
        return bool(is_best)

    @property
    def _is_out_of_patience(self) -> bool:
        return 0 < self._config.trainer.patience <= self._state.stale

    def _write_head(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the native head directory. Collective."""
        tensors = self._engine.tensors() if tensors is None else tensors
        if self._group.is_leader:
            # the verdict on other weights must be gone before these can be seen
            (self.head_dir / PARITY_NAME).unlink(missing_ok=True)
            save_head(self.head_dir, self._inputs.spec, tensors)
            self._observe("head written")
        self._group.barrier()
