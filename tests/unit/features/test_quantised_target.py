"""Features of a quantised target: what they are, and how a store says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mtp_train import precompute
from mtp_train.config import Config
from mtp_train.distributed import SingleProcessGroup
from mtp_train.features.manifest import FeatureStoreError
from mtp_train.features.reader import FeatureReader
from mtp_train.features.sources import HuggingFaceSource, load_hugging_face
from mtp_train.features.target import check_quantisation, fingerprint_features
from mtp_train.quantise import SCHEMES, quantise_target
from runtime.models.loader import load_target
from tests.unit.features.targets import make_config, save_target, save_token_set
from tests.unit.runtime.engine_fixtures import make_engine
from tests.unit.runtime.model_fixtures import random_ids, relative_error
from tests.unit.runtime.quantised_fixtures import TOKENS, stated, write_quantised

CPU = torch.device("cpu")
GROUP = SingleProcessGroup(CPU)


def configure(root: Path, target: Path) -> Config:
    save_token_set(root / "data", train=6, validation=1)
    return make_config(root, target, root / "data", p0_references=("decode",))


def hidden_rows(config: Config) -> dict[str, torch.Tensor]:
    reader = FeatureReader(Path(config.run.root) / "test" / "features" / "train")
    samples = [reader.get(index) for index in range(len(reader))]
    return {sample.sample_id: sample.hidden for sample in samples}


def retarget(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, target=dataclasses.replace(config.target, **changes))


@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_states_of_a_dump_are_those_of_the_quantised_model(
    rounds_inputs: bool, tmp_path: Path
) -> None:
    target = save_target(tmp_path / "target")
    group = {"input_activations": TOKENS} if rounds_inputs else {}
    meant = write_quantised(target, stated(group=group))
    config = configure(tmp_path, target)
    precompute.run(config, group=GROUP)
    rows = hidden_rows(config)
    plain = save_target(tmp_path / "plain")
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    other = configure(tmp_path / "other", plain)
    precompute.run(other, group=GROUP)
    errors = [relative_error(rows[name], wanted) for name, wanted in hidden_rows(other).items()]
    if rounds_inputs:
        assert max(errors) > 1e-3
    else:
        assert max(errors) < 1e-5


def test_shards_of_a_target_that_rounds_inputs_are_compared_with_decoding_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = save_target(tmp_path / "target")
    write_quantised(target, stated(group={"input_activations": TOKENS}))
    config = configure(tmp_path, target)

    def refer(*names: str) -> Config:
        features = dataclasses.replace(config.features, p0_references=names)  # type: ignore[arg-type]
        return dataclasses.replace(config, features=features)

    with pytest.raises(ValueError, match=r"\[huggingface\]: the target rounds .* name decode"):
        precompute.run(refer("huggingface"), group=GROUP)
    with caplog.at_level("INFO"):
        precompute.run(refer("decode", "huggingface"), group=GROUP)
    assert "P0 of the shards without huggingface" in caplog.text
    store = FeatureReader(Path(config.run.root) / "test" / "features" / "train")
    (comparison,) = store.manifest.shards[0].p0.comparisons
    assert comparison.name == "decode"


def test_a_store_says_how_its_target_was_rounded(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    config = configure(tmp_path, target)
    plain = fingerprint_features(config, target, device=CPU)
    assert {name for name, _ in plain.settings} == {"source", "dtype", "device"}
    write_quantised(target, stated())
    quantised = fingerprint_features(config, target, device=CPU)
    label = "compressed-tensors int8-channel w8a16; not: lm_head"
    assert dict(quantised.settings)["quantization"] == label
    runtime = dataclasses.replace(config.runtime, kv_cache="fp8_e4m3")
    rounded = fingerprint_features(dataclasses.replace(config, runtime=runtime), target, device=CPU)
    assert dict(rounded.settings)["kv_cache"] == "fp8_e4m3"
    precompute.run(config, group=GROUP)
    with pytest.raises(FeatureStoreError, match="kv_cache"):
        precompute.run(dataclasses.replace(config, runtime=runtime), group=GROUP)


def test_a_target_of_another_kind_than_stated_is_refused(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    config = configure(tmp_path, target)
    assert check_quantisation(retarget(config, quantization="none").target, target) is None
    with pytest.raises(ValueError, match=r"quantization=int8: .* says no quant.*: any, none$"):
        check_quantisation(retarget(config, quantization="int8").target, target)
    write_quantised(target, stated())
    assert check_quantisation(retarget(config, quantization="int8").target, target) is not None
    with pytest.raises(ValueError, match=r"quantization=none: .* int8-channel.*: any, int8$"):
        precompute.run(retarget(config, quantization="none"), group=GROUP)


@pytest.mark.parametrize("scheme", ["int8-w8a8", "fp8-w8a16"])
def test_states_of_transformers_are_those_of_the_quantised_model(
    scheme: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    save_target(tmp_path / "target")
    quantise_target(tmp_path / "target", tmp_path / "out", SCHEMES[scheme])
    sequences = [random_ids(20, seed=1), random_ids(9, seed=2)]
    loaded = load_hugging_face(tmp_path / "out", dtype=torch.float32, device=CPU)
    source = HuggingFaceSource(loaded, max_batch_tokens=64)
    wanted = {row.key: row.hidden_TD for row in source.hidden(sequences)}
    target = load_target(tmp_path / "out", dtype=torch.float32, device=CPU, use_kernels=False)
    for row in make_engine(target).forward_hidden(sequences):
        assert relative_error(row.hidden_TD, wanted[row.key]) < 1e-4


def test_a_reference_that_transformers_cannot_load_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def refuse(*args: object, **kwargs: object) -> None:
        raise ImportError("Using `compressed_tensors` quantised models requires it")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(ValueError, match=r"extra `quantised`, or leave huggingface out"):
        load_hugging_face(tmp_path, dtype=torch.float32, device=CPU)
