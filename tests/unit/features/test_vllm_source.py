"""Features from vLLM's files: what is read, what P0 catches, and how the engine's failures show.

The worker runs as it does beside a real vLLM; the fake one writes residual streams of Hugging Face.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mtp_train import precompute
from mtp_train.config import Config, HeadConfig, ServingConfig
from mtp_train.distributed import SingleProcessGroup
from mtp_train.features.manifest import load_manifest
from mtp_train.features.p0 import P0Error
from mtp_train.features.reader import FeatureReader
from mtp_train.features.sources import load_hugging_face
from mtp_train.features.vllm_source import TargetOutput, check_vllm_source
from mtp_train.serving.job import ServingError
from tests.unit.features.targets import make_config, save_target, save_token_set, with_features
from tests.unit.features.test_precompute import store, token_rows

CPU = torch.device("cpu")
GROUP = SingleProcessGroup(CPU)
FAKE = Path(__file__).with_name("fake_vllm")
SITE = Path(torch.__file__).parents[1]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture
def config(tmp_path: Path, target: Path) -> Config:
    save_token_set(tmp_path / "data", train=16)
    made = make_config(tmp_path / "runs", target, tmp_path / "data", source="vllm")
    made = with_features(made, p0_samples_per_shard=8)
    return dataclasses.replace(
        made, engine=ServingConfig(python=str(tmp_path / "python"), timeout_s=120)
    )


def install(tmp_path: Path, *, plays: str) -> None:
    """An interpreter in whose environment the fake vLLM is installed."""
    paths = f"{FAKE}:{SITE}"
    script = tmp_path / "python"
    setting = f"PYTHONPATH={paths} FAKE_VLLM={plays} FAKE_STATES={tmp_path / 'states'} "
    script.write_text(f'#!/bin/sh\n{setting}exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)


def streams_of(model: Any, ids: list[int], layer_ids: tuple[int, ...]) -> torch.Tensor:
    """``[T, a, D]``: ``S_k``, with the stream before the final norm as the last layer's."""
    kept: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        output = model(torch.tensor(ids)[None], output_hidden_states=True)
    handle.remove()
    last = model.config.num_hidden_layers
    return torch.stack(
        [kept[0][0] if k == last else output.hidden_states[k][0] for k in layer_ids], 1
    )


def write_states(
    tmp_path: Path, config: Config, target: Path, layer_ids: tuple[int, ...], *, spoil: str = ""
) -> None:
    model = load_hugging_face(target, dtype=torch.float32, device=CPU)
    tensors = {}
    for split in ("train", "validation"):
        for row in token_rows(config, split).values():
            states = streams_of(model, row["input_ids"], layer_ids)
            if spoil == "prefix" and len(states) > 16:
                # Rows of a cached prefix: what another request had left in these blocks.
                states[:8] = states[:8].flip(0)
            tensors["-".join(map(str, row["input_ids"]))] = states.contiguous()
    save_file(tensors, tmp_path / "states")


@pytest.fixture
def num_layers(target: Path) -> int:
    return int(json.loads((target / "config.json").read_text())["num_hidden_layers"])


def test_the_store_holds_the_states_of_the_model(
    config: Config, target: Path, tmp_path: Path, num_layers: int
) -> None:
    install(tmp_path, plays="right")
    write_states(tmp_path, config, target, (num_layers,))
    precompute.run(config, group=GROUP)
    model = load_hugging_face(target, dtype=torch.float32, device=CPU)
    for split in ("train", "validation"):
        reader = FeatureReader(store(config, split))
        reader.verify()
        assert set(reader.sample_ids) == set(token_rows(config, split))
        for index in range(len(reader)):
            sample = reader.get(index)
            with torch.no_grad():
                states_TD = model.model(sample.input_ids[None]).last_hidden_state[0]
            torch.testing.assert_close(sample.hidden, states_TD, rtol=1e-4, atol=1e-4)
    manifest = load_manifest(store(config))
    settings = dict(manifest.fingerprint.settings)
    assert settings == {"source": "vllm", "dtype": "float32", "device": "cpu"}
    assert all(shard.p0 is not None for shard in manifest.shards)
    asked = json.loads((tmp_path / "states.json").read_text())
    assert asked["enable_prefix_caching"] is False
    assert not Path(
        asked["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"]
    ).exists()


def test_streams_of_other_layers_are_stored_beside(
    config: Config, target: Path, tmp_path: Path, num_layers: int
) -> None:
    config = dataclasses.replace(config, head=HeadConfig(kind="eagle3", layer_ids=(1,)))
    install(tmp_path, plays="right")
    write_states(tmp_path, config, target, (1, num_layers))
    precompute.run(config, group=GROUP)
    model = load_hugging_face(target, dtype=torch.float32, device=CPU)
    sample = FeatureReader(store(config)).get(0)
    expected = streams_of(model, sample.input_ids.tolist(), (1,)).flatten(1)
    assert sample.layers is not None
    torch.testing.assert_close(sample.layers.float(), expected, rtol=1e-4, atol=1e-4)
    shard = load_manifest(store(config)).shards[0]
    assert shard.p0 is not None
    assert [item.layer_id for item in shard.p0.layers] == [1]


def test_p0_sees_a_wrong_layer(
    config: Config, target: Path, tmp_path: Path, num_layers: int
) -> None:
    install(tmp_path, plays="right")
    write_states(tmp_path, config, target, (num_layers - 1,))
    with pytest.raises(P0Error, match="differ from decode by up to"):
        precompute.run(config, group=GROUP)
    assert load_manifest(store(config)).shards == ()


def test_p0_sees_a_wrong_stream_beside_it(
    config: Config, target: Path, tmp_path: Path, num_layers: int
) -> None:
    config = dataclasses.replace(config, head=HeadConfig(kind="eagle3", layer_ids=(1,)))
    install(tmp_path, plays="right")
    write_states(tmp_path, config, target, (0, num_layers))
    with pytest.raises(P0Error, match="S_1 differs from huggingface"):
        precompute.run(config, group=GROUP)


def test_p0_sees_a_missing_final_norm(
    config: Config,
    target: Path,
    tmp_path: Path,
    num_layers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, plays="right")
    write_states(tmp_path, config, target, (num_layers,))
    monkeypatch.setattr(TargetOutput, "norm", lambda self, stream_TD: stream_TD)
    with pytest.raises(P0Error, match="differ from decode by up to"):
        precompute.run(config, group=GROUP)


def test_p0_sees_rows_of_a_cached_prefix(
    config: Config, target: Path, tmp_path: Path, num_layers: int
) -> None:
    """Their last rows are right: only the first ones tell."""
    install(tmp_path, plays="right")
    write_states(tmp_path, config, target, (num_layers,), spoil="prefix")
    with pytest.raises(P0Error, match="differ from decode by up to"):
        precompute.run(config, group=GROUP)


@pytest.mark.parametrize(
    ("plays", "stage", "words"),
    [
        ("cached", "decode", "16 tokens of a row came from the prefix cache"),
        ("zeros", "decode", "4 of .* rows are zero, the first at 0"),
        ("refuses", "load", "ValueError: Model architecture is not supported"),
        ("dies", "decode", "Illegal instruction, says the engine"),
        ("forgets", "decode", "did not write it"),
        ("torn", "decode", "not as vLLM writes it"),
        ("other", "decode", "states of other tokens"),
    ],
)
def test_a_failure_is_told_and_nothing_is_stored(
    config: Config,
    target: Path,
    tmp_path: Path,
    num_layers: int,
    plays: str,
    stage: str,
    words: str,
) -> None:
    install(tmp_path, plays=plays)
    write_states(tmp_path, config, target, (num_layers,))
    with pytest.raises(ServingError, match=words) as caught:
        precompute.run(config, group=GROUP)
    assert caught.value.stage == stage


def test_an_environment_without_vllm_is_named(
    config: Config, target: Path, tmp_path: Path, num_layers: int
) -> None:
    write_states(tmp_path, config, target, (num_layers,))
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH= exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    with pytest.raises(ServingError, match="cannot import vllm"):
        precompute.run(config, group=GROUP)


def test_what_cannot_be_started_is_refused_first(config: Config) -> None:
    with pytest.raises(ValueError, match=r"2 ranks: one asks"):
        check_vllm_source(config, world_size=2)
    with pytest.raises(ServingError, match="no such interpreter"):
        check_vllm_source(config, world_size=1)
    unnamed = dataclasses.replace(config, engine=ServingConfig())
    with pytest.raises(ValueError, match="name its interpreter"):
        precompute.run(unnamed, group=GROUP)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
