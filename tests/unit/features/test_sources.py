from __future__ import annotations

import pytest
import torch

from mtp_train.features.sources import (
    FeatureSource,
    HuggingFaceSource,
    RuntimeSource,
    batches_by_length,
    load_hugging_face,
)
from runtime.models.loader import load_target
from tests.unit.features.targets import save_target

CPU = torch.device("cpu")
SEQUENCES = [list(range(3, 3 + length)) for length in (17, 1, 40, 9, 17, 80)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FeatureSource]:
    path = save_target(tmp_path_factory.mktemp("target") / "model")
    target = load_target(path, dtype=torch.float32, device=CPU, cache_dir=path / "cache")
    model = load_hugging_face(path, dtype=torch.float32, device=CPU)
    return {
        "runtime": RuntimeSource(target.model, max_batch_tokens=32, max_len=80),
        "huggingface": HuggingFaceSource(model, max_batch_tokens=64),
        "oracle": HuggingFaceSource(model, max_batch_tokens=1),  # one sequence per forward
    }


@pytest.mark.parametrize("name", ["runtime", "huggingface"])
def test_states_equal_one_forward_per_sequence(
    sources: dict[str, FeatureSource], name: str
) -> None:
    def by_index(source: FeatureSource) -> dict[int, torch.Tensor]:
        items = list(source.hidden(SEQUENCES))
        assert all(list(item.token_ids) == SEQUENCES[int(item.key)] for item in items)
        return {int(item.key): item.hidden_TD for item in items}

    got, wanted = by_index(sources[name]), by_index(sources["oracle"])
    assert got.keys() == wanted.keys() == set(range(len(SEQUENCES)))
    for index, states_TD in wanted.items():
        assert got[index].shape == states_TD.shape
        torch.testing.assert_close(got[index], states_TD, rtol=1e-4, atol=1e-4)


def test_logits_are_those_of_the_whole_model(sources: dict[str, FeatureSource]) -> None:
    oracle = sources["oracle"]
    assert isinstance(oracle, HuggingFaceSource)
    with torch.no_grad():
        logits_TV = oracle._model(torch.tensor([SEQUENCES[2]])).logits[0]
    for source in sources.values():
        (rows,) = source.hidden([SEQUENCES[2]])
        torch.testing.assert_close(source.logits(rows.hidden_TD), logits_TV, rtol=1e-4, atol=1e-4)


def test_batches_stay_within_the_padded_budget_and_hold_everything() -> None:
    lengths = [3, 50, 7, 7, 1, 30, 30, 29, 100]
    batches = batches_by_length(lengths, 64)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= 64 or len(batch) == 1
    assert len(batches) == 5
