"""Where training figures go: ``events.jsonl``, TensorBoard, wandb, and one progress line.

Only the leader writes; other ranks hold a log that drops everything. Every step is an event; the
other places get one step in ``trainer.log_every``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from mtp_train.config import Config
from mtp_train.console import make_console, make_progress
from mtp_train.events import EventLog, to_jsonable
from mtp_train.metrics import StepMetrics, Validation
from mtp_train.tracking import open_wandb

logger = logging.getLogger(__name__)


class TrainLog:
    """A context manager around the writers; figures in, nothing out."""

    def __init__(
        self,
        config: Config,
        events: EventLog,
        *,
        root: Path,
        total_steps: int,
        first_step: int,
        is_leader: bool,
    ) -> None:
        self._config = config
        self._events = events
        self._root = root
        self._total_steps = total_steps
        self._first_step = first_step
        self._is_leader = is_leader
        self._acceptance = "–"
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> TrainLog:
        if self._is_leader:
            self._open_tensorboard()
            self._open_wandb()
            self._open_progress()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))

    def step(self, metrics: StepMetrics, *, tokens_per_s: float) -> None:
        """One optimiser step."""
        self._events.write("step", metrics, tokens_per_s=round(tokens_per_s, 1))
        if metrics.step % self._config.trainer.log_every and metrics.step != self._total_steps:
            return
        self._scalars(
            metrics.step,
            {
                "train/loss": metrics.loss,
                "train/hidden_loss": metrics.hidden_loss,
                "train/logit_loss": metrics.logit_loss,
                "train/learning_rate": metrics.learning_rate,
                "train/grad_norm": metrics.grad_norm,
                "train/skipped": metrics.skipped,
                "speed/tokens_per_s": tokens_per_s,
                **{f"seconds/{name}": s for name, s in asdict(metrics.seconds).items()},
            },
        )
        if self._progress is not None:
            self._progress.update(
                self._task,
                completed=metrics.step,
                loss=f"{metrics.loss:.3f}",
                hidden=f"{metrics.hidden_loss:.4f}",
                logit=f"{metrics.logit_loss:.3f}",
                tok_s=f"{tokens_per_s:,.0f}",
                tau=self._acceptance,
            )

    def validation(self, step: int, result: Validation, *, is_best: bool) -> None:
        """One validation through the runtime."""
        fields = {key: value for key, value in _fields(result).items() if key != "step"}
        self._events.write("validation", fields, step=step, is_best=is_best)
        self._acceptance = f"{result.tau:.3f}"
        rates = {f"validate/rate_{j + 1}": rate for j, rate in enumerate(result.rates)}
        self._scalars(step, {"validate/loss": result.loss, "validate/tau": result.tau} | rates)
        shown = " ".join(f"{rate:.3f}" for rate in result.rates)
        logger.info(
            "step %d: tau %.3f, accepted per position %s, loss %.4f%s",
            step,
            result.tau,
            shown,
            result.loss,
            " (best)" if is_best else "",
        )

    def event(self, name: str, **fields: Any) -> None:
        """Anything else worth a line in ``events.jsonl``."""
        self._events.write(name, **fields)

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def _open_tensorboard(self) -> None:
        if not self._config.trainer.tensorboard:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._tensorboard = SummaryWriter(
            str(self._root / "tensorboard"), purge_step=self._first_step + 1
        )

    def _open_wandb(self) -> None:
        self._wandb = open_wandb(self._config, root=self._root, stage="train")

    def _open_progress(self) -> None:
        names = ("loss", "hidden", "logit", "tok_s", "tau")
        self._progress = make_progress(make_console(), fields=names)
        self._task = self._progress.add_task(
            "step",
            total=self._total_steps,
            completed=self._first_step,
            **dict.fromkeys(names, "–"),
        )
        self._progress.start()


def _fields(result: Validation) -> dict[str, Any]:
    plain = to_jsonable(result)
    if isinstance(plain, dict):
        return plain
    return {"loss": result.loss, "tau": result.tau, "rates": list(result.rates)}
