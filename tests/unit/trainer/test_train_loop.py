from __future__ import annotations

import torch

from mtp_train import train_loop
from mtp_train.distributed import SingleProcessGroup
from mtp_train.train_loop import Trainer, TrainInputs
from tests.distributed.trainer_worker import Job, TinyStore, make_config
from tests.unit.trainer.reference import random_embedding, random_head, tiny_spec


def make_trainer(root, **trainer) -> Trainer:
    job, spec = Job(str(root), trainer=trainer), tiny_spec()
    embedding = random_embedding(spec)
    tensors = random_head(spec).export_tensors()
    inputs = TrainInputs(spec, tensors, embedding, embedding, TinyStore(job), None, {})
    return Trainer(make_config(job), inputs, group=SingleProcessGroup(torch.device("cpu")))


def test_max_steps_repeats_epochs_as_needed_and_cuts_them_short(tmp_path):
    per_epoch = len(make_trainer(tmp_path, epochs=1)._plan)
    plan = make_trainer(tmp_path, epochs=1, max_steps=2 * per_epoch + 1)._plan
    assert [epoch for epoch, _ in plan] == [0] * per_epoch + [1] * per_epoch + [2]
    assert plan[:per_epoch] == make_trainer(tmp_path, epochs=1)._plan
    assert len(make_trainer(tmp_path, epochs=9, max_steps=2)._plan) == 2
    assert len(make_trainer(tmp_path, epochs=3)._plan) == 3 * per_epoch


def test_a_run_over_a_part_repeats_that_part_and_counts_it_once(tmp_path):
    whole = make_trainer(tmp_path)
    limit = sum(whole._lengths) // 2
    part = make_trainer(tmp_path, epochs=2, max_tokens=limit)
    epochs = [
        sorted(i for e, indices in part._plan if e == epoch for i in indices) for epoch in (0, 1)
    ]
    assert epochs[0] == epochs[1]
    assert len(epochs[0]) < len(whole._lengths)
    assert sum(part._lengths[index] for index in epochs[0]) == part._count_distinct() <= limit
    assert whole._count_distinct() == sum(whole._lengths)
    assert make_trainer(tmp_path, max_tokens=0)._plan == whole._plan


def test_the_verdict_on_other_weights_is_gone_before_new_ones_appear(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    verdict = trainer.head_dir / "parity.json"
    seen = []
    monkeypatch.setattr(train_loop, "save_head", lambda *_: seen.append(verdict.exists()))
    trainer._write_head(dict(trainer._inputs.initial))  # nothing to remove the first time
    verdict.parent.mkdir(parents=True)
    verdict.write_text("{}")
    trainer._write_head(dict(trainer._inputs.initial))
    assert seen == [False, False]
    assert not verdict.exists()
