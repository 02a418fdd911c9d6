"""Draft-target speculation on two ranks: the draft on the leader alone; exits 0 when all holds.

Both ranks hold the whole target, so that the follower's cache can be compared with the leader's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from mtp_train.distributed import ProcessGroup, init_process_group
from runtime.engine import Engine
from runtime.kv_cache import KVPool, SlotTable
from runtime.models.layer_drop import keep_layers
from runtime.models.loader import Target
from runtime.scheduler import StepPlan
from runtime.spec.base import PlainSchedule, Runner
from runtime.spec.draft_target import DraftTargetSchedule
from runtime.transfer import ImmediateTransfer
from tests.distributed.ranks import run_ranks
from tests.unit.runtime.engine_fixtures import (
    check_draft_state,
    make_engine,
    make_requests,
    run_stepwise,
    tiny_target,
)

WORLD_SIZE = 2
K = 3
SETTINGS: list[dict[str, Any]] = [
    {},
    {"verify": "rejection", "draft_mode": "sampled"},
]


def exercise(rank: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        target = tiny_target(Path(place))  # once there are ranks, transformers saves on one only
    group = init_process_group(device="cpu", timeout_s=60)
    for settings in SETTINGS:
        for temperature in (0.0, 0.9):
            if group.is_leader:
                lead(group, target, settings, temperature)
            else:
                follow(group, target, settings)
    group.close()


def lead(group: ProcessGroup, target: Target, settings: dict[str, Any], temperature: float) -> None:
    engine = make_engine(
        target,
        keep_layers(target.model, [0]),
        num_draft_tokens=K,
        page_size=1,
        num_pages=256,
        **settings,
    )
    schedule = engine.schedule
    assert isinstance(schedule, DraftTargetSchedule)
    schedule.group = group
    schedule.announce = lambda plan: tell(group, plan, engine.table)
    requests = make_requests(5, temperature=temperature, ignore_eos=True)
    got = run_stepwise(
        engine, requests, late=True, after_step=lambda engine: check_after_step(group, engine)
    )
    group.broadcast_object(None)
    if settings.get("verify") != "rejection" or not temperature:
        plain = make_engine(target).generate(requests)
        assert [tuple(got[g.request_id]) for g in plain] == [g.output_ids for g in plain]


def check_after_step(group: ProcessGroup, engine: Engine) -> None:
    """The leader's draft is right, and the follower's target cache equals the leader's."""
    check_draft_state(engine)
    schedule = engine.schedule
    group.broadcast_object("compare")
    compare_ranks(group, schedule)


def follow(group: ProcessGroup, target: Target, settings: dict[str, Any]) -> None:
    """Do what the leader announces, without a draft."""
    table = SlotTable(num_rows=4, max_len=96, page_size=1, num_pages=256)
    pool = target.model.new_pool(256)
    created = watch_pools()
    schedule = DraftTargetSchedule(
        Runner(target.model, pool, table),
        None,
        group=group,
        announce=lambda plan: None,
        num_rows=4,
        transfer=ImmediateTransfer(),
        verify=settings.get("verify", "keyed"),
        draft_mode=settings.get("draft_mode", "argmax"),
    )
    assert schedule.draft is None
    assert not hasattr(schedule, "logits_RV"), "carried logits are the leader's"
    num_speculative = 0
    while True:
        message = group.broadcast_object(None)
        if message is None:
            break
        if isinstance(message, str):
            compare_ranks(group, schedule)
            continue
        plan, slots_RT = message
        table.slots_RT.copy_(slots_RT)
        with torch.inference_mode():
            pending = schedule.enqueue(plan)
        if pending.is_speculative:
            num_speculative += 1
            assert pending.handle is None, "a follower copies nothing to its host"
    assert num_speculative > 10
    assert created == [], "a follower makes no cache but the target's"


def watch_pools() -> list[KVPool]:
    """Every K/V pool that this process makes from now on."""
    created: list[KVPool] = []
    original = KVPool.__init__

    def watched(self: KVPool, **options: Any) -> None:
        original(self, **options)
        created.append(self)

    KVPool.__init__ = watched  # type: ignore[method-assign]
    return created


def tell(group: ProcessGroup, plan: StepPlan, table: SlotTable) -> None:
    group.broadcast_object((plan, table.slots_RT))


def compare_ranks(group: ProcessGroup, schedule: PlainSchedule) -> None:
    """Target K/V and last ids of the leader on both ranks."""
    pool = schedule.target.pool
    for mine in (*pool.k, *pool.v, schedule.last_ids_R):
        leaders = group.broadcast(mine.clone())
        assert torch.equal(mine, leaders)


if __name__ == "__main__":
    run_ranks(exercise, WORLD_SIZE)
