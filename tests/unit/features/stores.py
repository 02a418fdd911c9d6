"""Small stores of random rows. Shape legend: T rows of a sample, D model width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from data_prep.ids import hash_token_ids
from mtp_train.config import Codec
from mtp_train.features.manifest import Fingerprint
from mtp_train.features.shards import FeatureSample
from mtp_train.features.writer import FeatureWriter, finish_store, recover_store

WIDTH = 16


def make_fingerprint(codec: Codec = "fp32", **changes: str) -> Fingerprint:
    values = {"target_weights": "w" * 64, "tokenizer": "t" * 64, "chat_template": "c" * 64}
    return Fingerprint(**(values | changes), hidden_size=WIDTH, codec=codec)


def make_samples(count: int, *, seed: int = 0) -> list[FeatureSample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(count):
        ids_T = torch.randint(0, 1000, (3 + index % 5,), generator=generator)
        hidden_TD = torch.randn(len(ids_T), WIDTH, generator=generator)
        mask_T = torch.arange(len(ids_T)) >= 2
        samples.append(FeatureSample(hash_token_ids(ids_T.tolist()), ids_T, mask_T, hidden_TD))
    return samples


def write_store(
    path: Path,
    *,
    codec: Codec = "fp32",
    count: int = 12,
    shard_tokens: int = 16,
    samples: Sequence[FeatureSample] | None = None,
) -> list[FeatureSample]:
    """A finished store of ``samples`` (or ``count`` random ones) in several small shards."""
    chosen = make_samples(count) if samples is None else list(samples)
    fingerprint = make_fingerprint(codec)
    manifest = recover_store(path, fingerprint)
    with FeatureWriter(
        path,
        fingerprint=fingerprint,
        shard_tokens=shard_tokens,
        max_quarantined=0,
        known=manifest.settled_ids(),
    ) as writer:
        for item in chosen:
            writer.add(item.sample_id, item.input_ids, item.loss_mask, item.hidden)
    finish_store(path)
    return chosen
