"""How many tokens are drafted: the length whose measured steps emit most per second."""

from __future__ import annotations

import logging
import random
from collections import Counter
from typing import Any

import pytest
import torch

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.loader import Target
from runtime.spec import choose
from runtime.spec.choose import Choice, LengthChooser, Load, paid_rows, row_tile
from tests.unit.runtime.engine_fixtures import (
    StubDraft,
    check_draft_state,
    make_engine,
    make_requests,
    random_head,
    run_stepwise,
    tiny_target,
)
from tests.unit.runtime.test_spec import LookAheadTransfer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


class World:
    """Steps with known costs and acceptance; the chooser decides which are made."""

    def __init__(
        self, *, tile: int, rates: tuple[float, ...], draft_s: float = 0.0005, seed: int = 0
    ) -> None:
        self.chooser = LengthChooser(longest=len(rates), tile=tile)
        self.tile, self.rates, self.draft_s = tile, rates, draft_s
        self.random = random.Random(seed)
        self.made: Counter[int] = Counter()

    def seconds(self, k: int, load: Load) -> float:
        """A GPU at the edge: 10 ms per block of rows, ``draft_s`` per drafted token."""
        rows = paid_rows(load.num_requests * (k + 1), self.tile)
        return 0.01 * rows / 64 + self.draft_s * k

    def run(self, load: Load, *, steps: int) -> int:
        """Returns the length that the last choice was."""
        self.made.clear()
        for _ in range(steps):
            k = self.chooser.choose(load)
            accepted = []
            for _ in range(load.num_requests if k else 0):
                count = 0
                while count < k and self.random.random() < self.rates[count]:
                    count += 1
                accepted.append(count)
            self.chooser.observe(k, load, seconds=self.seconds(k, load), accepted=accepted)
            self.made[k] += 1
        return max(self.made, key=lambda k: self.made[k])


def test_rows_are_paid_by_the_tile() -> None:
    assert [paid_rows(n, 64) for n in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 192]
    assert [paid_rows(n, 1) for n in (0, 1, 2, 3, 5, 64, 65)] == [0, 1, 2, 4, 8, 64, 128]
    assert row_tile(torch.device("cpu")) == 1
    assert row_tile(torch.device("cuda")) == 64


def test_one_token_while_doubling_the_rows_is_free_and_none_when_it_is_not() -> None:
    """32 requests: 64 rows with K = 1 cost what 32 cost, 128 with K = 3 twice that. 64 requests
    pay a second block for one token."""
    world = World(tile=64, rates=(0.7, 0.5, 0.4))
    assert world.run(Load(32, 4096), steps=200) == 1
    assert world.run(Load(64, 8192), steps=200) == 0
    assert world.run(Load(8, 1024), steps=200) == 3  # 32 rows are padded to 64 either way


def test_a_poor_draft_is_given_up_and_found_again() -> None:
    world = World(tile=64, rates=(0.02, 0.02, 0.02), draft_s=0.002)
    assert world.run(Load(8, 1024), steps=200) == 0
    assert world.chooser.choices[-1].k == 0
    world.rates = (0.95, 0.95, 0.95)
    world.run(Load(8, 1024), steps=20_000)
    assert world.chooser.choices[-1].k == 3, "it is looked at again now and then"
    assert world.made[3] > 10_000


def test_what_was_measured_of_equally_many_paid_rows_is_not_measured_again() -> None:
    world = World(tile=64, rates=(0.7, 0.5, 0.4))
    world.run(Load(20, 4096), steps=60)
    # K = 0 and 1: one block as before; K = 3: two, as before.
    assert world.chooser._trial(Load(30, 4100)) is None
    assert world.chooser._trial(Load(40, 4100)) == 3


def test_context_is_told_apart_by_octaves() -> None:
    world = World(tile=64, rates=(0.7,))
    world.run(Load(8, 1100), steps=30)
    assert world.chooser._trial(Load(8, 1900)) is None
    assert world.chooser._trial(Load(8, 2100)) == 1


def test_the_first_step_of_a_kind_warms_up_and_is_not_counted() -> None:
    chooser = LengthChooser(longest=1, tile=64)
    load = Load(1, 10)
    for k in (1, 0):
        for step in range(3):
            assert chooser.choose(load) == k
            seconds = 100.0 if step == 0 else 0.01 * (1 + 0.1 * k)
            chooser.observe(k, load, seconds=seconds, accepted=[1] * k)
    assert chooser.choose(load) == 1


def test_expected_tokens_follow_the_acceptance_by_position() -> None:
    chooser = LengthChooser(longest=2, tile=1)
    for _ in range(600):
        chooser.observe(2, Load(4, 100), seconds=1.0, accepted=[2, 1, 0, 0])
    assert chooser.emitted(0) == 1
    assert chooser.emitted(1) == pytest.approx(1.5, abs=0.01)
    assert chooser.emitted(2) == pytest.approx(1.75, abs=0.02)


def test_asking_changes_nothing_and_clipped_steps_are_left_out() -> None:
    chooser = LengthChooser(longest=3, tile=1)
    load = Load(2, 100)
    assert chooser.choose(load) == chooser.choose(load)
    before = chooser.emitted(3)
    for _ in range(10):
        chooser.observe(2, load, seconds=0.1, accepted=[0, 0])
    assert chooser.emitted(3) == before
    assert chooser._costs == {}


def test_changes_are_logged_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    world = World(tile=64, rates=(0.7, 0.5, 0.4))
    with caplog.at_level(logging.INFO, logger=choose.__name__):
        world.run(Load(32, 4096), steps=100)
    (line,) = [record.message for record in caplog.records]
    assert "K = 1 from now on: batch 32, context 4096 tokens" in line
    assert "K=1" in line
    assert "64 rows paid as 64" in line
    assert "128 rows paid as 128" in line
    assert world.chooser.choices[-1] == Choice(1, line.split("now on: ")[1])


# -- in the engine ---------------------------------------------------------------------------------


class Dice(LengthChooser):
    """Any length at any step: whatever is chosen, nothing may depend on it."""

    def __init__(self, longest: int, seed: int) -> None:
        super().__init__(longest=longest, tile=1)
        self.random = random.Random(seed)
        self.chosen: list[int] = []

    def choose(self, load: Load) -> int:
        self.chosen.append(self.random.choice(self.candidates))
        return self.chosen[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("settings", [{}, {"page_size": 1, "num_pages": 512}, {"num_pages": 12}])
def test_output_and_draft_state_do_not_depend_on_the_choice(
    target: Target, settings: dict[str, Any], temperature: float, is_async: bool
) -> None:
    requests = make_requests(6, temperature=temperature, max_tokens=30)
    want = {g.request_id: list(g.output_ids) for g in make_engine(target).generate(requests)}
    for seed in range(2):
        transfer = LookAheadTransfer() if is_async else None
        engine = make_engine(
            target, random_head(target), num_draft_tokens=3, transfer=transfer, **settings
        )
        dice = engine.scheduler.chooser = Dice(3, seed)

        def check(engine: Engine) -> None:
            if engine._in_flight is None:  # else the device is a step ahead of the host
                check_draft_state(engine)

        assert run_stepwise(engine, requests, late=True, after_step=check) == want
        assert {0, 1, 3} <= set(dice.chosen)


@pytest.mark.parametrize(("is_right", "wanted"), [(True, 3), (False, 0)])
def test_the_engine_measures_its_steps_and_learns(
    target: Target, is_right: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is made up: a step costs 1 and a drafted token 0.2."""
    requests = make_requests(4, max_tokens=60, ignore_eos=True)
    plain = make_engine(target, max_model_len=128).generate(requests)
    answers = {g.request_id: [*g.prompt_ids, *g.output_ids] for g in plain}
    stub = StubDraft(target, answers, lambda position: is_right)
    engine = make_engine(
        target, stub, num_draft_tokens=3, draft_length="measured", max_model_len=128
    )
    stub.engine = engine
    chooser = engine.scheduler.chooser
    assert chooser is not None
    observe, made = chooser.observe, []

    def timed(k: int, load: Load, *, seconds: float, accepted: Any) -> None:
        assert seconds > 0
        made.append(k)
        observe(k, load, seconds=1 + 0.2 * k, accepted=accepted)

    monkeypatch.setattr(chooser, "observe", timed)
    got = engine.generate(requests)
    assert [g.output_ids for g in got] == [g.output_ids for g in plain]
    assert {0, 1, 3} <= set(made)
    counts = Counter(made)
    assert counts.most_common(1)[0][0] == wanted
    assert chooser.emitted(3) > 3 if is_right else chooser.emitted(3) < 1.3


def test_a_pinned_length_is_kept(target: Target) -> None:
    assert EngineConfig().draft_length == "pinned"
    engine = make_engine(target, random_head(target), num_draft_tokens=2)
    assert engine.scheduler.chooser is None
    generations = engine.generate(make_requests(3, ignore_eos=True))
    assert {len(step.draft_ids) for g in generations for step in g.steps} == {2}
    assert make_engine(target, draft_length="measured").scheduler.chooser is None
