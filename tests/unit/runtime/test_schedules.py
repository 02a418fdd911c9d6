"""Which schedule an engine gets, what does not go together, and what does although it was written
apart: lists of ids, chosen lengths and graphs under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import EngineConfig
from runtime.draft_vocab import reduce_head
from runtime.engine import Engine
from runtime.models.base import Model
from runtime.models.heads import build_head
from runtime.models.layer_drop import keep_layers
from runtime.models.loader import Target, load_target
from runtime.spec.base import PlainSchedule
from runtime.spec.draft_target import DraftTargetSchedule, OnLeader
from runtime.spec.mtp import MtpSchedule
from runtime.spec.tree import TreeSchedule
from tests.unit.runtime.engine_fixtures import (
    VOCAB,
    check_draft_state,
    head_spec,
    make_engine,
    make_requests,
    random_head,
    random_head_tensors,
    run_stepwise,
    tiny_target,
)
from tests.unit.runtime.model_fixtures import save_llama
from tests.unit.runtime.operator_recorder import OperatorRecorder
from tests.unit.runtime.test_choose import Dice
from tests.unit.runtime.test_cuda_graph import flashinfer_target
from tests.unit.runtime.thread_group import ThreadGroup, run_ranks

CPU = torch.device("cpu")


def shallow(target: Target) -> Model:
    return keep_layers(target.model, [0])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


def plain_outputs(target: Target, requests: Any) -> dict[str, list[int]]:
    return {g.request_id: list(g.output_ids) for g in make_engine(target).generate(requests)}


@pytest.mark.parametrize(
    ("name", "make_draft", "wanted"),
    [
        ("auto", lambda target: None, PlainSchedule),
        ("fixed_tree", lambda target: None, PlainSchedule),
        ("auto", random_head, MtpSchedule),
        ("mtp", random_head, MtpSchedule),
        ("fixed_tree", random_head, TreeSchedule),
        ("dynamic_tree", random_head, TreeSchedule),
        ("auto", shallow, DraftTargetSchedule),
        ("draft_target", shallow, DraftTargetSchedule),
    ],
)
def test_a_schedule_is_chosen_by_its_name_or_by_the_draft(
    target: Target, name: Any, make_draft: Callable[[Target], Any], wanted: type[PlainSchedule]
) -> None:
    draft = make_draft(target)
    engine = make_engine(
        target, draft, schedule=name, num_draft_tokens=2 if draft else 0, tree_nodes=4
    )
    assert type(engine.schedule) is wanted


@pytest.mark.parametrize(
    ("name", "make_draft", "message"),
    [
        ("draft_target", random_head, "draft_target: a whole model has to draft, .* is a head;"),
        ("mtp", shallow, "mtp: a head has to draft, the draft is a whole model; .*auto"),
        ("fixed_tree", shallow, "fixed_tree: a head has to draft"),
    ],
)
def test_a_schedule_with_another_draft_is_refused(
    target: Target, name: Any, make_draft: Callable[[Target], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"runtime.schedule={message}"):
        make_engine(target, make_draft(target), schedule=name, num_draft_tokens=2, tree_nodes=4)


def test_graphs_are_refused_over_ranks(tmp_path: Path) -> None:
    save_llama(tmp_path, vocab_size=VOCAB)
    load_target(str(tmp_path), dtype=torch.float32, device=CPU)  # its fingerprint is known then

    def live(group: ThreadGroup) -> None:
        spread = load_target(str(tmp_path), dtype=torch.float32, device=CPU, group=group)
        with pytest.raises(ValueError, match=r"cuda_graphs=true with a model .* over 2 ranks"):
            make_engine(spread, random_head(spread), num_draft_tokens=2, cuda_graphs=True)

    run_ranks(2, live)


def test_lengths_are_chosen_for_chains_only() -> None:
    with pytest.raises(ValueError, match=r"measured with runtime\.schedule=fixed_tree"):
        EngineConfig(schedule="fixed_tree", draft_length="measured")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_model_takes_any_length_at_any_step(target: Target, temperature: float) -> None:
    requests = make_requests(6, temperature=temperature, max_tokens=30)
    engine = make_engine(target, shallow(target), num_draft_tokens=3, num_pages=16)
    dice = engine.scheduler.chooser = Dice(3, 0)
    got = run_stepwise(engine, requests, late=True, after_step=check_draft_state)
    assert got == plain_outputs(target, requests)
    assert {0, 1, 3} <= set(dice.chosen)


@pytest.mark.parametrize("schedule", ["mtp", "draft_target"])
def test_chosen_lengths_reach_the_other_ranks(tmp_path: Path, schedule: Any) -> None:
    save_llama(tmp_path, vocab_size=VOCAB)
    whole = load_target(str(tmp_path), dtype=torch.float32, device=CPU)
    requests = make_requests(4, ignore_eos=True)

    def live(group: ThreadGroup) -> Any:
        spread = load_target(str(tmp_path), dtype=torch.float32, device=CPU, group=group)
        draft: Any = random_head(spread)
        if schedule == "draft_target":
            draft = shallow(whole) if group.is_leader else OnLeader()
        engine: Engine = make_engine(spread, draft, num_draft_tokens=3, schedule=schedule)
        if not group.is_leader:
            engine.follow()
            return None
        dice = engine.scheduler.chooser = Dice(3, 1)
        got = {g.request_id: list(g.output_ids) for g in engine.generate(requests)}
        engine.dismiss()
        assert {0, 1, 3} <= set(dice.chosen)
        return got

    assert run_ranks(2, live)[0] == plain_outputs(whole, requests)


@pytest.mark.parametrize("schedule", ["mtp", "fixed_tree", "dynamic_tree"])
def test_a_head_with_a_list_of_ids_drafts_chains_and_trees_over_ranks(
    tmp_path: Path, schedule: Any
) -> None:
    """Only listed ids are drafted; the output is that of plain decoding."""
    save_llama(tmp_path, vocab_size=VOCAB)
    whole = load_target(str(tmp_path), dtype=torch.float32, device=CPU)
    requests = make_requests(4, temperature=0.8, ignore_eos=True)
    ids_W = torch.tensor([1, 3, 4, 8, 10])

    def live(group: ThreadGroup) -> Any:
        spread = load_target(str(tmp_path), dtype=torch.float32, device=CPU, group=group)
        spec = head_spec(spread)
        reduced, tensors = reduce_head(spec, random_head_tensors(spec), ids_W, coverage=0.5)
        draft = build_head(reduced, tensors, spread.model)
        engine = make_engine(spread, draft, num_draft_tokens=3, schedule=schedule, tree_nodes=6)
        if not group.is_leader:
            engine.follow()
            return None
        generations = engine.generate(requests)
        engine.dismiss()
        return generations

    generations = run_ranks(2, live)[0]
    assert {g.request_id: list(g.output_ids) for g in generations} == plain_outputs(whole, requests)
    assert {i for g in generations for step in g.steps for i in step.draft_ids} <= set(
        ids_W.tolist()
    )


@pytest.mark.parametrize("schedule", ["draft_target", "dynamic_tree"])
def test_graphs_change_no_token_of_other_schedules(
    target: Target, tmp_path: Path, schedule: Any
) -> None:
    """Tree rows run without a graph, all else is replayed."""
    recorded = flashinfer_target(tmp_path)
    requests = make_requests(5, temperature=0.8, max_tokens=20)
    draft: Any = shallow(recorded) if schedule == "draft_target" else random_head(recorded)
    engine = make_engine(
        recorded,
        draft,
        num_draft_tokens=3,
        schedule=schedule,
        tree_nodes=6,
        tree_top_k=3,
        cuda_graphs=True,
        recorder=OperatorRecorder(),
    )
    got = run_stepwise(engine, requests, late=True, after_step=check_draft_state)
    assert got == plain_outputs(target, requests)
