"""A calibration of this machine with a tiny target, through trainer, dump and decoding."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from mtp_train.plan import calibrate as module
from mtp_train.plan.calibrate import calibrate, fit_memory
from mtp_train.plan.command import plan_for
from mtp_train.plan.facts import read_facts
from mtp_train.plan.hardware import Line, load_calibration, save_calibration
from tests.unit.cli.test_commands import compose
from tests.unit.features.targets import save_target


def test_memory_is_a_base_and_a_share_of_what_passes() -> None:
    assert fit_memory((700.0, 100.0), (900.0, 200.0)) == (500.0, 2.0)
    assert fit_memory((700.0, 100.0), (750.0, 200.0)) == (600.0, 1.0)


HEADS = {
    "mtp": (),
    "eagle3": ("head=eagle3", "loss=eagle3", "head.layer_ids=[1]", "head.draft_vocab_size=9"),
    "medusa": ("head=medusa", "loss=medusa"),
}


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_a_calibration_has_every_rate_and_makes_a_measured_plan(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DUMP_SECONDS", 0.2)
    monkeypatch.setattr(module, "_SMALL_TOKENS", {"cpu": 60})
    monkeypatch.setattr(module, "_STEPS", 6)
    target = save_target(tmp_path / "target")
    config = compose(
        "plan",
        [
            *(f"target.path={target}", "target.device=cpu", "target.dtype=float32"),
            *(f"run.root={tmp_path}/runs", "plan.hardware=here", "data.max_tokens_total=5000"),
            *("plan.row_tokens=30", "plan.answer_tokens=20", "runtime.num_threads=1"),
            *("runtime.num_pages=64", "runtime.max_model_len=64", "runtime.max_running=4"),
            *("trainer.tokens_per_step=120", "trainer.validate_every=0"),
            *HEADS[head],
        ],
    )
    hardware = calibrate(config, read_facts(target))
    for field in dataclasses.fields(hardware.speeds):
        speed = getattr(hardware.speeds, field.name)
        rate = speed.per_s if isinstance(speed, Line) else speed
        assert math.isfinite(rate), field.name
        assert rate > 0, field.name
    assert hardware.decode_batch == 4
    assert list((tmp_path / "runs").glob("**/*")) == []  # what was written to measure is gone
    file = tmp_path / "runs" / "plan" / "calibration.json"
    save_calibration(hardware, file)
    assert load_calibration(file) == hardware
    plan = plan_for(config)
    assert plan.is_measured
    assert plan.step_seconds > 0
