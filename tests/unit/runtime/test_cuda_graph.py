"""Graphs of forwards and of the draft loop, recorded operator by operator on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.cuda_graph import DraftLoopGraphs, ForwardGraphs, GraphSizes
from runtime.engine import Engine
from runtime.models.loader import Target, load_target
from runtime.no_wait import no_wait
from runtime.request import Request, SamplingParams
from runtime.scheduler import StepPlan
from runtime.spec.base import PendingStep
from tests.unit.runtime.engine_fixtures import (
    MEDUSA,
    VOCAB,
    check_draft_state,
    make_engine,
    make_requests,
    random_head,
    run_stepwise,
    tiny_target,
)
from tests.unit.runtime.flashinfer_cases import make_backend
from tests.unit.runtime.flashinfer_signatures import recorded_versions
from tests.unit.runtime.model_fixtures import save_model
from tests.unit.runtime.operator_recorder import OperatorRecorder

NEWEST = recorded_versions()[-1]


@pytest.fixture(scope="module")
def plain_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return flashinfer_target(tmp_path)


def flashinfer_target(path: Path, *, family: str = "llama", **settings: Any) -> Target:
    """The same weights; without fused kernels, which are no operators and would not be noted."""
    save_model(path, family, vocab_size=VOCAB)
    return load_target(
        path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=make_backend(NEWEST, **settings),
        use_kernels=False,
    )


def engine_with_graphs(
    target: Target, *, k: int, **overrides: Any
) -> tuple[Engine, OperatorRecorder]:
    recorder = OperatorRecorder()
    draft = random_head(target) if k else None
    engine = make_engine(
        target, draft, num_draft_tokens=k, cuda_graphs=True, recorder=recorder, **overrides
    )
    return engine, recorder


def one_after_the_other(count: int) -> list[Request]:
    """The first ends first: those behind it move up in the batch, and dummies fill its end."""
    return [
        Request(f"r{n}", (1, 2 + n, 3), SamplingParams(max_tokens=6 + 8 * n, ignore_eos=True))
        for n in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_graphs_change_no_token(
    plain_target: Target, target: Target, k: int, temperature: float
) -> None:
    draft = random_head(plain_target) if k else None
    plain = make_engine(plain_target, draft, num_draft_tokens=k)
    wanted = run_stepwise(plain, make_requests(temperature=temperature), late=True)
    engine, recorder = engine_with_graphs(target, k=k)
    after = check_draft_state if k else None
    got = run_stepwise(engine, make_requests(temperature=temperature), late=True, after_step=after)
    assert got == wanted
    assert recorder.num_replays > 2 * recorder.num_recorded > 0


@pytest.mark.parametrize("k", [1, 3])
def test_graphs_of_a_head_without_a_cache_change_no_token(
    plain_target: Target, target: Target, k: int
) -> None:
    plain = make_engine(plain_target, random_head(plain_target, **MEDUSA), num_draft_tokens=k)
    wanted = run_stepwise(plain, make_requests(), late=True)
    recorder = OperatorRecorder()
    draft = random_head(target, **MEDUSA)
    engine = make_engine(target, draft, num_draft_tokens=k, cuda_graphs=True, recorder=recorder)
    assert run_stepwise(engine, make_requests(), late=True, after_step=check_draft_state) == wanted
    assert recorder.num_replays > 2 * recorder.num_recorded > 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_graphs_of_layers_with_biases_and_head_norms_change_no_token(
    family: str, tmp_path: Path
) -> None:
    plain_target = tiny_target(tmp_path / "plain", family=family)
    target = flashinfer_target(tmp_path / "model", family=family)
    wanted = run_stepwise(
        make_engine(plain_target, random_head(plain_target), num_draft_tokens=3), make_requests()
    )
    engine, recorder = engine_with_graphs(target, k=3)
    enqueue = engine.schedule.enqueue

    def guarded(plan: StepPlan) -> PendingStep:
        with no_wait():
            return enqueue(plan)

    engine.schedule.enqueue = guarded  # type: ignore[method-assign]
    assert run_stepwise(engine, make_requests(), after_step=check_draft_state) == wanted
    assert recorder.num_replays > recorder.num_recorded > 0


@pytest.mark.parametrize("k", [0, 3])
def test_a_step_with_graphs_never_waits(target: Target, k: int) -> None:
    engine, recorder = engine_with_graphs(target, k=k)
    enqueue = engine.schedule.enqueue

    def guarded(plan: StepPlan) -> PendingStep:
        with no_wait():
            return enqueue(plan)

    engine.schedule.enqueue = guarded  # type: ignore[method-assign]
    engine.generate(make_requests(temperature=0.8))
    assert recorder.num_replays > recorder.num_recorded


def test_the_recorded_loop_drafts_what_the_loop_drafts(
    plain_target: Target, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    for model in (plain_target, target):
        recorder = OperatorRecorder() if model is target else None
        engine = make_engine(
            model,
            random_head(model),
            num_draft_tokens=3,
            cuda_graphs=recorder is not None,
            recorder=recorder,
        )
        steps.append([generation.steps for generation in engine.generate(make_requests())])
    assert steps[0] == steps[1]


def test_graphs_with_the_kernel_that_has_no_plan(plain_target: Target, tmp_path: Path) -> None:
    wanted = run_stepwise(make_engine(plain_target), make_requests())
    target = flashinfer_target(tmp_path, use_xqa=True)
    engine, recorder = engine_with_graphs(target, k=2)
    got = run_stepwise(engine, make_requests(), after_step=check_draft_state)
    assert got == wanted
    assert recorder.num_replays > 0


def test_a_reduced_draft_vocabulary_is_mapped_within_the_loop(tmp_path: Path) -> None:
    target = flashinfer_target(tmp_path)
    engine, _ = engine_with_graphs(target, k=2)
    ids = torch.tensor([0, 3, 4, 9])
    head = engine.schedule.head
    head.draft_vocab_ids = ids
    loop = engine.schedule.draft.draft_loop
    assert loop._token_ids(torch.arange(4)[:, None]).tolist() == ids.tolist()


def test_captured_states_survive_the_next_replay(plain_target: Target, target: Target) -> None:
    """Plain decoding looks one step ahead: the next replay runs before the states are read."""

    class Ahead:
        is_async = True

        def enqueue(self, *tensors: torch.Tensor) -> Any:
            return [tensor.clone() for tensor in tensors]

        def wait(self, handle: Any) -> Any:
            return tuple(tensor.tolist() for tensor in handle)

        def mark(self, name: str) -> None:
            pass

    hidden: list[dict[str, torch.Tensor]] = []
    for model in (plain_target, target):
        found: dict[str, torch.Tensor] = {}
        hidden.append(found)
        has_graphs = model is target
        engine = make_engine(
            model,
            transfer=Ahead(),
            cuda_graphs=has_graphs,
            recorder=OperatorRecorder() if has_graphs else None,
        )
        engine.generate(
            make_requests(),
            hidden_sink=lambda rows, found=found: found.update({rows.key: rows.hidden_TD}),
        )
    assert hidden[0].keys() == hidden[1].keys()
    for key, rows in hidden[0].items():
        assert torch.allclose(hidden[1][key], rows, atol=1e-5)


def test_batches_are_filled_up_to_the_next_size(target: Target) -> None:
    engine, recorder = engine_with_graphs(target, k=0, max_running=6, num_pages=64)
    graphs = engine.schedule.target.graphs
    engine.generate(one_after_the_other(6))
    assert sorted(size for size, _ in graphs._forwards) == [1, 2, 4, 6]
    assert recorder.num_recorded == 4


def test_sizes() -> None:
    assert GraphSizes.up_to(6, dummy_page=9).sizes == (1, 2, 4, 6)
    assert GraphSizes.up_to(8, dummy_page=9).sizes == (1, 2, 4, 8)
    assert GraphSizes.up_to(1, dummy_page=9).sizes == (1,)
    assert GraphSizes.up_to(6, dummy_page=9).fitting(5) == 6
    assert GraphSizes.up_to(6, dummy_page=9).fitting(7) is None


def test_near_the_length_limit_k_is_clipped_and_the_loop_runs_unrecorded(
    plain_target: Target, target: Target
) -> None:
    requests = [Request("r", tuple(range(1, 9)), SamplingParams(max_tokens=64, ignore_eos=True))]
    limits = {"max_model_len": 24, "num_pages": 8}
    wanted = run_stepwise(make_engine(plain_target, **limits), requests)
    engine, _ = engine_with_graphs(target, k=3, **limits)
    assert run_stepwise(engine, requests, after_step=check_draft_state) == wanted
    assert len(wanted["r"]) == 16


def test_another_attention_runs_without_graphs_and_says_so(
    plain_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    engine, recorder = engine_with_graphs(plain_target, k=0)
    run_stepwise(engine, make_requests(2))
    assert recorder.num_recorded == 0
    assert "only FlashInfer's attention is recorded" in caplog.text
    pool = plain_target.model.new_pool(16)
    with pytest.raises(ValueError, match=r"runtime\.cuda_graphs=true: only FlashInfer"):
        ForwardGraphs(
            plain_target.model,
            table=engine.table,
            pool=pool,
            sizes=GraphSizes.up_to(2, dummy_page=0),
            max_rows=1,
            recorder=recorder,
        )


# -- faults that have to be noticed ----------------------------------------------------------------


def keep_stale_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummy rows write where the requests before them wrote."""
    fill_ = torch.Tensor.fill_

    def changed(self: torch.Tensor, value: Any) -> torch.Tensor:
        return self if self.dtype is torch.int64 else fill_(self, value)

    monkeypatch.setattr(torch.Tensor, "fill_", changed)


def do_not_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "runtime.attention.flashinfer.FlashInferBackend.update", lambda self, plan, layout: None
    )


def plan_steps_of_the_loop_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = DraftLoopGraphs.propose
    make = "runtime.cuda_graph._Layouts.make"

    def changed(self: Any, *args: Any, starts: Any, **kwargs: Any) -> Any:
        real = self._layouts.make
        with monkeypatch.context() as context:
            context.setattr(
                make,
                lambda own, size, **given: real(
                    size, **{**given, "kv_lens": [start + 1 for start in starts]}
                ),
            )
            return propose(self, *args, starts=starts, **kwargs)

    monkeypatch.setattr(DraftLoopGraphs, "propose", changed)


def do_not_copy_the_relay_state(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = DraftLoopGraphs._fill
    seen: set[int] = set()

    def changed(self: Any, inputs: Any, given: Any) -> None:
        if id(inputs) in seen:
            given = type(given)(
                inputs.hidden_SD[: len(given.hidden_SD)],
                inputs.columns_S1[: len(given.columns_S1)],
                given.positions_KS,
                given.slots_KS,
            )
        seen.add(id(inputs))
        fill(self, inputs, given)

    monkeypatch.setattr(DraftLoopGraphs, "_fill", changed)


def hand_out_the_graphs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clone = torch.Tensor.clone

    def changed(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.dim() == 2 and self.shape[-1] > VOCAB else clone(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "clone", changed)


@pytest.mark.parametrize(
    "fault",
    [
        keep_stale_slots,
        do_not_plan_again,
        plan_steps_of_the_loop_alike,
        do_not_copy_the_relay_state,
    ],
)
def test_a_fault_is_noticed(
    plain_target: Target, target: Target, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = one_after_the_other(4)
    draft = random_head(plain_target)
    plain = make_engine(plain_target, draft, num_draft_tokens=3)
    wanted = [(g.output_ids, g.steps) for g in plain.generate(requests)]
    engine, _ = engine_with_graphs(target, k=3)
    fault(monkeypatch)
    got = [(g.output_ids, g.steps) for g in engine.generate(requests)]
    assert got != wanted


def test_results_that_are_not_copied_out_are_noticed(
    plain_target: Target, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_out_the_graphs_memory(monkeypatch)
    with pytest.raises(AssertionError):
        test_captured_states_survive_the_next_replay(plain_target, target)
