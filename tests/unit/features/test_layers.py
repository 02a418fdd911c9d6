"""Residual streams beside ``g``: computed, checked, stored, read."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch

from mtp_train import precompute
from mtp_train.config import Codec, Config, HeadConfig
from mtp_train.distributed import SingleProcessGroup
from mtp_train.features.estimate import estimate_size
from mtp_train.features.manifest import (
    MANIFEST_NAME,
    FeatureStoreError,
    Fingerprint,
    load_manifest,
)
from mtp_train.features.p0 import P0Error
from mtp_train.features.reader import FeatureReader
from mtp_train.features.shards import FeatureSample
from mtp_train.features.sources import HuggingFaceSource, RuntimeSource, load_hugging_face
from mtp_train.features.writer import FeatureWriter, NonFiniteError, finish_store, recover_store
from mtp_train.layer_ids import choose_layer_ids
from tests.unit.features.stores import WIDTH, make_fingerprint, make_samples
from tests.unit.features.targets import make_config, save_target, save_token_set, with_features

GROUP = SingleProcessGroup(torch.device("cpu"))
LAYERS = (1, 4)
CODECS: tuple[Codec, ...] = ("fp32", "bf16", "fp8_e4m3")


def layered(samples: list[FeatureSample]) -> list[FeatureSample]:
    """With streams that are far larger than ``g``, the second a hundred times the first."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.tensor([50.0, 5000.0]).repeat_interleave(WIDTH)
    return [
        dataclasses.replace(
            s, layers=torch.randn(len(s.hidden), 2 * WIDTH, generator=generator) * scale
        )
        for s in samples
    ]


def fingerprint(codec: Codec = "fp32") -> Fingerprint:
    return dataclasses.replace(make_fingerprint(codec), layer_ids=LAYERS)


def write(path: Path, samples: list[FeatureSample], codec: Codec = "fp32", **options: int) -> None:
    recover_store(path, fingerprint(codec))
    values = {"shard_tokens": 40, "max_quarantined": 0, **options}
    with FeatureWriter(path, fingerprint=fingerprint(codec), **values) as writer:
        for s in samples:
            writer.add(s.sample_id, s.input_ids, s.loss_mask, s.hidden, s.layers)
    finish_store(path)


@pytest.mark.parametrize("codec", CODECS)
def test_streams_come_back_with_a_scale_of_their_own(tmp_path: Path, codec: Codec) -> None:
    samples = {s.sample_id: s for s in layered(make_samples(20))}
    write(tmp_path, list(samples.values()), codec)
    reader = FeatureReader(tmp_path)
    reader.verify()
    bounds = {"fp32": 0.0, "bf16": 2**-8, "fp8_e4m3": 2**-4}
    for index in range(len(reader)):
        got = reader.get(index)
        wanted = samples[got.sample_id]
        for part, whole in (
            (got.hidden, wanted.hidden),
            *zip(got.layers.split(WIDTH, 1), wanted.layers.split(WIDTH, 1), strict=True),
        ):
            assert part.shape == whole.shape
            largest_T1 = whole.abs().amax(1, keepdim=True)
            assert float(((part - whole).abs() / largest_T1).max()) <= bounds[codec]


def test_a_head_that_reads_g_alone_does_not_read_them(tmp_path: Path) -> None:
    write(tmp_path, layered(make_samples(5)))
    assert FeatureReader(tmp_path, with_layers=False).get(0).layers is None


@pytest.mark.parametrize("codec", CODECS)
def test_the_estimate_counts_them(tmp_path: Path, codec: Codec) -> None:
    samples = layered(make_samples(200))
    lengths = [len(s.input_ids) for s in samples]
    estimate = estimate_size(lengths, hidden_size=WIDTH, codec=codec, num_states=3)
    write(tmp_path, samples, codec, shard_tokens=400)
    written = sum(file.stat().st_size for file in tmp_path.glob("shard-*"))
    assert 0.8 * written < estimate.num_bytes < 1.5 * written
    assert f"x 3 x {WIDTH} in {codec}" in estimate.describe()


def test_samples_of_other_streams_are_refused(tmp_path: Path) -> None:
    (sample,) = layered(make_samples(1))
    for layers, found in ((None, 0), (sample.layers[:, :WIDTH], WIDTH)):
        with pytest.raises(ValueError, match=rf"{found}\]; expected 32 columns, of layers \[1, 4"):
            write(tmp_path / str(found), [dataclasses.replace(sample, layers=layers)])


def test_a_stream_that_is_not_finite_quarantines_its_sample(tmp_path: Path) -> None:
    samples = layered(make_samples(3))
    samples[1].layers[0, 5] = float("inf")
    write(tmp_path, samples, max_quarantined=1)
    assert len(FeatureReader(tmp_path)) == 2
    with pytest.raises(NonFiniteError):
        write(tmp_path / "other", samples)


def test_a_store_of_other_layers_is_foreign(tmp_path: Path) -> None:
    write(tmp_path, layered(make_samples(2)))
    with pytest.raises(FeatureStoreError, match=r"layer_ids: \(1, 4\) != \(\)"):
        recover_store(tmp_path, make_fingerprint())


@pytest.mark.parametrize(
    ("num_layers", "wanted"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (80, (2, 40, 77))]
)
def test_the_layers_are_those_of_the_serving_engines(num_layers: int, wanted: tuple) -> None:
    assert choose_layer_ids(HeadConfig(kind="eagle3"), num_layers=num_layers) == wanted
    assert choose_layer_ids(HeadConfig(), num_layers=num_layers) == ()


def test_a_target_without_such_layers_wants_them_named() -> None:
    with pytest.raises(ValueError, match=r"head\.layer_ids=\[2, 2, 1\]: .*1 to 3 with this target"):
        choose_layer_ids(HeadConfig(kind="eagle3"), num_layers=4)


# -- from a model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "model", num_hidden_layers=5)


@pytest.fixture
def config(tmp_path: Path, target: Path) -> Config:
    save_token_set(tmp_path / "data", train=8, validation=2)
    made = make_config(tmp_path / "runs", target, tmp_path / "data")
    return dataclasses.replace(made, head=HeadConfig(kind="eagle3", layer_ids=LAYERS))


def store(config: Config) -> Path:
    return Path(config.run.root) / "test" / "features" / "train"


@pytest.mark.parametrize("source", ["runtime", "huggingface"])
def test_stored_streams_are_those_of_transformers(
    config: Config, target: Path, source: str
) -> None:
    precompute.run(with_features(config, source=source), group=GROUP)
    oracle = load_hugging_face(target, dtype=torch.float32, device=torch.device("cpu"))
    reader = FeatureReader(store(config))
    assert reader.manifest.fingerprint.layer_ids == LAYERS
    for index in range(len(reader)):
        sample = reader.get(index)
        with torch.no_grad():
            output = oracle.model(sample.input_ids[None], output_hidden_states=True)
        wanted = torch.cat([output.hidden_states[k][0] for k in LAYERS], 1)
        torch.testing.assert_close(sample.layers, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sample.hidden, output.last_hidden_state[0], rtol=1e-4, atol=1e-4)
    for shard in load_manifest(store(config)).shards:
        assert [item.layer_id for item in shard.p0.layers] == list(LAYERS)
        for item in shard.p0.layers:
            assert item.max_error < 1e-4 < 0.01 < item.neighbour
            assert item.codec_error == 0.0


def test_a_stream_one_layer_off_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    made = RuntimeSource.__init__

    def off(self: RuntimeSource, model: object, **options: int) -> None:
        made(self, model.tapped((2, 4)), **options)

    monkeypatch.setattr(RuntimeSource, "__init__", off)
    with pytest.raises(P0Error, match=r"S_1 differs from huggingface by [0-9.]+ of its length"):
        precompute.run(config, group=GROUP)


def test_a_stream_one_layer_off_is_refused_in_bfloat16(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(
        with_features(config, codec="bf16", p0_max_kl=1e6),
        target=dataclasses.replace(config.target, dtype="bfloat16"),
    )
    right = HuggingFaceSource.residuals

    def off(self: HuggingFaceSource, ids: object, layer_ids: list[int]) -> list[torch.Tensor]:
        return right(self, ids, [min(k + 1, 4) for k in layer_ids])

    monkeypatch.setattr(HuggingFaceSource, "residuals", off)
    with pytest.raises(P0Error, match="S_1 differs from huggingface"):
        precompute.run(config, group=GROUP)


def test_without_hugging_face_it_says_that_nothing_compares_them(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        precompute.run(with_features(config, p0_references=("decode",)), group=GROUP)
    assert "residual streams [1, 4] are not compared with anything" in caplog.text
    assert all(shard.p0.layers == () for shard in load_manifest(store(config)).shards)


def test_a_manifest_from_before_them_is_read(config: Config) -> None:
    precompute.run(dataclasses.replace(config, head=HeadConfig()), group=GROUP)
    file = store(config) / MANIFEST_NAME
    raw = json.loads(file.read_text())
    for shard in raw["shards"]:
        del shard["p0"]["layers"]
    file.write_text(json.dumps(raw))
    assert all(shard.p0.layers == () for shard in load_manifest(store(config)).shards)
