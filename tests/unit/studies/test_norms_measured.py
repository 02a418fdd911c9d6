"""Replayed counts are those of decoding, for the target as it is and in other coordinates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from data_prep.token_set import TokenRow, TokenSetWriter
from mtp_train.conditioning import Conditioning, condition_target
from mtp_train.config import HeadConfig
from mtp_train.heads.init import initialise, make_head_spec
from mtp_train.studies.norms import (
    Counts,
    Meter,
    Settings,
    answer,
    decode,
    load_answers,
    long_prompts,
    save_answers,
)
from mtp_train.targets import open_target
from runtime.head_spec import save_head
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import load_config
from runtime.models.loader import fingerprint_target
from tests.unit.features.targets import make_config, save_target

CPU = torch.device("cpu")
MAX_TOKENS = 24


def write_head(root: Path, target: Path) -> Path:
    config = load_config(target)
    checkpoint = Checkpoint(target, config.tensor_shapes(), tied=False)
    fingerprint = fingerprint_target(target, cache_dir=root / "cache")
    spec = make_head_spec(HeadConfig(), config, fingerprint=fingerprint)
    tensors = initialise(
        spec,
        method="last_layer",
        seed=1,
        initializer_range=0.3,
        num_target_layers=config.num_layers,
        read_target=lambda name: checkpoint.read(name, dtype=torch.float32, device=CPU),
    )
    path = root / f"head-{target.name}"
    save_head(path, spec, tensors)
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("study")
    source = save_target(root / "source")
    hard = Conditioning(8.0, num_outliers=3, outlier_scale=64.0)
    condition_target(source, root / "hard", hard, cache_dir=root / "cache")
    return root


def test_a_replay_counts_what_decoding_counts_in_any_coordinates(root: Path) -> None:
    config = make_config(root, root / "source", root / "data")
    target = open_target(config.target, device=CPU, runtime=config.runtime)
    prompts = [tuple(range(3 + i, 9 + 2 * i)) for i in range(12)]
    made = {"mtbench": answer(target, prompts, config.runtime, max_tokens=MAX_TOKENS)}
    save_answers(root / "answers.safetensors", made)
    answers = load_answers(root / "answers.safetensors")
    assert [item.prompt_len for item in answers["mtbench"]] == [len(ids) for ids in prompts]
    counts: list[Counts] = []
    for name in ("source", "hard"):
        own = dataclasses.replace(
            config, target=dataclasses.replace(config.target, path=str(root / name))
        )
        head = write_head(root, root / name)
        settings = Settings(max_tokens=MAX_TOKENS)
        counts.append(Meter(own, answers).replay(head)["mtbench"])
        assert counts[-1] == decode(own, head, answers, settings)
        assert 0 < sum(counts[-1].accepted) < sum(counts[-1].drafts)
    with pytest.raises(ValueError, match="another target"):
        Meter(config, answers).replay(root / "head-hard")


def test_long_prompts_end_where_the_last_answer_begins(tmp_path: Path) -> None:
    mask = (False, False, True, True, False, False, True, False)
    for split in ("train", "validation"):
        writer = TokenSetWriter()
        for start in range(4):
            writer.append(TokenRow(f"c{start}", "test", tuple(range(start, start + 8)), mask))
        writer.append(TokenRow("unanswered", "test", (1, 2, 3), (False,) * 3))
        writer.write(tmp_path / split)
    (tmp_path / "fingerprint.json").write_text('{"version": 1}')
    assert long_prompts(tmp_path, 2) == [tuple(range(6)), tuple(range(2, 8))]
    assert len(long_prompts(tmp_path, 9)) == 4
