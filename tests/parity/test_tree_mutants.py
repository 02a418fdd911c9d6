"""P3 and P4 over draft trees: green for a correct pair, red for what is wrong in a tree only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.validate import p3, p4
from mtp_train.validate.report import RungResult
from mtp_train.validate.subject import Subject
from runtime import verify_tree
from runtime.config import TREE_SCHEDULES
from runtime.head_spec import save_head
from runtime.models.llama import LlamaModel
from runtime.spec import tree
from runtime.spec.tree_draft import FixedGrower
from tests.unit.runtime.engine_fixtures import EAGLE3, MEDUSA, random_head_tensors
from tests.unit.validate.subjects import make_prompts, make_reduced_subject, make_subject

PROMPTS = make_prompts()
K = 3
SMALL_P4 = p4.P4Sizes(max_tokens=24, state_requests=1, state_tokens=4, triples=4000)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("subject"))


def climb_p3(subject: Subject, k: int = K) -> RungResult:
    return p3.check(subject, PROMPTS, k=k, max_tokens=30, min_drafts=0)


def is_chain_green(result: RungResult) -> bool:
    return result.figures["float32_steps_that_differ"] == 0


@pytest.mark.parametrize("changes", [{}, EAGLE3, MEDUSA], ids=["mtp", "eagle3", "medusa"])
def test_correct_trees_are_green(changes: dict[str, Any], tmp_path: Path) -> None:
    subject = make_subject(tmp_path)
    spec = replace(subject.spec, **changes)
    save_head(tmp_path / "other", spec, random_head_tensors(spec))
    other = replace(subject, head_path=tmp_path / "other", _contract=None, _heads={})
    result = climb_p3(other, k=3)
    assert result.passed, result.figures
    assert result.figures["float32_fixed_tree_nodes"] > 100
    assert result.figures["float32_dynamic_tree_nodes"] > 100


def test_a_reduced_draft_vocabulary_is_green(tmp_path: Path) -> None:
    assert climb_p3(make_reduced_subject(tmp_path, (0, 2, 3, 4, 6, 7, 9, 10))).passed


def change_levels(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """``build_tree_batch`` with other arguments for the head's levels only."""
    original = tree.build_tree_batch

    def changed(**arguments: Any) -> Any:
        if arguments.get("hidden_BSD") is not None:
            change(arguments)
        return original(**arguments)

    return changed


def shift_positions(arguments: dict[str, Any]) -> None:
    arguments["positions_BS"] = arguments["positions_BS"] + 1


def see_everything(arguments: dict[str, Any]) -> None:
    arguments["visible_BSJ"] = torch.ones_like(arguments["visible_BSJ"])


def mix_states(arguments: dict[str, Any]) -> None:
    arguments["hidden_BSD"] = arguments["hidden_BSD"].flip(1).contiguous()


@pytest.mark.parametrize("change", [shift_positions, see_everything, mix_states])
def test_p3_sees_a_wrong_level(
    change: Callable[[dict[str, Any]], None], subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "build_tree_batch", change_levels(change))
    result = climb_p3(subject)
    assert not result.passed
    assert is_chain_green(result)
    assert sum(result.figures[f"float32_{name}_nodes_that_differ"] for name in TREE_SCHEDULES) > 0


def test_p3_sees_children_out_of_order(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FixedGrower.grow

    def worst_first(self: FixedGrower, hidden: Any, drawn_from_BX: torch.Tensor, run: Any) -> Any:
        return original(self, hidden, drawn_from_BX.flip(1), run)

    monkeypatch.setattr(FixedGrower, "grow", worst_first)
    result = climb_p3(subject)
    assert result.figures["float32_fixed_tree_nodes_that_differ"] > 0
    assert result.figures["float32_dynamic_tree_nodes_that_differ"] == 0
    assert not result.passed


def test_p3_sees_that_nothing_is_accepted(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is still plain decoding's: only the counts are wrong."""
    verify = verify_tree.verify_tree

    def childless(logits: Any, nodes: Any, parents: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return verify(logits, nodes, torch.full_like(parents, -1), *rest, **more)

    monkeypatch.setattr(tree, "verify_tree", childless)
    result = climb_p3(subject)
    for name in TREE_SCHEDULES:
        assert result.figures[f"float32_{name}_steps_that_differ"] > 0
        assert result.figures[f"float32_{name}_nodes_that_differ"] == 0
    assert not result.passed


def test_p4_sees_a_path_whose_states_stay_where_the_tree_put_them(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert p4.check(subject, PROMPTS, k=K, sizes=SMALL_P4).passed
    original = LlamaModel.new_pool

    def stubborn(self: LlamaModel, num_slots: int) -> Any:
        pool = original(self, num_slots)
        monkeypatch.setattr(type(pool), "move", lambda *_: None)
        return pool

    monkeypatch.setattr(LlamaModel, "new_pool", stubborn)
    result = p4.check(subject, PROMPTS, k=K, sizes=SMALL_P4)
    assert result.figures["greedy_differences"] == 0
    assert result.figures["fixed_tree_keyed_differences"] > 0
    assert not result.passed


def test_an_engine_configured_for_trees_does_not_change_the_chains(subject: Subject) -> None:
    wide = replace(subject.engine_config, tree_nodes=5, tree_top_k=2)
    assert climb_p3(replace(subject, engine_config=wide)).passed
