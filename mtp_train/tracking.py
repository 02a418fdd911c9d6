"""wandb: one run per stage of a run directory, all runs of a sweep in one group.

``trainer.wandb`` says whether at all; ``run.group`` is the group, the stage the job type. Started
again, a stage goes on in the same wandb run.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_train.app import config_values
from mtp_train.config import Config
from mtp_train.run_dir import write_text_atomic

if TYPE_CHECKING:
    from mtp_train.validate.report import LadderReport

PROJECT = "mtp-train"


def open_wandb(config: Config, *, root: Path, stage: str) -> Any:
    """The wandb run of one stage below ``root``, to be finished by the caller; ``None`` where it is
    disabled.
    """
    mode = config.trainer.wandb
    if mode == "disabled":
        return None
    import wandb

    identity = root / "wandb" / ("run-id" if stage == "train" else f"run-id-{stage}")
    if not identity.is_file():
        write_text_atomic(identity, uuid.uuid4().hex[:16] + "\n")
    return wandb.init(
        project=PROJECT,
        name=config.run.name,
        group=config.run.group or None,
        job_type=stage,
        dir=str(root),
        mode=mode,
        id=identity.read_text().strip(),  # a resumed run goes on in the same curve
        resume="allow",
        config=config_values(config),
        settings=wandb.Settings(silent=True, console="off"),
    )


def log_ladder(config: Config, report: LadderReport, *, root: Path) -> None:
    """The ladder's figures as a wandb run of the stage ``validate``."""
    run = open_wandb(config, root=root, stage="validate")
    if run is None:
        return
    run.log(ladder_figures(report))
    run.finish(exit_code=int(not report.passed))


def ladder_figures(report: LadderReport) -> Mapping[str, float]:
    """``mtbench/k3/tau``, its interval's ends, rates by position, speed-ups, verdicts (0 or 1)."""
    found: dict[str, float] = {"passed": float(report.passed)}
    for rung in report.rungs:
        found[f"rungs/{rung.name}"] = float(rung.passed)
    for row in report.acceptance:
        name = f"{row.prompt_set}/k{row.counts.k}"
        found |= {f"{name}/tau": row.counts.tau}
        found |= {f"{name}/tau_low": row.tau_low, f"{name}/tau_high": row.tau_high}
        found |= {f"{name}/rate_{j + 1}": rate for j, rate in enumerate(row.counts.rates)}
    for cell in report.speed:
        context = f"/context{cell.context_len}" if cell.context_len else ""
        found[f"speedup/k{cell.k}/batch{cell.batch_size}{context}"] = cell.speedup
    return found
