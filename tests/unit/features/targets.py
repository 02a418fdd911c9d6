"""A tiny target with a token set, and the configuration that dumps it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data_prep.config import DataConfig
from data_prep.ids import hash_token_ids
from mtp_train.config import Config, FeaturesConfig, RunConfig, TargetConfig
from runtime.config import EngineConfig
from tests.unit.runtime.model_fixtures import SMALL, save_model


def save_target(path: Path, *, family: str = "llama", **overrides: Any) -> Path:
    """A random model with the least tokenizer that a fingerprint needs."""
    save_model(path, family, **overrides)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path, *, template: str = "{{ messages }}", extra: str = "x") -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, extra: 1}, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = template
    fast.save_pretrained(path)


def save_token_set(path: Path, *, train: int = 30, validation: int = 4, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for split, count in (("train", train), ("validation", validation)):
        rows = []
        for index in range(count):
            length = 5 + 7 * index % 40
            ids = torch.randint(3, SMALL["vocab_size"], (length,), generator=generator).tolist()
            mask = [position >= 3 for position in range(length)]
            rows.append({"sample_id": hash_token_ids(ids), "input_ids": ids, "loss_mask": mask})
        Dataset.from_list(rows).save_to_disk(str(path / split))


def make_config(root: Path, target: Path, data: Path, **features: Any) -> Config:
    settings: dict[str, Any] = {
        "codec": "fp32",
        "shard_tokens": 128,
        "max_batch_tokens": 64,
        "p0_rows_per_sample": 6,
    }
    return Config(
        run=RunConfig(name="test", root=str(root)),
        target=TargetConfig(
            path=str(target), dtype="float32", device="cpu", cache_dir=str(root / "cache")
        ),
        data=DataConfig(path=str(data)),
        features=FeaturesConfig(**(settings | features)),
        runtime=EngineConfig(num_threads=1),  # spinning threads cost more than tiny matrices
    )


def with_features(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, features=dataclasses.replace(config.features, **changes))
