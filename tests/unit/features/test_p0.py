from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.config import Codec
from mtp_train.features import p0 as p0_module
from mtp_train.features.codecs import EncodedRows, encode
from mtp_train.features.manifest import P0Figures
from mtp_train.features.p0 import (
    DecodeReference,
    HuggingFaceReference,
    P0Check,
    P0Error,
    spread_by_length,
)
from mtp_train.features.shards import FeatureSample
from mtp_train.features.sources import (
    FeatureSource,
    HuggingFaceSource,
    RuntimeSource,
    load_hugging_face,
)
from runtime.batch import ForwardBatch
from runtime.models.loader import load_target
from runtime.request import HiddenRows
from runtime.team import SoloTeam
from tests.unit.features.targets import save_target

CPU = torch.device("cpu")
GENERATOR_SEED = 5


class MutantSource(FeatureSource):
    """A source whose states are wrong in one way; logits are the target's."""

    name = "mutant"
    dtype = torch.float32

    def __init__(self, base: HuggingFaceSource, pick: Callable[[object], torch.Tensor]) -> None:
        self._base = base
        self._pick = pick

    def hidden(self, sequences: Sequence[Sequence[int]]) -> Iterator[HiddenRows]:
        for index, ids in enumerate(sequences):
            with torch.no_grad():
                states_TD = self._pick((self._base._model, torch.tensor([list(ids)])))
            yield HiddenRows(str(index), tuple(ids), states_TD)

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return self._base.logits(hidden_MD)


def pre_norm(given: object) -> torch.Tensor:
    """The residual stream before the final norm."""
    model, ids = given  # type: ignore[misc]
    kept: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    model(ids)
    handle.remove()
    return kept[0][0]


def one_layer_off(given: object) -> torch.Tensor:
    model, ids = given  # type: ignore[misc]
    return model.model.norm(model(ids, output_hidden_states=True).hidden_states[-2])[0]


def normed_twice(given: object) -> torch.Tensor:
    model, ids = given  # type: ignore[misc]
    return model.model.norm(model.model(ids).last_hidden_state)[0]


def shifted(given: object) -> torch.Tensor:
    model, ids = given  # type: ignore[misc]
    return model.model(ids).last_hidden_state[0].roll(1, 0)


def unmasked(given: object) -> torch.Tensor:
    """Positions that start one too late."""
    model, ids = given  # type: ignore[misc]
    positions = torch.arange(ids.shape[1])[None] ** 2
    return model.model(ids, position_ids=positions).last_hidden_state[0]


@dataclasses.dataclass(frozen=True)
class Bench:
    runtime: RuntimeSource
    hugging_face: HuggingFaceSource
    references: list[p0_module.LogitsReference]

    def check(self, source: FeatureSource, **options: object) -> P0Check:
        settings = {
            "codec": "fp32",
            "num_samples": 3,
            "num_rows": 8,
            "max_logprob_gap": 1e-4,
            "max_kl": 0.01,
        } | options
        return P0Check(source, self.references, **settings)  # type: ignore[arg-type]

    def samples(self, source: FeatureSource) -> list[FeatureSample]:
        generator = torch.Generator().manual_seed(GENERATOR_SEED)
        sequences = [
            torch.randint(3, 97, (length,), generator=generator).tolist()
            for length in (2, 30, 5, 61, 12, 7)
        ]
        return [
            FeatureSample(
                rows.key,
                torch.tensor(rows.token_ids),
                torch.ones(len(rows.token_ids), dtype=torch.bool),
                rows.hidden_TD,
            )
            for rows in source.hidden(sequences)
        ]


def make_bench(path: Path, dtype: torch.dtype) -> Bench:
    model = load_target(path, dtype=dtype, device=CPU, cache_dir=path / "cache").model
    exact = HuggingFaceSource(
        load_hugging_face(path, dtype=torch.float32, device=CPU), max_batch_tokens=64
    )
    return Bench(
        runtime=RuntimeSource(model, max_batch_tokens=32, max_len=80),
        hugging_face=exact,
        references=[DecodeReference(SoloTeam(model)), HuggingFaceReference(exact)],
    )


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def bench(target_path: Path) -> Bench:
    return make_bench(target_path, torch.float32)


@pytest.fixture(scope="module")
def bf16_bench(target_path: Path) -> Bench:
    return make_bench(target_path, torch.bfloat16)


def test_states_of_both_sources_pass_in_fp32(bench: Bench) -> None:
    for source in (bench.runtime, bench.hugging_face):
        figures = bench.check(source)(bench.samples(source))
        assert figures.num_samples == 3
        assert figures.num_rows == 4 + 8 + 8  # lengths 5, 12, 61: all rows, or the last eight
        assert {c.name for c in figures.comparisons} == {"decode", "huggingface", "decode_error"}
        assert all(c.max_gap <= 1e-4 for c in figures.comparisons)
        assert figures.codec_mean_kl == 0


def test_the_decode_path_equals_scoring_row_by_row(bench: Bench) -> None:
    sample = max(bench.samples(bench.runtime), key=lambda s: len(s.input_ids))
    ids = tuple(sample.input_ids.tolist())
    (scores,) = bench.runtime.engine.score([ids], decode_path=True)
    for start in (0, 20):
        (logits_MV,) = bench.references[0].logits([p0_module.Window(ids, start)])
        got = logits_MV.log_softmax(-1).gather(1, sample.input_ids[start + 1 :, None])[:, 0]
        torch.testing.assert_close(got, scores[start:], rtol=1e-5, atol=1e-5)


def test_each_window_is_decoded_alone_one_row_per_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.runtime.model
    q_lens: list[tuple[int, ...]] = []
    forward = model.forward

    def record(batch: ForwardBatch, *arguments: Any) -> torch.Tensor:
        q_lens.append(batch.q_lens)
        return forward(batch, *arguments)

    monkeypatch.setattr(model, "forward", record)
    windows = [p0_module.Window(tuple(range(3, 23)), 15), p0_module.Window((5, 6, 7), 0)]
    logits = bench.references[0].logits(windows)
    assert q_lens == [(15,), *[(1,)] * 4, *[(1,)] * 2]
    assert [len(logits_MV) for logits_MV in logits] == [window.num_rows for window in windows]


def test_bf16_states_pass_by_kl_and_by_the_decode_paths_own_error(bf16_bench: Bench) -> None:
    source = bf16_bench.runtime
    figures = bf16_bench.check(source, num_samples=6, num_rows=60)(bf16_bench.samples(source))
    assert figures.dtype == "bfloat16"
    assert any(c.max_gap > 1e-4 for c in figures.comparisons), "bf16 cannot meet the fp32 bound"


MUTANTS = [pre_norm, one_layer_off, normed_twice, shifted, unmasked]


@pytest.mark.parametrize("pick", MUTANTS, ids=lambda pick: pick.__name__)
def test_wrong_states_abort_in_fp32(bench: Bench, pick: Callable[[object], torch.Tensor]) -> None:
    source = MutantSource(bench.hugging_face, pick)
    samples = bench.samples(source)
    with pytest.raises(P0Error, match=r"differ from decode by up to .* differ from huggingface"):
        bench.check(source)(samples)


@pytest.mark.parametrize("pick", MUTANTS, ids=lambda pick: pick.__name__)
def test_wrong_states_abort_in_bf16(
    bf16_bench: Bench, pick: Callable[[object], torch.Tensor]
) -> None:
    source = MutantSource(bf16_bench.hugging_face, pick)
    samples = [
        dataclasses.replace(sample, hidden=sample.hidden.bfloat16())
        for sample in bf16_bench.samples(source)
    ]
    with pytest.raises(P0Error, match=r"mean KL against decode .* mean KL against huggingface"):
        bf16_bench.check(source)(samples)


def test_a_wrong_runtime_is_seen_through_hugging_face_alone(
    bf16_bench: Bench, tmp_path: Path
) -> None:
    """Dump and decode path agree with each other, and both are another model's."""
    other = make_bench(save_target(tmp_path / "model", seed=1), torch.bfloat16)
    mixed = dataclasses.replace(other, references=[other.references[0], bf16_bench.references[1]])
    with pytest.raises(P0Error) as caught:
        mixed.check(mixed.runtime)(mixed.samples(mixed.runtime))
    assert "against huggingface" in str(caught.value)
    assert "against decode" not in str(caught.value)


def test_a_decode_error_ratio_above_two_aborts(bench: Bench) -> None:
    check = bench.check(bench.runtime)

    def figures(gap: float) -> P0Figures:
        return P0Figures(
            num_samples=1,
            num_rows=1,
            dtype="bfloat16",
            comparisons=(
                p0_module.Comparison("decode", gap, gap, 0.0),
                p0_module.Comparison("decode_error", 0.1, 0.1, 0.0),
            ),
            codec_mean_kl=0.0,
        )

    assert check.failures(figures(0.2)) == []
    assert "more than 2 times" in check.failures(figures(0.21))[0]


def test_nan_figures_fail(bench: Bench) -> None:
    figures = bench.check(bench.runtime).measure(bench.samples(bench.runtime))
    nan = float("nan")
    broken = dataclasses.replace(figures, codec_mean_kl=nan)
    assert bench.check(bench.runtime).failures(broken)
    wrong = dataclasses.replace(figures.comparisons[0], max_gap=nan)
    assert bench.check(bench.runtime).failures(dataclasses.replace(figures, comparisons=(wrong,)))


def test_fp8_passes_and_a_broken_codec_aborts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = bench.samples(bench.runtime)
    check = bench.check(bench.runtime, codec="fp8_e4m3", max_kl=0.05)
    assert 0 < check(samples).codec_mean_kl < 0.05

    def unscaled(rows: EncodedRows, *, dtype: torch.dtype) -> torch.Tensor:
        return rows.hidden_ND.to(dtype)

    monkeypatch.setattr(p0_module, "decode", unscaled)
    with pytest.raises(P0Error, match="codec fp8_e4m3 costs"):
        check(samples)


def test_the_codec_is_measured_on_rows_of_every_sample(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = bench.samples(bench.runtime)
    rows_of = [sample.hidden for sample in samples]
    check = bench.check(bench.runtime, num_samples=1, num_rows=1)
    seen: list[torch.Tensor] = []

    def watch(hidden_ND: torch.Tensor, codec: Codec) -> EncodedRows:
        seen.append(hidden_ND)
        return encode(hidden_ND, codec)

    monkeypatch.setattr(p0_module, "encode", watch)
    check(samples)
    assert torch.equal(seen[0], torch.cat(rows_of)), "few rows: all of them"
    monkeypatch.setattr(p0_module, "_CODEC_ROWS", 13)
    check(samples)
    expected = torch.cat(rows_of)[[i * 117 // 13 for i in range(13)]]
    assert torch.equal(seen[1], expected)


def test_samples_are_spread_over_lengths() -> None:
    samples = [
        FeatureSample(f"{n:03d}", torch.zeros(n), torch.zeros(n), torch.zeros(n, 1))
        for n in range(1, 42)
    ]
    assert [len(s.input_ids) for s in spread_by_length(samples, 2)] == [12, 32]
    assert len(spread_by_length(samples, 100)) == 40
    assert spread_by_length(samples[:1], 2) == []


def test_a_shard_of_one_token_samples_has_empty_figures(bench: Bench) -> None:
    sample = FeatureSample(
        "x", torch.tensor([3]), torch.ones(1, dtype=torch.bool), torch.ones(1, 32)
    )
    figures = bench.check(bench.runtime)([sample])
    assert (figures.num_samples, figures.num_rows) == (0, 0)
