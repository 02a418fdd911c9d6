"""Tree speculation in the engine: output equal to plain decoding, state to a recompute, trees to
those of a slow reference, and mutants that must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.head_spec import DraftVocab, hash_vocab_ids
from runtime.kv_cache import KVPool
from runtime.metrics import pool_acceptance
from runtime.models.heads import build_head
from runtime.models.loader import Target
from runtime.no_wait import no_wait
from runtime.request import Phase, Request, SamplingParams
from runtime.scheduler import StepPlan
from runtime.spec import tree
from runtime.spec.base import PendingStep
from runtime.spec.tree import TreeSchedule
from runtime.spec.tree_draft import FixedGrower
from runtime.verify_tree import VerifiedTree
from tests.unit.runtime.engine_fixtures import (
    EOS,
    OTHER_HEADS,
    StubDraft,
    check_draft_state,
    head_spec,
    make_engine,
    make_requests,
    random_head,
    random_head_tensors,
    run_stepwise,
    tiny_target,
)
from tests.unit.runtime.test_spec import FakeAsyncTransfer
from tests.unit.runtime.tree_reference import path_logits, slow_dynamic_tree, slow_fixed_tree

RATES = (0.5, 0.3, 0.2)
SHAPES = {
    "fixed": {"schedule": "fixed_tree", "tree_nodes": 9, "tree_rates": RATES},
    "dynamic": {"schedule": "dynamic_tree", "tree_nodes": 9, "tree_top_k": 3},
    "wide": {
        "schedule": "dynamic_tree",
        "tree_nodes": 4,
        "tree_top_k": 6,
    },  # more head rows than nodes
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


def tree_engine(target: Target, shape: str, *, depth: int = 3, **settings: Any) -> Engine:
    draft = settings.pop("draft", None) or random_head(target, seed=3)
    return make_engine(target, draft, num_draft_tokens=depth, **{**SHAPES[shape], **settings})


def plain_outputs(target: Target, requests: list[Request]) -> dict[str, list[int]]:
    return {g.request_id: list(g.output_ids) for g in make_engine(target).generate(requests)}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_and_state_equal_plain_decoding(
    target: Target, temperature: float, shape: str, page_size: int, late: bool
) -> None:
    sampling = {"temperature": temperature, "top_k": 8, "top_p": 0.95} if temperature else {}
    requests = make_requests(ignore_eos=True, max_tokens=24, **sampling)
    engine = tree_engine(
        target, shape, page_size=page_size, num_pages=1024 // page_size, max_batch_tokens=48
    )
    accepted: set[int] = set()

    def after_step(engine: Engine) -> None:
        check_draft_state(engine)
        for state in engine.scheduler.running:
            accepted.update(step.num_accepted for step in state.steps)

    got = run_stepwise(engine, requests, late=late, after_step=after_step)
    assert got == plain_outputs(target, requests)
    assert accepted >= {0, 1, 2}
    assert engine.table.allocator.num_free == engine.config.num_pages


@pytest.mark.parametrize("shape", ["fixed", "dynamic"])
@pytest.mark.parametrize("changes", OTHER_HEADS.values(), ids=OTHER_HEADS.keys())
def test_trees_of_another_head_are_its_own_and_exact(
    target: Target, changes: dict[str, Any], shape: str
) -> None:
    head = random_head(target, **changes)
    requests = make_requests(ignore_eos=True, max_tokens=24, temperature=0.9)
    engine = tree_engine(target, shape, draft=head)
    got = run_stepwise(engine, requests, after_step=check_draft_state)
    assert got == plain_outputs(target, requests)
    greedy = make_requests(3, ignore_eos=True, max_tokens=10)
    assert check_trees(target, tree_engine(target, shape, draft=head), greedy) > 8


@pytest.mark.parametrize("verify", ["greedy", "rejection"])
def test_every_way_to_verify_accepts_alike(target: Target, verify: str) -> None:
    sampling = {} if verify == "greedy" else {"temperature": 1.1}
    requests = make_requests(3, **sampling)
    keyed = tree_engine(target, "dynamic").generate(requests)
    other = tree_engine(target, "dynamic", verify=verify).generate(requests)
    assert [(g.output_ids, g.steps) for g in other] == [(g.output_ids, g.steps) for g in keyed]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("depth", [1, 4])
def test_no_step_waits_before_the_copy(target: Target, depth: int, shape: str) -> None:
    engine = tree_engine(target, shape, depth=depth)
    enqueue = engine.schedule.enqueue

    def under_guard(plan: StepPlan) -> PendingStep:
        with no_wait():
            return enqueue(plan)

    engine.schedule.enqueue = under_guard  # type: ignore[method-assign]
    got = engine.generate(make_requests(temperature=0.8, top_k=5))
    assert any(g.steps for g in got)


def test_the_host_waits_only_after_the_draft_extension_is_enqueued(target: Target) -> None:
    transfer = FakeAsyncTransfer()
    requests = make_requests(3)
    got = tree_engine(target, "dynamic", transfer=transfer).generate(requests)
    assert {g.request_id: list(g.output_ids) for g in got} == plain_outputs(target, requests)
    steps = "|".join(transfer.events).split("wait")
    speculative = {step.strip("|") for step in steps if "propose" in step}
    assert speculative == {"propose|target|copy|extend"}


# -- the trees themselves --------------------------------------------------------------------------


def check_trees(target: Target, engine: Engine, requests: list[Request]) -> int:
    """Every drafted tree against the slow reference; returns how many were compared."""
    schedule = engine.schedule
    assert isinstance(schedule, TreeSchedule)
    config, compared = engine.config, 0
    states = [engine.add(request) for request in requests]
    while engine.has_work:
        before = {
            state.request.request_id: (list(state.tokens), len(state.steps))
            for state in engine.scheduler.running
            if state.phase is Phase.DECODE
        }
        engine.step()
        for state in states:
            if state.request.request_id not in before:
                continue
            tokens, count = before[state.request.request_id]
            if len(state.steps) == count:  # a mixed batch
                continue
            step = state.steps[-1]
            logits_of = path_logits(engine.target, schedule.head, tokens)
            if config.schedule == "fixed_tree":
                grower = schedule.grower(step.k)
                assert isinstance(grower, FixedGrower)
                want = slow_fixed_tree(grower.shape, logits_of)
            else:
                want = slow_dynamic_tree(
                    config.tree_nodes,
                    depth=step.k,
                    top_k=config.tree_top_k,
                    logits_of=logits_of,
                )
            assert (step.draft_ids, step.tree_parents) == want, state.request.request_id
            compared += 1
    return compared


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_drafted_trees_equal_those_of_single_paths(
    target: Target, shape: str, page_size: int
) -> None:
    engine = tree_engine(target, shape, page_size=page_size, num_pages=1024 // page_size)
    requests = make_requests(3, ignore_eos=True, max_tokens=10)
    assert check_trees(target, engine, requests) > 8


def test_a_single_candidate_drafts_the_chain(target: Target) -> None:
    requests = make_requests(4, ignore_eos=True)
    head = random_head(target)
    chain = make_engine(target, head, num_draft_tokens=3).generate(requests)
    one = {"tree_nodes": 3, "tree_top_k": 1, "tree_rates": (0.5,)}
    for mode in ("fixed", "dynamic"):
        engine = make_engine(target, head, num_draft_tokens=3, schedule=f"{mode}_tree", **one)
        got = engine.generate(requests)
        assert [[(s.draft_ids, s.num_accepted) for s in g.steps] for g in got] == [
            [(s.draft_ids, s.num_accepted) for s in g.steps] for g in chain
        ]


def test_a_draft_vocabulary_limits_the_candidates(target: Target) -> None:
    ids = torch.tensor([1, 3, 4, 6, 7, 9, 10])
    spec = head_spec(target, draft_vocab=DraftVocab(7, 0.9, hash_vocab_ids(ids)))
    tensors = {**random_head_tensors(spec), "draft_vocab_ids": ids}
    head = build_head(spec, tensors, target.model)
    requests = make_requests(3, ignore_eos=True)
    for shape in ("fixed", "dynamic"):
        engine = tree_engine(target, shape, draft=head)
        got = {g.request_id: g for g in engine.generate(requests)}
        assert {n: list(g.output_ids) for n, g in got.items()} == plain_outputs(target, requests)
        drafted = {i for g in got.values() for s in g.steps for i in s.draft_ids}
        assert drafted <= set(ids.tolist())
        assert any(step.num_accepted for g in got.values() for step in g.steps)


# -- stub drafts -----------------------------------------------------------------------------------


class RankedStub(StubDraft):
    """Puts the right token at rank ``behaviour(position)`` of its candidates (99: nowhere)."""

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden_MD), self.vocab_size)
        for index, (position, right) in enumerate(self.right_tokens(hidden_MD)):
            others = [(right + step) % self.vocab_size for step in range(1, self.vocab_size)]
            rank = min(self.behaviour(position), len(others))
            order = [*others[:rank], right, *others[rank:]]
            for place, token in enumerate(order):
                logits[index, token] = -0.01 * place
        return logits


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", ["fixed", "dynamic"])
@pytest.mark.parametrize(
    ("rank", "wanted"),
    [
        (lambda position: 0, {3}),
        (lambda position: 1, {3}),  # no chain would accept any of it
        (lambda position: position % 2, {3}),
        (lambda position: 99, {0}),
        (lambda position: 0 if position % 2 else 99, {0, 1}),
    ],
    ids=["first", "second", "changing", "never", "every_other"],
)
def test_stub_drafts(
    target: Target, rank: Callable[[int], int], wanted: set[int], mode: str, page_size: int
) -> None:
    requests = make_requests(3, ignore_eos=True, max_tokens=31)
    plain = plain_outputs(target, requests)
    answers = {r.request_id: [*r.prompt_ids, *plain[r.request_id]] for r in requests}
    stub = RankedStub(target, answers, rank)
    full = {"tree_nodes": 39, "tree_top_k": 9, "tree_rates": RATES}  # 3 + 9 + 27: all paths of 3
    if mode == "dynamic":
        full["tree_nodes"] = 9 + 2 * 81
    engine = make_engine(
        target,
        stub,
        num_draft_tokens=3,
        schedule=f"{mode}_tree",
        page_size=page_size,
        num_pages=4096 // page_size,
        max_batch_tokens=1024,
        **full,
    )
    stub.engine = engine
    got = engine.generate(requests)
    assert {g.request_id: list(g.output_ids) for g in got} == plain
    inside = [
        step.num_accepted for g in got for step in g.steps if step.start + 4 < len(g.output_ids)
    ]
    assert set(inside) == wanted
    pooled = pool_acceptance(got, 3)
    assert pooled.num_drafts == sum(len(g.steps) for g in got)
    assert engine.table.allocator.num_free == engine.config.num_pages


def test_eos_inside_an_accepted_path_ends_the_request(target: Target) -> None:
    requests = make_requests(8, seed=3, max_tokens=60)
    plain = make_engine(target).generate(requests)
    longer = [replace(r, sampling=SamplingParams(max_tokens=70, ignore_eos=True)) for r in requests]
    answers = {
        g.request_id: [*g.prompt_ids, *g.output_ids] for g in make_engine(target).generate(longer)
    }
    stub = RankedStub(target, answers, lambda position: position % 2)
    engine = tree_engine(
        target, "fixed", draft=stub, depth=4, tree_nodes=30, max_batch_tokens=128, num_pages=96
    )
    stub.engine = engine
    got = engine.generate(requests)
    assert [(g.output_ids, g.finish_reason) for g in got] == [
        (g.output_ids, g.finish_reason) for g in plain
    ]
    inside = [
        g
        for g in got
        if g.output_ids[-1] == EOS
        and g.steps
        and g.steps[-1].start + g.steps[-1].num_accepted + 1 > len(g.output_ids)
    ]
    assert inside, "no EOS fell inside an accepted path"


# -- lengths and pages -----------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_shrink_at_the_length_limit(target: Target, shape: str, page_size: int) -> None:
    prompt = tuple(range(3, 11)) * 3
    long = Request("long", prompt, SamplingParams(max_tokens=500, ignore_eos=True))
    other = Request("other", prompt[:5], SamplingParams(max_tokens=500, ignore_eos=True))
    engine = tree_engine(
        target, shape, max_model_len=40, page_size=page_size, num_pages=192 // page_size
    )
    states = {name: engine.add(r) for name, r in (("long", long), ("other", other))}
    while engine.has_work:
        engine.step()
        check_draft_state(engine)
    plain = make_engine(target, max_model_len=40).generate([long, other])
    assert [states[g.request_id].output_ids for g in plain] == [list(g.output_ids) for g in plain]
    depths = {step.k for state in states.values() for step in state.steps}
    assert depths > {3}, "no tree was clipped"


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", ["fixed", "dynamic"])
def test_preemption_by_recompute_changes_nothing(
    target: Target, shape: str, page_size: int
) -> None:
    requests = make_requests(6, max_tokens=40, ignore_eos=True)
    engine = tree_engine(target, shape, page_size=page_size, num_pages=176 // page_size)

    def after_step(engine: Engine) -> None:
        check_draft_state(engine)

    got = run_stepwise(engine, requests, after_step=after_step)
    assert engine.scheduler.num_preemptions > 0, "pages never ran out"
    assert got == plain_outputs(target, requests)
    assert engine.table.allocator.num_free == engine.config.num_pages


@pytest.mark.parametrize("page_size", [1, 16])
def test_abort_and_a_closed_stream_give_every_page_back(target: Target, page_size: int) -> None:
    requests = make_requests(4, ignore_eos=True)
    plain = plain_outputs(target, requests)
    engine = tree_engine(target, "dynamic", page_size=page_size, num_pages=1024 // page_size)
    states = [engine.add(request) for request in requests]
    for _ in range(4):
        engine.step()
    engine.abort("r1")
    while engine.has_work:
        engine.step()
    assert [states[i].output_ids for i in (0, 2, 3)] == [plain[f"r{i}"] for i in (0, 2, 3)]
    stream = engine.stream(requests)
    for _ in range(8):
        next(stream)
    stream.close()
    assert engine.table.allocator.num_free == engine.config.num_pages
    engine.table.check()


def test_captured_states_are_those_of_the_accepted_path(target: Target) -> None:
    requests = make_requests(3, ignore_eos=True)
    rows: dict[str, torch.Tensor] = {}
    for engine in (tree_engine(target, "dynamic"), make_engine(target)):
        engine.generate(
            requests,
            hidden_sink=lambda r: (
                torch.testing.assert_close(rows[r.key], r.hidden_TD, rtol=1e-4, atol=1e-4)
                if r.key in rows
                else rows.update({r.key: r.hidden_TD})
            ),
        )
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"draft_mode": "sampled", "verify": "rejection"},
            r"draft_mode=sampled with .*=fixed_tree",
        ),
        ({"tree_nodes": 0}, r"tree_nodes=0"),
        ({"tree_top_k": 0}, r"tree_top_k=0"),
        ({"tree_rates": (0.2, 0.5)}, r"tree_rates=\[0.2, 0.5\]"),
        ({"tree_rates": (1.0,)}, r"tree_rates"),
        ({"tree_rates": ()}, r"tree_rates"),
        ({"tree_nodes": 300}, r"max_batch_tokens=1024: .* \(tree_nodes \+ 1\) = 4816 rows"),
        ({"max_model_len": 1600, "num_pages": 100}, r"one request and 15 rows of a tree"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"num_draft_tokens": 3, "schedule": "fixed_tree", **settings})


def test_no_tree_asks_for_no_more_room() -> None:
    for schedule in ("auto", "fixed_tree"):
        assert EngineConfig(schedule=schedule).num_extra_slots == 0
    assert EngineConfig(num_draft_tokens=3).num_extra_slots == 0
    assert EngineConfig(num_draft_tokens=3).num_verify_rows == 4


# -- mutants ---------------------------------------------------------------------------------------


def nothing_is_moved(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVPool, "move", lambda self, from_slots, to_slots: None)


def moved_one_row_too_far(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    move = KVPool.move
    monkeypatch.setattr(KVPool, "move", lambda self, a, b: move(self, a, b.roll(-1)))


def siblings_are_seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tree,
        "visible_rows",
        lambda parents, depth: torch.ones(
            len(parents), parents.shape[1] + 1, parents.shape[1] + 1
        ).tril().bool().contiguous(),
    )  # fmt: skip


def positions_count_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tree,
        "_with_root",
        lambda depths: torch.arange(depths.shape[1] + 1).expand(len(depths), -1),
    )


def states_of_the_first_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is extended with the states of rows 0, 1, 2 … whatever the path."""
    schedule = engine.schedule
    assert isinstance(schedule, TreeSchedule)
    forward, run_draft = schedule.target.forward, schedule.run_draft
    seen: list[torch.Tensor] = []

    class Remembering:
        model, pool, table = schedule.target.model, schedule.target.pool, schedule.target.table

        def forward(self, batch: Any) -> torch.Tensor:
            seen.append(forward(batch))
            return seen[-1]

    def run(batch: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        count = len(batch.q_lens)
        if hidden.shape[0] != seen[-1].shape[0]:
            hidden = seen[-1].view(count, -1, hidden.shape[1])[:, : batch.q_lens[0]].flatten(0, 1)
        return run_draft(batch, ids, hidden)

    schedule.target = Remembering()  # type: ignore[assignment]
    schedule.run_draft = run  # type: ignore[method-assign]


def relay_of_the_last_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **options: Any) -> VerifiedTree:
        verified = verify(*args, **options)
        full = torch.full_like(verified.num_emitted_B, verified.path_BE.shape[1])
        transferred.append(verified.num_emitted_B)
        return replace(verified, num_emitted_B=full)

    verify, transferred = tree.verify_tree, []
    enqueue = engine.transfer.enqueue

    def enqueue_true_counts(*tensors: torch.Tensor) -> Any:
        if transferred and len(tensors) == 4:
            tensors = (tensors[0], transferred.pop(), *tensors[2:])
        return enqueue(*tensors)

    monkeypatch.setattr(tree, "verify_tree", wrong)
    monkeypatch.setattr(engine.transfer, "enqueue", enqueue_true_counts)


@pytest.mark.parametrize(
    "mutate",
    [
        nothing_is_moved,
        moved_one_row_too_far,
        siblings_are_seen,
        positions_count_rows,
        states_of_the_first_rows,
        relay_of_the_last_row,
    ],
    ids=lambda mutate: mutate.__name__,
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_mutants_fail_the_recompute_or_the_output(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[Engine, pytest.MonkeyPatch], None],
    page_size: int,
) -> None:
    requests = make_requests(4, ignore_eos=True)
    want = plain_outputs(target, requests)
    engine = tree_engine(target, "fixed", page_size=page_size, num_pages=1024 // page_size)
    mutate(engine, monkeypatch)

    def judge() -> None:
        got = run_stepwise(engine, requests, after_step=lambda engine: check_draft_state(engine))
        assert got == want, "the output is off by a token"

    with pytest.raises(AssertionError, match="is off by"):
        judge()


def levels_see_their_neighbours(rows: tree.LevelRows) -> tree.LevelRows:
    return replace(rows, visible_BSJ=torch.ones_like(rows.visible_BSJ))


def levels_do_not_see_their_parents(rows: tree.LevelRows) -> tree.LevelRows:
    own = torch.zeros_like(rows.visible_BSJ)
    own[:, :, -rows.ids_BS.shape[1] :] = rows.visible_BSJ[:, :, -rows.ids_BS.shape[1] :]
    return replace(rows, visible_BSJ=own)


def states_of_another_parent(rows: tree.LevelRows) -> tree.LevelRows:
    return replace(rows, hidden_BSD=rows.hidden_BSD.roll(1, 1))


@pytest.mark.parametrize("shape", ["fixed", "dynamic"])
@pytest.mark.parametrize(
    "change",
    [levels_see_their_neighbours, levels_do_not_see_their_parents, states_of_another_parent],
    ids=lambda change: change.__name__,
)
def test_mutants_of_the_draft_fail_against_the_slow_reference(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[tree.LevelRows], tree.LevelRows],
    shape: str,
) -> None:
    """Verification repairs a wrong draft and the extension overwrites it: only the trees tell."""
    engine = tree_engine(target, shape, tree_nodes=20, max_batch_tokens=128)
    grower = engine.schedule.grower(3)  # type: ignore[attr-defined]
    grow = grower.grow
    monkeypatch.setattr(
        grower,
        "grow",
        lambda hidden, logits, run: grow(hidden, logits, lambda d, rows: run(d, change(rows))),
    )
    requests = make_requests(3, ignore_eos=True, max_tokens=10)
    assert tree_engine(target, shape).generate(requests)
    with pytest.raises(AssertionError, match="r"):
        check_trees(target, engine, requests)
