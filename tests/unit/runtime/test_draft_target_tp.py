"""Draft-target speculation with the target spread over ranks and the draft on the leader alone.

Ranks are threads here; `tests/distributed` runs the same over gloo.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.validate.recompute import draft_model_parts
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.kv_cache import KVPool
from runtime.models.base import Model
from runtime.models.layer_drop import keep_layers
from runtime.models.loader import Target, load_target
from runtime.request import Generation, Phase, Request, SamplingParams
from runtime.spec.draft_target import DraftTargetSchedule, OnLeader
from tests.unit.runtime.draft_models import tiny_draft
from tests.unit.runtime.engine_fixtures import EOS, VOCAB, make_requests, run_stepwise
from tests.unit.runtime.model_fixtures import save_llama
from tests.unit.runtime.test_tensor_parallel import SHAPES, SMOLLM2
from tests.unit.runtime.thread_group import ThreadGroup, run_ranks

CPU = torch.device("cpu")
K = 3


@pytest.fixture(scope="module", params=["even", "three_kv_heads"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("target")
    save_llama(place, **{"vocab_size": VOCAB, **SHAPES[request.param]})
    return place


def load(path: Path, **options: Any) -> Target:
    return load_target(str(path), dtype=torch.float32, device=CPU, **options)


def make_engine(target: Target, draft: Model | OnLeader | None, **overrides: Any) -> Engine:
    values: dict[str, Any] = {
        "num_pages": 64,
        "max_running": 4,
        "max_model_len": 96,
        "max_batch_tokens": 32,
        "check_integrity": True,
        "num_draft_tokens": K if draft is not None else 0,
    }
    config = EngineConfig(**{**values, **overrides})
    return Engine(target.model, config=config, eos_token_ids=(EOS,), draft=draft)


def check_leader(engine: Engine) -> None:
    """Draft K/V and carried logits against the draft from scratch."""
    schedule = engine.schedule
    assert isinstance(schedule, DraftTargetSchedule)
    for state in engine.scheduler.running:
        if state.phase is Phase.DECODE:
            for name, held, fresh in draft_model_parts(schedule, state):
                scale = float(fresh.abs().max().clamp_min(1e-6))
                torch.testing.assert_close(
                    held, fresh, rtol=0, atol=1e-4 * scale, msg=f"{name} is off"
                )


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("page_size", [1, 16])
def test_output_and_drafts_are_those_of_one_process(
    path: Path, width: int, temperature: float, page_size: int
) -> None:
    requests = make_requests(6, temperature=temperature, ignore_eos=True)
    requests[0] = replace(requests[0], sampling=replace(requests[0].sampling, logprobs=True))
    settings = {"page_size": page_size, "num_pages": 1024 // page_size}
    whole = load(path)
    draft = keep_layers(whole.model, [0])
    plain = run_stepwise(make_engine(whole, None), requests)
    alone = make_engine(whole, draft, **settings).generate(requests)
    assert {one.request_id: list(one.output_ids) for one in alone} == plain

    def live(group: ThreadGroup) -> Any:
        target = load(path, group=group)
        engine = make_engine(target, draft if group.is_leader else OnLeader(), **settings)
        if not group.is_leader:
            engine.follow()
            return engine
        late = run_stepwise(engine, requests, late=True, after_step=check_leader)
        assert late == plain
        spread = engine.generate(requests)
        engine.dismiss()
        return spread

    wanted, scores = strip_logprobs(alone)
    spread, *followers = run_ranks(width, live)
    got, got_scores = strip_logprobs(spread)
    assert got == wanted
    torch.testing.assert_close(got_scores, scores, rtol=0, atol=1e-4)
    for follower in followers:
        assert_no_draft(follower)


def strip_logprobs(generations: list[Generation]) -> tuple[list[Generation], torch.Tensor]:
    """The generations without log-probabilities, and those of the first one."""
    return [replace(one, logprobs=None) for one in generations], torch.tensor(
        generations[0].logprobs
    )


def assert_no_draft(engine: Engine) -> None:
    """Everything that a follower's schedule holds, by type: no weights and no K/V but its own."""
    schedule = engine.schedule
    assert isinstance(schedule, DraftTargetSchedule)
    assert schedule.draft is None
    held = list(vars(schedule).values())
    assert [item for item in held if isinstance(item, Model | KVPool)] == []
    tensors = [item for item in held if isinstance(item, torch.Tensor)]
    assert [tuple(tensor.shape) for tensor in tensors] == [(engine.config.max_running,)]


def test_the_step_is_announced_while_the_leader_drafts(path: Path) -> None:
    """One broadcast of host memory per step; in a speculative one after the first draft run."""
    whole = load(path)
    draft = keep_layers(whole.model, [0])

    def live(group: ThreadGroup) -> Any:
        engine = make_engine(load(path, group=group), draft if group.is_leader else OnLeader())
        if not group.is_leader:
            return engine.follow()
        events: list[str] = []
        schedule = engine.schedule
        assert isinstance(schedule, DraftTargetSchedule)
        announce, engine.transfer.mark = schedule.announce, events.append  # type: ignore[method-assign]

        def watched(plan: Any) -> None:
            before = group.calls.get("broadcast_host", 0)
            announce(plan)
            events.append(f"announce {group.calls['broadcast_host'] - before}")

        schedule.announce = watched
        engine.generate(make_requests(2, ignore_eos=True))
        engine.dismiss()
        return events

    events = run_ranks(2, live)[0]
    steps = " ".join(events).split("announce 1")
    assert steps[0] == ""
    assert " draw draft draw " in {step[-17:] for step in steps}
    assert "announce" not in " ".join(steps)


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_draft_anywhere_else_is_a_broken_invariant(path: Path, wrong_rank: int) -> None:
    """None on the leader; one on a follower."""
    whole = load(path)

    def live(group: ThreadGroup) -> None:
        target = load(path, group=group)
        if group.rank == wrong_rank:
            make_engine(target, OnLeader() if group.is_leader else whole.model)

    with pytest.raises(AssertionError, match="the draft lives on the leader, only there"):
        run_ranks(2, live)


def test_a_draft_that_is_spread_over_ranks_is_refused(path: Path) -> None:
    def live(group: ThreadGroup) -> str:
        target = load(path, group=group)
        draft = target.model if group.is_leader else OnLeader()
        if not group.is_leader:
            return ""
        with pytest.raises(ValueError, match="spread over 2 ranks") as refused:
            make_engine(target, draft)
        return str(refused.value)

    assert "on the leader alone" in run_ranks(2, live)[0]


def test_another_vocabulary_is_refused_on_the_leader(
    path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draft = tiny_draft(tmp_path_factory.mktemp("draft"), vocab_size=VOCAB + 2)

    def live(group: ThreadGroup) -> None:
        target = load(path, group=group)
        if group.is_leader:
            make_engine(target, draft)

    with pytest.raises(ValueError, match="same vocabulary"):
        run_ranks(2, live)


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_over_three_ranks_with_some_of_its_own_layers_as_the_draft() -> None:
    whole = load(Path(SMOLLM2))
    draft = keep_layers(whole.model, [*range(8), *range(22, 30)])
    texts = [(1, 504, 3575, 282, 4649, 314), (1, 788, 314, 260, 1389, 282, 1343, 47)]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [Request(f"r{i}", ids, sampling) for i, ids in enumerate(texts)]
    plain = make_engine(whole, None).generate(requests)
    alone = make_engine(whole, draft).generate(requests)

    def live(group: ThreadGroup) -> Any:
        target = load(Path(SMOLLM2), group=group)
        engine = make_engine(target, draft if group.is_leader else OnLeader())
        if not group.is_leader:
            engine.follow()
            return engine
        spread = engine.generate(requests)
        engine.dismiss()
        return spread

    spread, *followers = run_ranks(3, live)
    assert spread == alone
    assert [one.output_ids for one in spread] == [one.output_ids for one in plain]
    assert any(step.num_accepted for one in spread for step in one.steps)
    for follower in followers:
        assert_no_draft(follower)
