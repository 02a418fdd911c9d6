from __future__ import annotations

import dataclasses

import pytest

from data_prep.config import DataConfig
from mtp_train.config import Config, HeadConfig, RunConfig, TargetConfig
from mtp_train.plan.command import plan_for


def test_a_head_whose_steps_are_not_counted_is_refused() -> None:
    config = Config(run=RunConfig(name="x"), target=TargetConfig(path="m"), data=DataConfig())
    eagle3 = dataclasses.replace(config, head=HeadConfig(kind="eagle3"))
    with pytest.raises(ValueError, match=r"^head\.kind=eagle3: the plan does not know"):
        plan_for(eagle3)
