from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_train.features import writer as writer_module
from mtp_train.features.codecs import decode, encode
from mtp_train.features.manifest import (
    MANIFEST_NAME,
    FeatureStoreError,
    Manifest,
    load_manifest,
    save_manifest,
)
from mtp_train.features.reader import FeatureReader
from mtp_train.features.shards import FeatureSample
from mtp_train.features.writer import (
    FeatureWriter,
    NonFiniteError,
    finish_store,
    lock_store,
    recover_store,
)
from tests.unit.features.stores import WIDTH, make_fingerprint, make_samples, write_store


def shard_files(path: Path) -> list[Path]:
    return sorted(path.glob("shard-*.safetensors"))


def assert_holds(path: Path, samples: list[FeatureSample]) -> None:
    reader = FeatureReader(path)
    assert set(reader.sample_ids) == {sample.sample_id for sample in samples}
    by_id = {sample.sample_id: sample for sample in samples}
    for index, sample_id in enumerate(reader.sample_ids):
        read, wanted = reader.get(index), by_id[sample_id]
        assert reader.lengths[index] == len(wanted.input_ids)
        assert torch.equal(read.input_ids, wanted.input_ids)
        assert torch.equal(read.loss_mask, wanted.loss_mask)
        assert torch.equal(read.hidden, wanted.hidden)


def open_writer(path: Path, **options: object) -> FeatureWriter:
    settings = {
        "fingerprint": make_fingerprint(),
        "shard_tokens": 16,
        "max_quarantined": 0,
    } | options
    return FeatureWriter(path, **settings)  # type: ignore[arg-type]


def test_every_sample_is_read_back_from_several_shards(tmp_path: Path) -> None:
    samples = write_store(tmp_path)
    assert len(shard_files(tmp_path)) > 2
    assert_holds(tmp_path, samples)
    reader = FeatureReader(tmp_path, max_open_shards=1)
    reader.verify()
    assert len(reader) == len(samples)
    assert reader.hidden_size == WIDTH
    assert reader.lengths.dtype == torch.int64
    assert list(reader.sample_ids) == sorted(reader.sample_ids)


@pytest.mark.parametrize("codec", ["bf16", "fp8_e4m3"])
def test_samples_are_read_through_the_codec_in_the_dtype_asked_for(
    tmp_path: Path, codec: str
) -> None:
    samples = {s.sample_id: s for s in write_store(tmp_path, codec=codec)}  # type: ignore[arg-type]
    reader = FeatureReader(tmp_path)
    for index, sample_id in enumerate(reader.sample_ids):
        encoded = encode(samples[sample_id].hidden, codec)  # type: ignore[arg-type]
        for dtype in (torch.float32, torch.bfloat16):
            read = reader.get(index, dtype=dtype)
            assert read.hidden.dtype == dtype
            assert torch.equal(read.hidden, decode(encoded, dtype=dtype))


def test_read_states_can_be_changed_without_changing_the_store(tmp_path: Path) -> None:
    write_store(tmp_path)
    reader = FeatureReader(tmp_path)
    first = reader.get(0)
    kept = first.hidden.clone()
    first.hidden.zero_()
    first.loss_mask.fill_(True)
    assert torch.equal(reader.get(0).hidden, kept)
    assert not reader.get(0).loss_mask.all()


def test_the_reader_keeps_a_bounded_number_of_shards_open(tmp_path: Path) -> None:
    write_store(tmp_path)
    reader = FeatureReader(tmp_path, max_open_shards=2)
    for index in range(len(reader)):
        reader.get(index)
        assert len(reader._open) <= 2


def test_shard_content_does_not_depend_on_the_order_of_computation(tmp_path: Path) -> None:
    samples = make_samples(8)
    write_store(tmp_path / "a", samples=samples, shard_tokens=10_000)
    write_store(tmp_path / "b", samples=samples[::-1], shard_tokens=10_000)
    names = [file.name for file in shard_files(tmp_path / "a")]
    assert names == [file.name for file in shard_files(tmp_path / "b")]


def test_known_samples_are_not_written_twice(tmp_path: Path) -> None:
    samples = write_store(tmp_path)
    before = [file.name for file in shard_files(tmp_path)]
    write_store(tmp_path, samples=samples, shard_tokens=24)  # other shards, if any were written
    assert [file.name for file in shard_files(tmp_path)] == before
    more = make_samples(5, seed=1)
    write_store(tmp_path, samples=[*samples, *more])
    assert_holds(tmp_path, [*samples, *more])


def test_rows_must_match_tokens(tmp_path: Path) -> None:
    recover_store(tmp_path, make_fingerprint())
    with (
        pytest.raises(ValueError, match="5 tokens, 5 mask entries and hidden states"),
        open_writer(tmp_path) as writer,
    ):
        writer.add("x", range(5), [True] * 5, torch.zeros(4, WIDTH))


# --- faults on disk ---------------------------------------------------------------------------


def test_a_flipped_byte_names_the_shard(tmp_path: Path) -> None:
    write_store(tmp_path)
    victim = shard_files(tmp_path)[1]
    data = bytearray(victim.read_bytes())
    data[-3] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(FeatureStoreError, match=rf"{victim.name}.*checksum.*mtp precompute"):
        FeatureReader(tmp_path).verify()
    reader = FeatureReader(tmp_path)
    with pytest.raises(FeatureStoreError, match=victim.name):
        [reader.get(index) for index in range(len(reader))]


def test_a_truncated_shard_names_the_shard(tmp_path: Path) -> None:
    write_store(tmp_path)
    victim = shard_files(tmp_path)[0]
    os.truncate(victim, victim.stat().st_size - 7)
    with pytest.raises(FeatureStoreError, match=rf"{victim.name}.*bytes, the manifest says"):
        FeatureReader(tmp_path)


def test_a_missing_shard_is_an_error_or_skipped_by_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = write_store(tmp_path)
    victim = shard_files(tmp_path)[0]
    victim.unlink()
    with pytest.raises(FeatureStoreError, match=rf"{victim.name}: is missing"):
        FeatureReader(tmp_path)
    with caplog.at_level(logging.WARNING):
        reader = FeatureReader(tmp_path, missing="skip")
    assert victim.name in caplog.text
    assert 0 < len(reader) < len(samples)
    reader.get(len(reader) - 1)


def test_a_shard_that_goes_away_while_reading_is_named(tmp_path: Path) -> None:
    write_store(tmp_path)
    reader = FeatureReader(tmp_path)
    for file in shard_files(tmp_path):
        file.unlink()
    with pytest.raises(FeatureStoreError, match="is missing"):
        reader.get(0)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_store(tmp_path, codec="fp8_e4m3", shard_tokens=10_000)
    (victim,) = shard_files(tmp_path)
    tensors = load_file(victim)
    del tensors["scale"]
    save_file(tensors, victim)
    manifest = load_manifest(tmp_path)
    raw = json.loads((tmp_path / MANIFEST_NAME).read_text())
    raw["shards"][0]["num_bytes"] = victim.stat().st_size
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(raw))
    with pytest.raises(FeatureStoreError, match=rf"{victim.name}: tensor scale is missing"):
        FeatureReader(tmp_path, verify_on_open=False).get(0)
    assert manifest.fingerprint.codec == "fp8_e4m3"


def test_a_foreign_fingerprint_is_refused_by_reader_and_writer(tmp_path: Path) -> None:
    write_store(tmp_path)
    other = make_fingerprint(target_weights="v" * 64)
    with pytest.raises(FeatureStoreError, match=r"target_weights: 'w+' != 'v+'"):
        FeatureReader(tmp_path, expected=other)
    with pytest.raises(FeatureStoreError, match="target_weights"):
        recover_store(tmp_path, other)
    with pytest.raises(FeatureStoreError, match="codec: 'fp32' != 'bf16'"):
        FeatureReader(tmp_path, expected=make_fingerprint("bf16"))
    with pytest.raises(FeatureStoreError, match="hidden_state"):
        FeatureReader(tmp_path, expected=make_fingerprint(hidden_state="pre-final-norm"))
    FeatureReader(tmp_path, expected=make_fingerprint())


def test_an_unknown_format_version_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path)
    raw = json.loads((tmp_path / MANIFEST_NAME).read_text())
    raw["format_version"] = 99
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(raw))
    with pytest.raises(FeatureStoreError, match="format_version=99"):
        FeatureReader(tmp_path)


def test_a_store_without_a_manifest_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(FeatureStoreError, match="mtp precompute"):
        FeatureReader(tmp_path)


def test_select_restricts_and_reports_what_is_absent(tmp_path: Path) -> None:
    samples = write_store(tmp_path)
    wanted = sorted(sample.sample_id for sample in samples)[:3]
    assert list(FeatureReader(tmp_path, select=wanted).sample_ids) == wanted
    with pytest.raises(ValueError, match="1 of 4 selected samples"):
        FeatureReader(tmp_path, select=[*wanted, "absent"])


# --- recovery ---------------------------------------------------------------------------------


def test_a_shard_without_a_record_is_adopted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = write_store(tmp_path)
    manifest = load_manifest(tmp_path)
    save_manifest(tmp_path, Manifest(manifest.fingerprint, manifest.shards[:-1]))
    with caplog.at_level(logging.INFO):
        recovered = recover_store(tmp_path, manifest.fingerprint)
    assert f"{manifest.shards[-1].name}: whole shard" in caplog.text
    assert set(recovered.shards) == set(manifest.shards)
    assert_holds(tmp_path, samples)


def test_shards_survive_the_loss_of_the_manifest(tmp_path: Path) -> None:
    samples = write_store(tmp_path)
    manifest = load_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    with pytest.raises(FeatureStoreError, match="made from another target"):
        recover_store(tmp_path, make_fingerprint("bf16"))
    assert set(recover_store(tmp_path, manifest.fingerprint).shards) == set(manifest.shards)
    assert_holds(tmp_path, samples)


def test_a_torn_part_line_loses_no_shard(tmp_path: Path) -> None:
    samples = make_samples(12)
    recover_store(tmp_path, make_fingerprint())
    with open_writer(tmp_path, rank=3) as writer:
        for item in samples:
            writer.add(item.sample_id, item.input_ids, item.loss_mask, item.hidden)
    (part,) = tmp_path.glob("part-*.jsonl")
    os.truncate(part, part.stat().st_size - 20)
    assert len(FeatureReader(tmp_path)) < len(samples)
    recover_store(tmp_path, make_fingerprint())
    assert not list(tmp_path.glob("part-*"))
    assert_holds(tmp_path, samples)


def test_a_damaged_part_line_is_named_with_its_remedy(tmp_path: Path) -> None:
    samples = make_samples(12)
    recover_store(tmp_path, make_fingerprint())
    with open_writer(tmp_path, rank=3) as writer:
        for item in samples:
            writer.add(item.sample_id, item.input_ids, item.loss_mask, item.hidden)
    (part,) = tmp_path.glob("part-*.jsonl")
    first, *others = part.read_text().splitlines()
    for damaged in (first[:-20], '{"name": 1}', "[]"):
        part.write_text("\n".join([damaged, *others]) + "\n")
        with pytest.raises(FeatureStoreError, match=r"part-00003.*line 1.*delete this file"):
            recover_store(tmp_path, make_fingerprint())
    part.unlink()
    recover_store(tmp_path, make_fingerprint())
    assert_holds(tmp_path, samples)


def test_a_reader_sees_the_parts_of_a_running_dump(tmp_path: Path) -> None:
    samples = make_samples(12)
    recover_store(tmp_path, make_fingerprint())
    for rank in range(2):
        with open_writer(tmp_path, rank=rank) as writer:
            for item in samples[rank::2]:
                writer.add(item.sample_id, item.input_ids, item.loss_mask, item.hidden)
    assert_holds(tmp_path, samples)
    finish_store(tmp_path)
    assert not list(tmp_path.glob("part-*"))
    assert_holds(tmp_path, samples)


def test_damaged_leftovers_are_removed_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = write_store(tmp_path)
    stray = tmp_path / f"shard-{'0' * 32}.safetensors"
    shutil.copy(shard_files(tmp_path)[0], stray)
    staged = tmp_path / ".tmp-1-shard-x.safetensors"
    staged.write_bytes(b"half")
    truncated = shard_files(tmp_path)[-1]
    os.truncate(truncated, 50)
    with caplog.at_level(logging.WARNING):
        recovered = recover_store(tmp_path, make_fingerprint())
    for file in (stray, staged, truncated):
        assert not file.exists()
        assert file.name in caplog.text
    missing = {s.sample_id for s in samples} - recovered.settled_ids()
    assert missing
    write_store(tmp_path, samples=samples)
    assert_holds(tmp_path, samples)


def test_only_one_dump_may_write(tmp_path: Path) -> None:
    with (
        lock_store(tmp_path),
        pytest.raises(FeatureStoreError, match="another process"),
        lock_store(tmp_path),
    ):
        pass
    with lock_store(tmp_path):
        pass


# --- writer -----------------------------------------------------------------------------------


def test_samples_that_are_not_finite_are_quarantined_and_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = make_samples(6)
    samples[2].hidden[1, 3] = float("nan")
    samples[4].hidden[0, 0] = float("inf")
    recover_store(tmp_path, make_fingerprint())
    with open_writer(tmp_path, max_quarantined=2) as writer:
        taken = [writer.add(s.sample_id, s.input_ids, s.loss_mask, s.hidden) for s in samples]
    finish_store(tmp_path)
    assert taken == [True, True, False, True, False, True]
    bad = {samples[2].sample_id: 1, samples[4].sample_id: 1}
    manifest = load_manifest(tmp_path)
    assert {q.sample_id: q.num_bad_rows for q in manifest.quarantined} == bad
    assert_holds(tmp_path, [s for s in samples if s.sample_id not in bad])
    assert manifest.settled_ids() == {s.sample_id for s in samples}
    assert samples[2].sample_id in caplog.text


def test_quarantine_without_any_good_sample_is_durable(tmp_path: Path) -> None:
    recover_store(tmp_path, make_fingerprint("fp8_e4m3"))
    options = {"max_quarantined": 1, "fingerprint": make_fingerprint("fp8_e4m3")}
    with open_writer(tmp_path, **options) as writer:
        writer.add("bad", range(3), [True] * 3, torch.full((3, WIDTH), float("nan")))
    assert finish_store(tmp_path).settled_ids() == {"bad"}
    assert len(FeatureReader(tmp_path)) == 0


def test_too_many_bad_samples_abort(tmp_path: Path) -> None:
    recover_store(tmp_path, make_fingerprint())
    nan_TD = torch.full((3, WIDTH), float("nan"))
    with open_writer(tmp_path, max_quarantined=1) as writer:
        writer.add("a", range(3), [True] * 3, nan_TD)
        with pytest.raises(NonFiniteError, match=r"2 samples .* at most 1 allowed"):
            writer.add("b", range(3), [True] * 3, nan_TD)


def test_an_error_of_the_background_thread_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer_module, "write_shard", disk_full)
    recover_store(tmp_path, make_fingerprint())
    samples = make_samples(40)

    def write_all() -> None:
        with open_writer(tmp_path) as writer:
            for item in samples:
                writer.add(item.sample_id, item.input_ids, item.loss_mask, item.hidden)

    with pytest.raises(OSError, match="No space left"):
        write_all()


def test_an_exception_in_the_block_writes_no_unfinished_shard(tmp_path: Path) -> None:
    recover_store(tmp_path, make_fingerprint())
    sample = make_samples(1)[0]

    def write_and_stop() -> None:
        with open_writer(tmp_path) as writer:
            writer.add(sample.sample_id, sample.input_ids, sample.loss_mask, sample.hidden)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert not shard_files(tmp_path)
