"""Verification in two halves: equal drafts and tokens, and the order of computation and sums."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import halves
from runtime.batch import BatchMode, ForwardBatch, cut_in_halves
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.halves import HalfPlans
from runtime.layers import DecoderBlock
from runtime.models.base import Model
from runtime.models.heads import build_head
from runtime.models.loader import load_target
from runtime.parallel import PendingSum
from tests.unit.runtime.engine_fixtures import (
    EAGLE3,
    VOCAB,
    check_draft_state,
    make_requests,
    run_stepwise,
)
from tests.unit.runtime.model_fixtures import make_batch, make_table, random_ids, save_model
from tests.unit.runtime.test_expert_parallel import SIZES, make_sparse_case
from tests.unit.runtime.test_tensor_parallel import Case, make_engine, open_case
from tests.unit.runtime.thread_group import ThreadGroup, run_ranks

CPU = torch.device("cpu")
FAMILIES = [*SIZES, "llama"]


def make_family(path: Path, family: str, **overrides: Any) -> Case:
    if family in SIZES:
        return make_sparse_case(path, family)
    save_model(path, family, vocab_size=VOCAB)
    return open_case(path, **overrides)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_family(tmp_path_factory.mktemp("target"), request.param)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the first half, for every forward that was cut."""
    rows: list[int] = []
    whole = halves.run_rows

    def note(blocks: Sequence[DecoderBlock], *arguments: Any, plan: Any, **options: Any) -> Any:
        if isinstance(plan, HalfPlans):
            rows.append(plan.num_first)
        return whole(blocks, *arguments, plan=plan, **options)

    for module in ("runtime.models.llama", "runtime.models.heads.mtp"):
        monkeypatch.setattr(f"{module}.run_rows", note)
    return rows


# -- the cut ---------------------------------------------------------------------------------------


def make_ragged(num_requests: int) -> ForwardBatch:
    table = make_table()
    rows = [table.acquire_row() for _ in range(num_requests)]
    chunks = [random_ids(2, seed=i) for i in range(num_requests)]
    batch = make_batch(table, rows, chunks, [3 * i for i in range(num_requests)])
    return replace(batch, mode=BatchMode.VERIFY)


@pytest.mark.parametrize("num_requests", [2, 3, 4, 7])
def test_halves_are_the_requests_of_a_batch_once_each(num_requests: int) -> None:
    batch = make_ragged(num_requests)
    cut = cut_in_halves(batch)
    assert cut.halves is not None
    first, second = cut.halves
    assert len(first.q_lens) - len(second.q_lens) == num_requests % 2
    for name in ("input_ids_N", "positions_N", "write_slots_N"):
        joined = torch.cat([getattr(first, name), getattr(second, name)])
        assert torch.equal(joined, getattr(batch, name))
    for name in ("q_lens", "kv_lens", "table_rows"):
        assert getattr(first, name) + getattr(second, name) == getattr(batch, name)
    assert {first.mode, second.mode} == {BatchMode.VERIFY}
    assert replace(cut, input_ids_N=batch.positions_N).halves is cut.halves


def test_one_request_is_not_cut() -> None:
    batch = make_ragged(1)
    assert cut_in_halves(batch) is batch


# -- equality --------------------------------------------------------------------------------------


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("width", [1, 2])
def test_halves_give_the_drafts_and_tokens_of_whole_batches(
    case: Case, width: int, expert_parallel: bool, seen: list[int]
) -> None:
    if expert_parallel and case.whole.config.experts is None:
        pytest.skip("no experts")
    requests = make_requests(5, temperature=0.9, ignore_eos=True, max_tokens=12)
    options: dict[str, Any] = {"draft": True, "num_draft_tokens": 1, "max_running": 3}

    def live(group: ThreadGroup) -> Any:
        target = load_target(
            case.path,
            dtype=torch.float32,
            device=CPU,
            group=group,
            expert_parallel=expert_parallel,
        )
        engine = make_engine(case, target, micro_batch_halves=True, **options)
        if not group.is_leader:
            return engine.follow()
        generations = engine.generate(requests)
        engine.dismiss()
        return generations

    got = run_ranks(width, live)[0]
    assert set(seen) == {2, 4}, "two or three requests of two rows: one or two in the first half"
    seen.clear()
    assert got == make_engine(case, case.whole, **options).generate(requests)
    assert not seen, "nothing is cut unless it is asked for"
    assert any(step.num_accepted for one in got for step in one.steps)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_the_draft_state_behind_halves_is_that_of_a_recompute(
    case: Case, num_drafts: int, seen: list[int]
) -> None:
    requests = make_requests(4, temperature=0.9, ignore_eos=True, max_tokens=10)
    options: dict[str, Any] = {"draft": True, "num_draft_tokens": num_drafts}
    checked: list[int] = []
    engine = make_engine(case, case.whole, micro_batch_halves=True, **options)
    got = run_stepwise(
        engine, requests, late=True, after_step=lambda e: checked.append(check_draft_state(e))
    )
    assert got == run_stepwise(make_engine(case, case.whole, draft=False), requests)
    assert sum(checked) > 10
    assert len(seen) > 4


def test_a_head_that_reads_residual_streams_gets_those_of_both_halves(
    tmp_path: Path, seen: list[int]
) -> None:
    case = make_family(tmp_path, "llama", **EAGLE3)
    requests = make_requests(4, temperature=0.9, ignore_eos=True, max_tokens=10)
    got, wanted = (
        make_engine(case, case.whole, draft=True, micro_batch_halves=is_cut).generate(requests)
        for is_cut in (True, False)
    )
    assert got == wanted
    assert seen


# -- the order of events ---------------------------------------------------------------------------


class AsyncGroup(ThreadGroup):
    """Sums that are made when they are waited for: until then there is NaN in their place."""

    def __init__(self, group: ThreadGroup, events: list[tuple[str, str, int]]) -> None:
        super().__init__(group.rank, group.world_size, group._exchange)
        self.events = events
        self.running: list[LateSum] = []

    def start_all_reduce(self, tensor: torch.Tensor) -> PendingSum:
        self.events.append(("start", "", len(tensor)))
        pending = LateSum(self, tensor, tensor.clone())
        tensor.fill_(torch.nan)
        self.running.append(pending)
        return pending


@dataclass(frozen=True, eq=False)
class LateSum(PendingSum):
    group: AsyncGroup
    tensor: torch.Tensor
    sent: torch.Tensor

    def wait(self) -> torch.Tensor:
        assert self.group.running.pop(0) is self, "sums are waited for as they were started"
        self.group.events.append(("wait", "", len(self.tensor)))
        return self.tensor.copy_(self.group.all_reduce(self.sent))


@dataclass
class Recorded:
    """A part of a block that says when it is computed, and over how many rows."""

    part: Any
    name: str
    events: list[tuple[str, str, int]]

    def own_part(self, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.events.append(("compute", self.name, len(x)))
        return self.part.own_part(x, *arguments, **options)


def record(model: Model, events: list[tuple[str, str, int]]) -> None:
    for block in model.blocks:  # type: ignore[attr-defined]
        block.attention = Recorded(block.attention, "attention", events)
        block.mlp = Recorded(block.mlp, "mlp", events)


def verify_once(case: Case, group: ThreadGroup) -> tuple[list[tuple[str, str, int]], torch.Tensor]:
    """Three requests of two rows each, through target and head, on a group that works late."""
    events: list[tuple[str, str, int]] = []
    late = AsyncGroup(group, events)
    options = {"expert_parallel": case.whole.config.experts is not None}
    target = load_target(case.path, dtype=torch.float32, device=CPU, group=late, **options).model
    head = build_head(case.spec, case.tensors, target)
    table = make_table()
    rows = [table.acquire_row() for _ in range(3)]
    batch = make_batch(
        table, rows, [random_ids(2, seed=i, vocab_size=VOCAB) for i in rows], [0] * 3
    )
    for model in (target, head):
        record(model, events)
    cut = cut_in_halves(replace(batch, mode=BatchMode.VERIFY))
    hidden_ND = target.forward(cut, table, target.new_pool(4096))
    events.append(("head", "", 0))
    drafted_ND = head.forward(replace(cut, hidden_ND=hidden_ND), table, head.new_pool(4096))
    assert not late.running, "a sum was never waited for"
    return events, torch.cat([hidden_ND, drafted_ND])


def expected_events(num_layers: int) -> list[tuple[str, str, int]]:
    """Half A has four rows, half B two."""
    events: list[tuple[str, str, int]] = []
    for layer in range(num_layers):
        for part in ("attention", "mlp"):
            for rows in (4, 2):
                if layer or part == "mlp":
                    events.append(("wait", "", rows))
                events += [("compute", part, rows), ("start", "", rows)]
    return [*events, ("wait", "", 4), ("wait", "", 2)]


@pytest.mark.parametrize("width", [1, 2])
def test_a_sum_is_started_before_the_other_half_is_computed_and_waited_for_after(
    case: Case, width: int
) -> None:
    for events, rows_ND in run_ranks(width, lambda group: verify_once(case, group)):
        assert rows_ND.isfinite().all(), "somebody read a sum before it was there"
        num_layers = case.whole.config.num_layers
        assert events == [*expected_events(num_layers), ("head", "", 0), *expected_events(1)]
        for index, event in enumerate(events):
            if event == ("start", "", 4):
                wait = events.index(("wait", "", 4), index)
                assert [n for kind, _, n in events[index:wait] if kind == "compute"] == [2]


def test_a_sum_that_is_not_waited_for_is_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: Any) -> torch.Tensor | None:
        pending, self._pending = self._pending, None
        return None if pending is None else pending.tensor

    monkeypatch.setattr(halves._Half, "finish", hasty)
    with pytest.raises(AssertionError, match="never waited for"):
        run_ranks(1, lambda group: verify_once(case, group))


# -- what halves do not go with --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "fixed_tree"}, "runtime.schedule=fixed_tree"),
        ({"cuda_graphs": True}, "runtime.cuda_graphs=true"),
    ],
)
def test_trees_and_graphs_are_not_cut(settings: dict[str, Any], message: str) -> None:
    assert not EngineConfig().micro_batch_halves
    with pytest.raises(ValueError, match=rf"micro_batch_halves=true with {message}"):
        EngineConfig(micro_batch_halves=True, **settings)


def test_a_whole_model_that_drafts_and_a_backend_with_one_plan_are_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = case.whole.model
    options: dict[str, Any] = {"num_draft_tokens": 1, "micro_batch_halves": True}
    with caplog.at_level(logging.WARNING):
        make_engine(case, case.whole, draft=True, **options)
    assert "no communication to hide" in caplog.text
    with pytest.raises(ValueError, match=r"micro_batch_halves=true with a whole model"):
        Engine(model, config=EngineConfig(**options), draft=model)
    monkeypatch.setattr(type(model.backend), "plans_at_once", False)
    with pytest.raises(ValueError, match=r"it plans for one batch at a time; .*attention=sdpa"):
        make_engine(case, case.whole, draft=True, **options)
