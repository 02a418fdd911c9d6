"""Who is preempted when pages run out."""

from __future__ import annotations

from runtime.kv_cache import SlotTable
from runtime.request import Phase, Request, RequestState
from runtime.scheduler import Scheduler


def test_the_youngest_by_arrival_is_preempted_whatever_the_order_of_admission() -> None:
    table = SlotTable(num_rows=2, max_len=64, page_size=1, num_pages=8)
    scheduler = Scheduler(
        table, max_running=2, max_batch_tokens=64, max_model_len=8, num_draft_tokens=0
    )
    young, old = (
        RequestState(request=Request(name, (1, 2, 3)), tokens=[1, 2, 3], arrival=arrival)
        for name, arrival in (("young", 1), ("old", 0))
    )
    scheduler.add(young)
    scheduler.add(old)  # as after a preemption: admitted last, although it came first
    scheduler.schedule()
    for _ in range(5):
        for state in (young, old):
            if state.row >= 0:
                state.phase, state.committed = Phase.DECODE, len(state.tokens)
                state.tokens.append(4)
        scheduler.schedule()
    assert young.num_preemptions == 1
    assert old.num_preemptions == 0
    assert len(old.tokens) == 8
    table.check()
