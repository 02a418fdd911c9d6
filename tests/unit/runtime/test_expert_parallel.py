"""Experts dealt out whole over ranks against the same target on one: equal tokens in fp32.

Ranks are threads here; `tests/distributed/test_sparse_ranks.py` runs the same over gloo.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.engine import Engine
from runtime.models.checkpoint import Checkpoint
from runtime.models.loader import Target, load_target
from runtime.moe import ExpertMlp
from runtime.parallel import SingleProcessGroup
from runtime.sharding import Shard, share_layer, target_shards
from tests.unit.runtime.engine_fixtures import VOCAB, make_requests
from tests.unit.runtime.model_fixtures import random_ids, relative_error, save_model
from tests.unit.runtime.test_tensor_parallel import Case, make_engine, open_case
from tests.unit.runtime.thread_group import ThreadGroup, run_ranks

CPU = torch.device("cpu")
NUM_EXPERTS = 7  # of no number of ranks a multiple
SIZES: dict[str, dict[str, Any]] = {
    "qwen3moe": {"num_experts": NUM_EXPERTS},
    "deepseekv2": {"n_routed_experts": NUM_EXPERTS},
    "deepseekv3": {"n_routed_experts": NUM_EXPERTS, "n_group": 1, "topk_group": 1},
}


@pytest.fixture(scope="module", params=SIZES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_sparse_case(tmp_path_factory.mktemp("target"), request.param)


def make_sparse_case(path: Path, family: str) -> Case:
    save_model(path, family, vocab_size=VOCAB, **SIZES[family])
    return open_case(path)


def load(case: Case, group: ThreadGroup, **options: Any) -> Target:
    options = {"expert_parallel": True, **options}
    return load_target(case.path, dtype=torch.float32, device=CPU, group=group, **options)


def experts_of(target: Target) -> list[ExpertMlp]:
    return [block.mlp for block in target.model.blocks if isinstance(block.mlp, ExpertMlp)]


def exercise(engine: Engine) -> tuple[list[Any], list[torch.Tensor]]:
    """Tokens and drafts; scores by chunks and row by row."""
    sequences = [random_ids(n, seed=n, vocab_size=VOCAB) for n in (40, 3)]
    generations = engine.generate(make_requests(3, temperature=0.9, ignore_eos=True, max_tokens=12))
    return generations, [*engine.score(sequences), *engine.score(sequences[1:], decode_path=True)]


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_tokens_and_scores_are_those_of_one_rank(
    case: Case, width: int, num_drafts: int
) -> None:
    settings: dict[str, Any] = {"draft": True, "num_draft_tokens": num_drafts}

    def live(group: ThreadGroup) -> Any:
        engine = make_engine(case, load(case, group), **settings)
        if group.is_leader:
            result = exercise(engine)
            engine.dismiss()
            return result
        return engine.follow()

    generations, scores = run_ranks(width, live)[0]
    wanted, wanted_scores = exercise(make_engine(case, case.whole, **settings))
    assert generations == wanted
    assert any(step.num_accepted for one in generations for step in one.steps)
    for got, want in zip(scores, wanted_scores, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [2, 4])
def test_a_rank_reads_and_holds_its_own_experts_and_a_part_of_the_rest(
    case: Case, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[int, dict[str, int]] = {}
    whole_read = Checkpoint.read

    def note(
        self: Checkpoint, name: str, *, dtype: torch.dtype, device: Any, shard: Shard | None = None
    ) -> torch.Tensor:
        tensor = whole_read(self, name, dtype=dtype, device=device, shard=shard)
        read.setdefault(threading.get_ident(), {})[name] = tensor.numel()
        return tensor

    monkeypatch.setattr(Checkpoint, "read", note)

    def live(group: ThreadGroup) -> tuple[list[ExpertMlp], dict[str, int]]:
        return experts_of(load(case, group)), read.pop(threading.get_ident())

    config = case.whole.config
    spec = config.experts
    assert spec is not None
    expert = 3 * config.hidden_size * spec.inner
    layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    ranks = run_ranks(width, live)
    for rank, (held, names) in enumerate(ranks):
        own = range(rank * NUM_EXPERTS // width, (rank + 1) * NUM_EXPERTS // width)
        wanted = {
            f"model.layers.{layer}.mlp.experts.{index}.{part}_proj.weight"
            for layer in layers
            for index in own
            for part in ("gate", "up", "down")
        }
        assert {name for name in names if ".experts." in name} == wanted
        assert sum(names[name] for name in wanted) == len(layers) * len(own) * expert
        for mlp in held:
            assert mlp.products.own == own or not own
            assert mlp.products.num_bytes() == len(own) * expert * 4
            if mlp.shared is not None:
                shared = mlp.shared.gate_up.num_bytes() + mlp.shared.down.linear.num_bytes()
                assert shared == -(-spec.num_shared * spec.inner // width) * 3 * 4 * (
                    config.hidden_size
                )
    assert sum(len(held[0].products.own) for held, _ in ranks) == NUM_EXPERTS


def test_more_ranks_than_experts_leave_some_without(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3moe", vocab_size=VOCAB, num_experts=2, num_experts_per_tok=1)
    case = open_case(tmp_path)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))

    def live(group: ThreadGroup) -> tuple[int, torch.Tensor]:
        mlp = experts_of(load(case, group))[0]
        return len(mlp.products.own), mlp(x)

    ranks = run_ranks(3, live)
    assert [count for count, _ in ranks] == [0, 1, 1]
    for _, got in ranks:
        assert relative_error(got, experts_of(case.whole)[0](x)) < 1e-5


def test_a_layer_is_one_sum_over_the_ranks(case: Case) -> None:
    """Rows are on every rank, so that nothing is sent to an expert: N * D elements come back."""

    def live(group: ThreadGroup) -> dict[str, int]:
        mlp = experts_of(load(case, group))[0]
        before = dict(group.calls)
        mlp(torch.ones(5, case.whole.config.hidden_size))
        return {name: n - before.get(name, 0) for name, n in group.calls.items()}

    for calls in run_ranks(2, live):
        assert {name for name, n in calls.items() if n} == {"all_reduce"}
        assert calls["all_reduce"] == 1


def test_an_expert_of_another_rank_is_missed(case: Case) -> None:
    """Rows of neighbours' experts, given to one's own, have to be seen."""

    def live(group: ThreadGroup) -> float:
        mlp = experts_of(load(case, group))[0]
        if not group.is_leader:
            own = mlp.products.own
            mlp.products.own = range(own.start - 1, own.stop - 1)
        width = case.whole.config.hidden_size
        x = torch.randn(9, width, generator=torch.Generator().manual_seed(0))
        return relative_error(mlp(x), experts_of(case.whole)[0](x))

    assert all(error > 1e-2 for error in run_ranks(2, live))


def test_parts_of_ranks_list_every_tensor_of_the_experts_once(case: Case) -> None:
    config = case.whole.config
    layer = config.num_layers - 1

    def live(group: ThreadGroup) -> tuple[dict[str, Any], dict[str, Shard]]:
        share = share_layer(config, layer, group, expert_parallel=True)
        return share.shapes, target_shards(config, group, expert_parallel=True)

    listed: list[str] = []
    for shapes, shards in run_ranks(3, live):
        assert not any(".experts." in name for name in shards)
        listed.extend(name for name in shapes if ".experts." in name)
    whole = [name for name in config.block_shapes(layer) if ".experts." in name]
    assert sorted(listed) == sorted(whole)


def test_a_target_without_experts_cannot_deal_them_out(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"expert_parallel=true with LlamaForC.* has no experts"):
        load_target(
            tmp_path / "model",
            dtype=torch.float32,
            device=CPU,
            group=SingleProcessGroup(CPU),
            expert_parallel=True,
        )
