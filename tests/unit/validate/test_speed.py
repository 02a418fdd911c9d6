"""P5's arithmetic and its forced drafts; nothing here depends on how fast the machine is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp_train.validate import p5
from mtp_train.validate.forced_draft import ForcedDraft
from mtp_train.validate.measure import make_requests
from mtp_train.validate.p5 import Cell, CellRuns
from mtp_train.validate.report import fastest_k
from mtp_train.validate.speed import CostModel, SpeedBench, Timing, fit_cost_model, time_run
from mtp_train.validate.subject import Subject
from tests.unit.validate.subjects import make_prompts, make_reduced_subject, make_subject


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("subject"))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("k", [1, 3])
def test_forced_drafts_are_always_right_or_always_wrong(
    subject: Subject, k: int, batch_size: int
) -> None:
    group = make_requests(make_prompts()[:batch_size], max_tokens=13, ignore_eos=True)
    bench = SpeedBench(subject, [group])
    answers = bench.plain_answers(group)
    right, wrong = (
        bench.run_forced(group, k, answers, is_right=flag, repeats=2) for flag in (True, False)
    )
    assert [timing.num_steps for timing in right] == [12 // (k + 1)] * 2
    assert [timing.num_steps for timing in wrong] == [12, 12]
    assert {timing.num_tokens for timing in right + wrong} == {12 * batch_size}


@pytest.mark.parametrize("depth", [1, 2])
def test_no_node_of_a_forced_tree_is_right(subject: Subject, depth: int) -> None:
    config = replace(subject.engine_config, schedule="fixed_tree", tree_nodes=4)
    group = make_requests(make_prompts()[:2], max_tokens=13, ignore_eos=True)
    answers = SpeedBench(subject, [group]).plain_answers(group)
    bench = SpeedBench(replace(subject, engine_config=config), [group])
    right, wrong = (
        bench.run_forced(group, depth, answers, is_right=flag, repeats=1)[0]
        for flag in (True, False)
    )
    assert wrong.num_steps == 12
    assert right.num_steps == 12 // (depth + 1)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_forced_drafts_of_a_reduced_vocabulary_are_right_where_they_can_be(
    tmp_path: Path, batch_size: int
) -> None:
    """Costs are those of its few columns; a token outside of the list cannot be drafted."""
    subject = make_reduced_subject(tmp_path, (1, 3, 4, 8, 10))
    group = make_requests(make_prompts()[:batch_size], max_tokens=13, ignore_eos=True)
    bench = SpeedBench(subject, [group])
    answers = bench.plain_answers(group)
    for is_right in (True, False):
        draft = ForcedDraft(subject.head(torch.float32), answers, is_right=is_right)
        engine = draft.engine = bench.engine(2, draft=draft)
        results = engine.generate(group)
        assert [[*g.prompt_ids, *g.output_ids] for g in results] == [
            answers[g.request_id] for g in results
        ]
        for generation in results:
            for step in generation.steps:
                wanted = generation.output_ids[step.start]
                assert (step.num_accepted > 0) == (is_right and wanted in (1, 3, 4, 8, 10))


def test_timing_counts_steps_tokens_and_gaps(subject: Subject) -> None:
    group = make_requests(make_prompts()[:2], max_tokens=9, ignore_eos=True)
    engine = SpeedBench(subject, [group]).engine(0)
    timing, outputs = time_run(engine, group)
    assert {len(ids) for ids in outputs.values()} == {9}
    assert timing.num_steps == 8
    assert timing.num_tokens == 16
    assert len(timing.gaps_s) == 16
    assert all(gap > 0 for gap in timing.gaps_s)
    assert timing.decode_s > 0
    assert timing.first_token_s > 0
    generated = engine.generate(group)
    assert [list(g.output_ids) for g in generated] == list(outputs.values())


def test_cost_model_recovers_c_and_v() -> None:
    model = fit_cost_model({1: 1 + 0.2 + 0.1, 3: 1 + 3 * 0.2 + 0.1})
    assert model.c == pytest.approx(0.2)
    assert model.v == pytest.approx(0.1)
    assert model.speedup(1.7, 3) == pytest.approx(1.7 / 1.7)


def runs(plain_s: list[float], spec_s: list[float], *, steps: int, cost: CostModel) -> CellRuns:
    def timing(seconds: float, num_steps: int) -> list[Timing]:
        # Three repeats around the value: the median is the value.
        return [Timing(s, num_steps, 60, 0.1, (0.01, 0.02)) for s in (seconds, 9 * seconds, 0.0)]

    return CellRuns(
        Cell(1, len(plain_s), 3),
        {0: [timing(s, 60) for s in plain_s], 2: [timing(s, steps) for s in spec_s]},
        cost,
        {},
    )


def test_speedup_pools_medians_over_prompts_and_is_compared_with_the_model() -> None:
    cost = CostModel(c=0.25, v=0.1)
    measured = runs([1.0, 2.0, 1.0, 2.0], [0.8, 1.0, 0.8, 1.0], steps=30, cost=cost)
    row, entry = p5.compare_speed(measured, 2, "set")
    assert row.speedup == pytest.approx(6.0 / 3.6)
    assert 1.25 <= row.low <= row.speedup <= row.high <= 2.0
    assert row.low < row.high
    assert entry["emitted_per_step"] == pytest.approx(2.0)
    assert entry["predicted_speedup"] == pytest.approx(2.0 / 1.6)
    assert entry["model_error"] == pytest.approx((2.0 / 1.6) / (6.0 / 3.6) - 1)
    content = row.to_dict()
    assert content["predicted"] == entry["predicted_speedup"]
    assert content["model_error"] == entry["model_error"]
    assert (content["c"], content["v"]) == (0.25, 0.1)
    names = ("tokens_per_s", "inter_token_p50_ms", "inter_token_p99_ms", "first_token_ms")
    assert [content[name] for name in names] == [entry[name] for name in names]
    assert set(content["plain"]) == set(names)
    assert content["plain"]["tokens_per_s"] == pytest.approx(12 * 60 / 60.0)
    assert content["tokens_per_s"] == pytest.approx(12 * 60 / 36.0)


def test_a_cell_has_the_shape_it_says() -> None:
    prompts = make_prompts()
    groups = p5.make_groups(prompts, Cell(4, 3, 1), max_tokens=5)
    assert [len(group) for group in groups] == [4, 4, 4]
    assert len({request.request_id for group in groups for request in group}) == 12
    groups = p5.make_groups(prompts, Cell(2, 2, 1, context_len=50), max_tokens=5)
    assert {len(r.prompt_ids) for group in groups for r in group} == {50}


def test_kv_bytes_per_token_are_those_of_the_shapes(subject: Subject) -> None:
    config = subject.target(torch.float32).config
    per_layer = 2 * config.num_kv_heads * config.head_dim * 4
    assert p5._bytes_per_token(subject, draft=False) == config.num_layers * per_layer
    assert p5._bytes_per_token(subject, draft=True) == per_layer


def test_p5_measures_every_cell(tmp_path: Path) -> None:
    subject = make_subject(tmp_path)
    result, speeds = p5.check(
        subject,
        make_prompts(),
        draft_lengths=(1, 2),
        prompt_set="random",
        max_tokens=8,
        cells=(Cell(1, 4, 1), Cell(2, 1, 1, context_len=24)),
    )
    assert [(row.prompt_set, row.batch_size, row.k) for row in speeds] == [
        ("random", 1, 1),
        ("random", 1, 2),
        ("random/context24", 2, 1),
        ("random/context24", 2, 2),
    ]
    assert [row.context_len for row in speeds] == [0, 0, 24, 24]
    assert [(row.groups, row.repeats) for row in speeds] == [(4, 1), (4, 1), (1, 1), (1, 1)]
    assert {"batch1_plain", "batch1_k2", "model_error_k1"} <= set(result.figures)
    assert result.passed == all(
        abs(result.figures[name]) <= bound for name, bound in result.bounds.items()
    )


@pytest.mark.parametrize("v", [-0.02, -0.2])
def test_p5_says_when_its_cost_model_is_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, v: float
) -> None:
    monkeypatch.setattr(p5, "fit_cost_model", lambda ratios: CostModel(c=0.2, v=v))
    result, _ = p5.check(
        make_subject(tmp_path),
        make_prompts(),
        draft_lengths=(1,),
        prompt_set="random",
        max_tokens=8,
        cells=(Cell(1, 2, 1),),
    )
    assert ("at batch1 verification came out faster" in result.note) == (v < -0.1)


def test_the_fastest_k_is_that_of_the_smallest_batch() -> None:
    def row(batch_size: int, k: int, speedup: float) -> dict[str, float]:
        return {"batch_size": batch_size, "k": k, "speedup": speedup}

    rows = [row(4, 3, 2.0), row(1, 1, 1.2), row(1, 3, 0.9), row(1, 2, 1.1)]
    assert fastest_k({"speed": rows}) == 1
    assert fastest_k({}) is None
