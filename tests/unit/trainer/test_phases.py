from __future__ import annotations

import time

import pytest
import torch

from mtp_train.phases import PhaseClock, PhaseSeconds


def test_phases_add_up_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = PhaseClock(torch.device("cpu"))
    for name, seconds in (("forward", 1.0), ("loss", 2.0), ("forward", 4.0), ("data_wait", 8.0)):
        with clock.phase(name):  # type: ignore[arg-type]
            now[0] += seconds
    taken = clock.take()
    assert taken == PhaseSeconds(data_wait=8.0, forward=5.0, loss=2.0)
    assert taken.total == 15.0
    assert clock.take() == PhaseSeconds()
