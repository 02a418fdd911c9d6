"""Draft K/V and relay state against a from-scratch recompute.

Equal output cannot see a broken draft, because verification repairs it; this can. Call it between
engine steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from runtime.batch import BatchMode, build_batch, upload_ids
from runtime.engine import Engine
from runtime.kv_cache import SlotTable
from runtime.request import Phase, RequestState
from runtime.spec.mtp import MtpSchedule

_PAGE_SIZE = 16


@dataclass(frozen=True)
class StateError:
    """Relative error of one part of one request's state; infinite where tokens differ."""

    request_id: str
    name: str
    error: float


def draft_state_errors(engine: Engine) -> Iterator[StateError]:
    """Every part of the state of every decoding request, compared with fresh forwards."""
    schedule = engine.schedule
    assert isinstance(schedule, MtpSchedule), "only a speculating engine has draft state"
    for state in engine.scheduler.running:
        if state.phase is Phase.DECODE:
            yield from _request_errors(engine, schedule, state)


@torch.inference_mode()
def _request_errors(
    engine: Engine, schedule: MtpSchedule, state: RequestState
) -> Iterator[StateError]:
    length, tokens = state.committed, state.tokens
    assert length == len(tokens) - 1, "committed length is not one behind the tokens"
    target, head = schedule.target.model, schedule.head
    num_pages = -(-length // _PAGE_SIZE)
    table = SlotTable(num_rows=1, max_len=length, page_size=_PAGE_SIZE, num_pages=num_pages)
    row = table.acquire_row()
    table.reserve(row, length)
    target_pool = target.new_pool(num_pages * _PAGE_SIZE)
    draft_pool = head.new_pool(num_pages * _PAGE_SIZE)

    def rows_of(ids: list[int], hidden_TD: torch.Tensor | None) -> torch.Tensor:
        batch = build_batch(
            BatchMode.PREFILL,
            table=table,
            table_rows=[row],
            starts=[0],
            q_lens=[length],
            input_ids_N=upload_ids(ids, engine.target.device),
            device=engine.target.device,
            hidden_ND=hidden_TD,
        )
        if hidden_TD is None:
            return target.forward(batch, table, target_pool)
        return head.forward(batch, table, draft_pool)

    hidden_TD = rows_of(tokens[:length], None)
    draft_TD = rows_of(tokens[1 : length + 1], hidden_TD)
    fresh = table.slots(row, 0, length)
    held = engine.table.slots(state.row, 0, length)
    target_held, draft_held = schedule.target.pool, schedule.draft.pool
    pairs = [
        ("target K", target_held.k[-1][held], target_pool.k[-1][fresh]),
        ("target V", target_held.v[-1][held], target_pool.v[-1][fresh]),
        ("draft K", draft_held.k[0][held], draft_pool.k[0][fresh]),
        ("draft V", draft_held.v[0][held], draft_pool.v[0][fresh]),
        ("relay hidden", schedule.hidden_RD[state.row], draft_TD[-1]),
        ("relay logits", schedule.logits_RV[state.row], head.logits(draft_TD[-1:])[0]),
    ]
    for name, got, want in pairs:
        scale = want.abs().max().clamp_min(1e-6)
        error = float((got - want).abs().max() / scale)
        yield StateError(state.request.request_id, name, error)
    is_same = int(schedule.last_ids_R[state.row]) == tokens[-1]
    yield StateError(state.request.request_id, "relay token", 0.0 if is_same else float("inf"))
