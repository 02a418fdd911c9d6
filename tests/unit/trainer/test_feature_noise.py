from __future__ import annotations

import dataclasses

import torch

from mtp_train.distributed import SingleProcessGroup
from mtp_train.feature_noise import add_uniform_noise
from mtp_train.packing import pack
from mtp_train.train_loop import Trainer, TrainInputs
from tests.distributed.trainer_worker import Job, TinyStore, make_config
from tests.unit.trainer.reference import random_embedding, random_head, random_sample, tiny_spec


def test_noise_is_uniform_in_units_of_each_rows_root_mean_square():
    torch.manual_seed(0)
    hidden = torch.randn(40, 600) * torch.logspace(-3, 3, 40)[:, None]
    noise = add_uniform_noise(hidden, amplitude=0.2, seed=5) - hidden
    unit = noise / hidden.square().mean(-1, keepdim=True).sqrt()
    assert unit.abs().max() < 0.2001
    assert unit.abs().max() > 0.199
    # variance of U(-a, a) is a^2 / 3; 6 standard errors of 24,000 draws
    assert abs(unit.mean()) < 6 * 0.2 / (3 * 24_000) ** 0.5
    assert abs(unit.square().mean() - 0.04 / 3) < 6 * 0.012 / 24_000**0.5


def test_noise_depends_on_its_seed_alone_and_keeps_the_dtype():
    hidden = torch.randn(7, 16).bfloat16()
    noisy = [add_uniform_noise(hidden, amplitude=0.1, seed=seed) for seed in (1, 1, 2)]
    assert noisy[0].dtype == torch.bfloat16
    assert torch.equal(noisy[0], noisy[1])
    assert not torch.equal(noisy[0], noisy[2])


def test_only_what_the_head_reads_is_noisy():
    spec = tiny_spec()
    samples = [random_sample(spec, 9, seed=seed) for seed in (1, 2)]
    noisy = [sample.hidden + 1 for sample in samples]
    plain, batch = pack(samples, num_steps=2), pack(samples, num_steps=2, input_hidden=noisy)
    assert torch.equal(batch.hidden_SD, plain.hidden_SD + 1)
    for step, reference in zip(batch.steps, plain.steps, strict=True):
        assert torch.equal(step.target_AD, reference.target_AD)


def test_the_trainer_draws_new_noise_in_every_step_and_none_by_default(tmp_path):
    job, spec = Job(str(tmp_path)), tiny_spec()
    embedding, store = random_embedding(spec), TinyStore(job)
    tensors = random_head(spec).export_tensors()
    inputs = TrainInputs(spec, tensors, embedding, embedding, store, None, {})
    group = SingleProcessGroup(torch.device("cpu"))
    part = [(0, store.samples[0]), (1, store.samples[1])]

    def packed(step, **trainer):
        config = make_config(dataclasses.replace(job, trainer=trainer))
        return Trainer(config, inputs, group=group)._pack(step, part).hidden_SD

    clean = packed(0)
    assert torch.equal(clean, packed(1))
    assert torch.equal(clean, pack([sample for _, sample in part], num_steps=2).hidden_SD)
    noisy = packed(0, feature_noise=0.1)
    assert not torch.equal(noisy, clean)
    assert torch.equal(noisy, packed(0, feature_noise=0.1))
    assert not torch.equal(noisy, packed(1, feature_noise=0.1))
    rms = clean.square().mean(-1, keepdim=True).sqrt()
    assert ((noisy - clean).abs() <= 0.1001 * rms).all()
