from __future__ import annotations

import dataclasses
import sys
import types

from mtp_train.events import EventLog
from mtp_train.train_log import TrainLog
from tests.distributed.trainer_worker import Job, make_config


def test_a_resumed_run_goes_on_under_its_wandb_id(tmp_path, monkeypatch):
    started = []

    def init(**settings):
        started.append((settings["id"], settings["resume"]))
        return types.SimpleNamespace(finish=lambda exit_code: None)

    fake = types.SimpleNamespace(init=init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = make_config(Job(str(tmp_path)))
    config = dataclasses.replace(
        config, trainer=dataclasses.replace(config.trainer, wandb="offline")
    )
    for name in ("one", "one", "two"):
        with TrainLog(
            config,
            EventLog(None, stage="train"),
            root=tmp_path / name,
            total_steps=4,
            first_step=0,
            is_leader=True,
        ):
            pass
    first, again, other = started
    assert first == again
    assert first[1] == "allow"
    assert other[0] != first[0]
