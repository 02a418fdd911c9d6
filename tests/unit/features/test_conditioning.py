"""The reparametrised target computes the same, and a store that was scaled is the one it dumps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mtp_train import precompute
from mtp_train.conditioning import (
    ConditionedTarget,
    Conditioning,
    condition_features,
    condition_target,
    main,
    open_conditioned,
)
from mtp_train.config import Config
from mtp_train.distributed import SingleProcessGroup
from mtp_train.features.manifest import FeatureStoreError, load_manifest
from mtp_train.features.reader import FeatureReader
from mtp_train.losses import target_log_normaliser
from mtp_train.normalisers import NormaliserKey, load_normalisers, save_normalisers
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.loader import default_cache_dir, load_target, resolve_target
from runtime.request import Request, SamplingParams
from tests.unit.features.targets import make_config, save_target, save_token_set, with_features

GROUP = SingleProcessGroup(torch.device("cpu"))
CPU = torch.device("cpu")
HARD = Conditioning(8.0, num_outliers=3, outlier_scale=64.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model"
    return save_target(path, tie_word_embeddings=request.param)


def condition(source: Path, root: Path, conditioning: Conditioning = HARD) -> ConditionedTarget:
    return condition_target(source, root / "new", conditioning, cache_dir=root / "cache")


def states_and_logits(path: Path, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    ids = torch.randint(3, 97, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        return hidden, model.lm_head(hidden)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_logits_keep_their_bits_and_states_are_scaled(
    source: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    made = condition(source, tmp_path)
    before, after = (states_and_logits(path, dtype) for path in (source, made.path))
    diagonal_D = HARD.diagonal(32)
    assert sorted(diagonal_D.unique().tolist()) == [8.0, 512.0]
    assert int((diagonal_D == 512.0).sum()) == 3
    assert torch.equal(after[0].float(), before[0].float() * diagonal_D)
    assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_runtime_decodes_the_same_tokens(
    source: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    texts = []
    for path in (source, condition(source, tmp_path).path):
        target = load_target(path, dtype=dtype, device=CPU, cache_dir=tmp_path / "cache")
        engine = Engine(target.model, config=EngineConfig(num_threads=1, max_model_len=128))
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=True)
        requests = [Request(str(i), (5 + i, 9, 11 + i), sampling) for i in range(4)]
        texts.append([(g.output_ids, g.logprobs) for g in engine.generate(requests)])
    assert texts[0] == texts[1]


def dump(root: Path, target: Path, dtype: str) -> tuple[Config, Path]:
    if not (root / "data").exists():
        save_token_set(root / "data")
    codec = "bf16" if dtype == "bfloat16" else "fp32"
    config = make_config(root / target.name, target, root / "data", codec=codec)
    config = dataclasses.replace(
        config, target=dataclasses.replace(config.target, dtype=dtype), features=config.features
    )
    config = with_features(config, p0_max_kl=1.0)
    precompute.run(config, group=GROUP)
    return config, Path(config.run.root) / "test" / "features"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_store_is_bit_for_bit_what_a_dump_gives_and_says_where_it_is_from(
    source: Path, tmp_path: Path, dtype: str
) -> None:
    made = condition(source, tmp_path)
    _, base = dump(tmp_path, source, dtype)
    config, dumped = dump(tmp_path, made.path, dtype)
    for split in ("train", "validation"):
        out = tmp_path / "scaled" / split
        condition_features(base / split, out, made, cache_dir=tmp_path / "cache")
        scaled, wanted = FeatureReader(out), FeatureReader(dumped / split)
        assert scaled.sample_ids == wanted.sample_ids
        assert len(scaled) > 3
        for index in range(len(wanted)):
            ours, theirs = scaled.get(index), wanted.get(index)
            assert torch.equal(ours.hidden, theirs.hidden)
            assert torch.equal(ours.input_ids, theirs.input_ids)
            assert torch.equal(ours.loss_mask, theirs.loss_mask)
        origin = load_manifest(base / split).fingerprint.digest()
        assert wanted.manifest.fingerprint.differences(scaled.manifest.fingerprint) == [
            f"settings: {wanted.manifest.fingerprint.settings!r} != "
            f"{(*wanted.manifest.fingerprint.settings, ('scaled_from', origin))!r}"
        ]
    with pytest.raises(FeatureStoreError, match="scaled_from"):
        precompute.run(with_features(config, path=str(tmp_path / "scaled")), group=GROUP)


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalisers_of_the_base_store_are_those_of_the_scaled_one(
    source: Path, tmp_path: Path, dtype: str
) -> None:
    made = condition(source, tmp_path)
    _, base = dump(tmp_path, source, dtype)
    store, out = base / "train", tmp_path / "scaled"
    reader = FeatureReader(store)
    heads = [
        load_target(p, dtype=DTYPES[dtype], device=CPU, cache_dir=tmp_path / "cache")
        for p in (source, made.path)
    ]
    weights = [
        AutoModelForCausalLM.from_pretrained(target.path, dtype=DTYPES[dtype]).lm_head.weight.data
        for target in heads
    ]
    values = {
        i: target_log_normaliser(
            reader.get(i, dtype=DTYPES[dtype]).hidden, weights[0], row_chunk=64
        )
        for i in range(len(reader))
    }
    key = NormaliserKey(reader.manifest.fingerprint.digest(), dtype, "cpu", 64)
    save_normalisers(store, key, reader.sample_ids, values)
    foreign = dataclasses.replace(key, features="another store")
    save_normalisers(store, foreign, reader.sample_ids, {0: torch.zeros(3)})
    condition_features(store, out, made, cache_dir=tmp_path / "cache")
    scaled = FeatureReader(out)
    new_key = dataclasses.replace(key, features=scaled.manifest.fingerprint.digest())
    found = load_normalisers(out, new_key, scaled.sample_ids)
    assert sorted(found) == list(range(len(scaled)))
    for i, values_T in found.items():
        hidden = scaled.get(i, dtype=DTYPES[dtype]).hidden
        assert torch.equal(values_T, target_log_normaliser(hidden, weights[1], row_chunk=64))
    assert len(list((out / "normalisers").iterdir())) == 1
    assert not load_normalisers(out, key, scaled.sample_ids)


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_says_the_same_in_other_coordinates(tmp_path: Path) -> None:
    cache = default_cache_dir()
    source = resolve_target("smollm2-135m-instruct", cache_dir=cache)
    hard = Conditioning(8.0, num_outliers=6, outlier_scale=64.0)
    made = condition_target(source, tmp_path / "new", hard, cache_dir=cache)
    found = []
    for path in (source, made.path):
        target = load_target(path, dtype=torch.float32, device=CPU, cache_dir=cache)
        engine = Engine(target.model, config=EngineConfig(num_threads=1, max_model_len=128))
        sampling = SamplingParams(temperature=0.0, max_tokens=16, logprobs=True)
        (answer,) = engine.generate([Request("0", tuple(range(1000, 1020)), sampling)])
        (rows,) = engine.forward_hidden([(*answer.prompt_ids, *answer.output_ids)])
        found.append((answer, rows.hidden_TD, engine.logits(rows.hidden_TD)))
    (before, after) = found
    assert after[0].output_ids == before[0].output_ids
    torch.testing.assert_close(after[0].logprobs, before[0].logprobs, rtol=0, atol=1e-5)
    assert torch.equal(after[1], before[1] * hard.diagonal(576))
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=1e-4)


def test_a_store_of_another_target_and_a_codec_that_rounds_are_refused(
    source: Path, tmp_path: Path
) -> None:
    made = condition(source, tmp_path)
    _, base = dump(tmp_path, source, "float32")
    other = condition_target(
        save_target(tmp_path / "other", seed=5), tmp_path / "o", HARD, cache_dir=tmp_path / "cache"
    )
    with pytest.raises(ValueError, match="made with target"):
        condition_features(base / "train", tmp_path / "a", other, cache_dir=tmp_path / "cache")
    config = make_config(tmp_path / "fp8", source, tmp_path / "data", codec="fp8_e4m3")
    precompute.run(with_features(config, p0_max_kl=1.0), group=GROUP)
    store = tmp_path / "fp8" / "test" / "features" / "train"
    with pytest.raises(ValueError, match="fp8_e4m3"):
        condition_features(store, tmp_path / "b", made, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("value", [0.0, -8.0, 10.0, float("inf"), float("nan")])
def test_factors_that_would_round_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Conditioning(value)
    with pytest.raises(ValueError, match="power of two"):
        Conditioning(8.0, num_outliers=1, outlier_scale=value)


def test_weights_that_leave_their_range_are_refused_and_nothing_is_left(
    source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        condition(source, tmp_path, Conditioning(2.0**126))
    assert not (tmp_path / "new").exists()


def test_the_command_goes_on_where_it_was_and_refuses_another_conditioning(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, base = dump(tmp_path, source, "float32")
    words = ["--target", str(source), "--out", str(tmp_path / "x8"), "--scale"]
    stores = ["--features", f"{base / 'train'}:{tmp_path / 'scaled'}"]
    for _ in range(2):
        main([*words, "8", *stores])
    assert open_conditioned(tmp_path / "x8").conditioning == Conditioning(8.0)
    assert len(FeatureReader(tmp_path / "scaled")) == len(FeatureReader(base / "train"))
    config = json.loads((tmp_path / "x8" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    with pytest.raises(SystemExit):
        main([*words, "16", *stores])
    assert "exists, with" in capsys.readouterr().err
