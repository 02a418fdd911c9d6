from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_from_disk
from rich.console import Console

from mtp_train import precompute
from mtp_train.config import Config
from mtp_train.distributed import SingleProcessGroup
from mtp_train.errors import ConfigError
from mtp_train.events import read_events
from mtp_train.features.estimate import DiskUsage
from mtp_train.features.manifest import FeatureStoreError, load_manifest
from mtp_train.features.p0 import P0Error
from mtp_train.features.reader import FeatureReader
from mtp_train.features.sources import HuggingFaceSource, RuntimeSource, load_hugging_face
from mtp_train.features.writer import NonFiniteError
from mtp_train.rules import check_config
from runtime.request import HiddenRows
from tests.unit.features.targets import (
    make_config,
    save_target,
    save_token_set,
    save_tokenizer,
    with_features,
)

GROUP = SingleProcessGroup(torch.device("cpu"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture
def config(tmp_path: Path, target: Path) -> Config:
    save_token_set(tmp_path / "data")
    return make_config(tmp_path / "runs", target, tmp_path / "data")


def store(config: Config, split: str = "train") -> Path:
    return Path(config.run.root) / "test" / "features" / split


def token_rows(config: Config, split: str = "train") -> dict[str, dict[str, Any]]:
    loaded = load_from_disk(str(Path(config.data.path) / split))
    assert isinstance(loaded, Dataset)
    return {row["sample_id"]: row for row in loaded}


@pytest.mark.parametrize("source", ["runtime", "huggingface"])
def test_every_row_of_both_splits_is_stored_with_the_states_of_the_model(
    config: Config, target: Path, source: str
) -> None:
    config = with_features(config, source=source)
    report = precompute.run(config, group=GROUP)
    oracle = load_hugging_face(target, dtype=torch.float32, device=torch.device("cpu"))
    for split, done in zip(("train", "validation"), report.splits, strict=True):
        reader = FeatureReader(store(config, split))
        reader.verify()
        rows = token_rows(config, split)
        assert set(reader.sample_ids) == set(rows)
        assert (done.split, done.num_computed) == (split, len(rows))
        assert done.num_tokens_computed == int(reader.lengths.sum())
        for index in range(len(reader)):
            sample = reader.get(index)
            row = rows[sample.sample_id]
            assert sample.input_ids.tolist() == row["input_ids"]
            assert sample.loss_mask.tolist() == row["loss_mask"]
            with torch.no_grad():
                states_TD = oracle.model(sample.input_ids[None]).last_hidden_state[0]
            torch.testing.assert_close(sample.hidden, states_TD, rtol=1e-4, atol=1e-4)


def test_p0_figures_of_every_shard_are_in_the_manifest(config: Config) -> None:
    precompute.run(config, group=GROUP)
    manifest = load_manifest(store(config))
    assert len(manifest.shards) > 2
    for shard in manifest.shards:
        assert shard.p0 is not None
        assert shard.p0.num_samples == 2
        assert shard.num_tokens <= config.features.shard_tokens
        assert {c.name for c in shard.p0.comparisons} == {"decode", "huggingface", "decode_error"}
    settings = dict(manifest.fingerprint.settings)
    assert settings == {"source": "runtime", "dtype": "float32", "device": "cpu"}


def test_a_finished_dump_does_nothing_and_says_so(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    precompute.run(config, group=GROUP)
    files = {file: file.stat().st_mtime_ns for file in store(config).glob("shard-*")}

    def no_target(*arguments: object, **options: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(precompute, "load_workbench", no_target)
    with caplog.at_level(logging.INFO):
        report = precompute.run(config, group=GROUP)
    assert caplog.text.count("nothing to do") == 2
    assert [split.num_computed for split in report.splits] == [0, 0]
    assert report.splits[0].num_samples == 30
    assert {file: file.stat().st_mtime_ns for file in store(config).glob("shard-*")} == files


def test_only_missing_samples_are_computed(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    precompute.run(config, group=GROUP)
    before = load_manifest(store(config))
    save_token_set(Path(config.data.path), train=37)
    with caplog.at_level(logging.INFO):
        report = precompute.run(config, group=GROUP)
    assert "30 of 37 samples are there; 7 to compute" in caplog.text
    assert report.splits[0].num_computed == 7
    after = load_manifest(store(config))
    assert set(before.shards) < set(after.shards)
    assert set(FeatureReader(store(config)).sample_ids) == set(token_rows(config))


def test_a_lost_or_cut_off_shard_is_computed_again(config: Config) -> None:
    precompute.run(config, group=GROUP)
    first, second, *_ = sorted(store(config).glob("shard-*"))
    names = {file.name for file in store(config).glob("shard-*")}
    first.unlink()
    os.truncate(second, 100)
    precompute.run(config, group=GROUP)
    FeatureReader(store(config)).verify()
    assert set(FeatureReader(store(config)).sample_ids) == set(token_rows(config))
    assert len({file.name for file in store(config).glob("shard-*")} & names) >= len(names) - 2


@pytest.mark.parametrize("change", [{"codec": "bf16"}, {"source": "huggingface"}])
def test_a_store_of_other_settings_is_refused(config: Config, change: dict[str, str]) -> None:
    precompute.run(config, group=GROUP)
    with pytest.raises(FeatureStoreError, match=next(iter(change))):
        precompute.run(with_features(config, **change), group=GROUP)


def test_a_store_of_another_target_is_refused(config: Config, tmp_path: Path) -> None:
    precompute.run(config, group=GROUP)
    other = save_target(tmp_path / "other", seed=1)
    with pytest.raises(FeatureStoreError, match="target_weights"):
        precompute.run(make_config(tmp_path / "runs", other, Path(config.data.path)), group=GROUP)


def test_another_tokenizer_or_template_is_a_foreign_store(config: Config, tmp_path: Path) -> None:
    path = save_target(tmp_path / "own")
    config = make_config(tmp_path / "runs", path, Path(config.data.path))
    precompute.run(config, group=GROUP)
    save_tokenizer(path, template="other", extra="y")
    with pytest.raises(FeatureStoreError, match=r"tokenizer: .*chat_template: "):
        precompute.run(config, group=GROUP)


def test_a_changed_loss_mask_is_refused(config: Config) -> None:
    precompute.run(config, group=GROUP)
    rows = list(token_rows(config).values())
    rows[3]["loss_mask"][0] = not rows[3]["loss_mask"][0]
    Dataset.from_list(rows).save_to_disk(str(Path(config.data.path) / "train-new"))
    os.rename(Path(config.data.path) / "train", Path(config.data.path) / "train-old")
    os.rename(Path(config.data.path) / "train-new", Path(config.data.path) / "train")
    with pytest.raises(FeatureStoreError, match="1 samples have another loss mask"):
        precompute.run(config, group=GROUP)


def test_ids_that_are_not_the_hash_of_their_tokens_are_refused(config: Config) -> None:
    rows = list(token_rows(config).values())
    rows[0]["input_ids"][0] += 1
    Dataset.from_list(rows).save_to_disk(str(Path(config.data.path) / "other" / "train"))
    Dataset.from_list(rows[1:2]).save_to_disk(str(Path(config.data.path) / "other" / "validation"))
    changed = dataclasses.replace(
        config, data=dataclasses.replace(config.data, path=str(Path(config.data.path) / "other"))
    )
    with pytest.raises(ValueError, match="is not the hash of its tokens"):
        precompute.run(changed, group=GROUP)


def test_rows_longer_than_the_target_takes_are_refused(config: Config, tmp_path: Path) -> None:
    short = save_target(tmp_path / "short", max_position_embeddings=16)
    with pytest.raises(ValueError, match=r"a row of \d+ tokens; the target takes at most 16"):
        precompute.run(make_config(tmp_path / "runs", short, Path(config.data.path)), group=GROUP)


def test_a_missing_token_set_says_what_to_run(tmp_path: Path, target: Path) -> None:
    config = make_config(tmp_path / "runs", target, tmp_path / "nothing")
    with pytest.raises(ValueError, match="mtp data"):
        precompute.run(config, group=GROUP)


def test_a_full_disk_is_refused_before_anything_is_loaded_or_written(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(precompute, "load_workbench")
    with pytest.raises(ValueError, match=r"needed, but 1\.0 kB are free"):
        precompute.run(config, group=GROUP, usage=lambda path: DiskUsage(10_000, 9_000, 1_000))
    assert not list(store(config).glob("shard-*"))


Change = Callable[[HiddenRows], HiddenRows]


@pytest.fixture
def tamper(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Change what the runtime source returns."""
    original = RuntimeSource.hidden

    def install(change: Change) -> None:
        def hidden(self: RuntimeSource, sequences: Sequence[Sequence[int]]) -> Iterator[HiddenRows]:
            return map(change, original(self, sequences))

        monkeypatch.setattr(RuntimeSource, "hidden", hidden)

    return install


def test_wrong_states_abort_and_leave_no_shard(
    config: Config, tamper: Callable[[Change], None]
) -> None:
    tamper(lambda rows: dataclasses.replace(rows, hidden_TD=rows.hidden_TD.roll(1, 0)))
    with pytest.raises(P0Error, match="p0_max_logprob_gap"):
        precompute.run(config, group=GROUP)
    assert not list(store(config).glob("shard-*"))


def test_missing_rows_abort(config: Config, tamper: Callable[[Change], None]) -> None:
    tamper(lambda rows: dataclasses.replace(rows, hidden_TD=rows.hidden_TD[1:]))
    with pytest.raises(ValueError, match="one row of 32 per token"):
        precompute.run(config, group=GROUP)


def test_rows_of_other_tokens_abort(config: Config, tamper: Callable[[Change], None]) -> None:
    tamper(lambda rows: dataclasses.replace(rows, token_ids=rows.token_ids[::-1]))
    with pytest.raises(RuntimeError, match="states of other tokens"):
        precompute.run(config, group=GROUP)


def test_a_nan_row_is_quarantined_below_the_stated_share_and_aborts_above(
    config: Config, tamper: Callable[[Change], None]
) -> None:
    victim = min(token_rows(config))

    def spoil(rows: HiddenRows) -> HiddenRows:
        if list(rows.token_ids) != token_rows(config)[victim]["input_ids"]:
            return rows
        states_TD = rows.hidden_TD.clone()
        states_TD[2, 5] = float("nan")
        return dataclasses.replace(rows, hidden_TD=states_TD)

    tamper(spoil)
    with pytest.raises(NonFiniteError, match=victim):
        precompute.run(with_features(config, max_nonfinite_share=0.0), group=GROUP)
    allowed = with_features(config, max_nonfinite_share=1e-6)  # one at least
    report = precompute.run(allowed, group=GROUP)
    assert (report.splits[0].num_quarantined, report.splits[0].num_computed) == (1, 29)
    assert victim not in FeatureReader(store(config)).sample_ids
    assert precompute.run(allowed, group=GROUP).splits[0].num_computed == 0
    (item,) = load_manifest(store(config)).quarantined
    assert (item.sample_id, item.num_bad_rows) == (victim, 1)


def test_the_progress_line_shows_speed(config: Config, tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file:
        console = Console(file=file, force_terminal=True, width=120)
        precompute.run(config, group=GROUP, console=console)
    text = (tmp_path / "log").read_text()
    assert "tok/s" in text
    assert "GB/s" in text


def test_events_record_each_split(config: Config) -> None:
    precompute.run(config, group=GROUP)
    events = list(read_events(Path(config.run.root) / "test" / "events.jsonl"))
    assert [event["split"] for event in events] == ["train", "validation"]


def test_groups_hold_everything_once_and_share_work_between_ranks() -> None:
    lengths = {f"{n:02d}": 1 + n % 9 for n in range(60)}
    ids = sorted(lengths)
    groups = precompute.cut_into_groups(ids, lengths, shard_tokens=40, world_size=2)
    assert [sample_id for group in groups for sample_id in group] == ids
    assert all(sum(lengths[i] for i in group) <= 40 for group in groups)
    assert len(precompute.cut_into_groups(ids, lengths, shard_tokens=10**6, world_size=4)) >= 4
    assert precompute.cut_into_groups(["a"], {"a": 50}, shard_tokens=8, world_size=1) == [["a"]]
    assert precompute.cut_into_groups([], {}, shard_tokens=8, world_size=3) == []


def test_hugging_face_source_is_not_loaded_twice_in_fp32(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    original = HuggingFaceSource.__init__

    def count(self: HuggingFaceSource, *arguments: Any, **options: Any) -> None:
        made.append(self)
        original(self, *arguments, **options)

    monkeypatch.setattr(HuggingFaceSource, "__init__", count)
    precompute.run(with_features(config, source="huggingface"), group=GROUP)
    assert len(made) == 1


def test_a_spread_target_needs_that_many_processes(config: Config) -> None:
    with pytest.raises(ValueError, match=r"features\.tensor_parallel=2: 1 process"):
        precompute.run(with_features(config, tensor_parallel=2), group=GROUP)


def test_hugging_face_cannot_be_spread(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"features\.tensor_parallel=2 with features\.source"):
        check_config(with_features(config, tensor_parallel=2, source="huggingface"))
