"""Draft K/V and relay state against a from-scratch recompute.

Equal output cannot see a broken draft, because verification repairs it; this can. Call it between
engine steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from runtime.batch import BatchMode, build_batch, upload_ids
from runtime.engine import Engine
from runtime.kv_cache import SlotTable
from runtime.request import Phase, RequestState
from runtime.spec.base import PlainSchedule, Runner
from runtime.spec.draft_target import DraftTargetSchedule
from runtime.spec.mtp import MtpSchedule

_PAGE_SIZE = 16
Part = tuple[str, torch.Tensor, torch.Tensor]  # name, what the engine holds, what is right


@dataclass(frozen=True)
class StateError:
    """Relative error of one part of one request's state; infinite where tokens differ."""

    request_id: str
    name: str
    error: float


def draft_state_errors(engine: Engine) -> Iterator[StateError]:
    """Every part of the state of every decoding request, compared with fresh forwards."""
    schedule = engine.schedule
    for state in engine.scheduler.running:
        if state.phase is not Phase.DECODE:
            continue
        assert state.committed == len(state.tokens) - 1, "committed is not one behind the tokens"
        if isinstance(schedule, DraftTargetSchedule):
            parts = [*_target_parts(schedule, state), *draft_model_parts(schedule, state)]
        else:
            assert isinstance(schedule, MtpSchedule), "only a speculating engine has draft state"
            parts = _head_parts(schedule, state)
        for name, held, fresh in parts:
            scale = fresh.abs().max().clamp_min(1e-6)
            error = float((held - fresh).abs().max() / scale)
            yield StateError(state.request.request_id, name, error)
        is_same = int(schedule.last_ids_R[state.row]) == state.tokens[-1]
        yield StateError(state.request.request_id, "relay token", 0.0 if is_same else float("inf"))


@torch.inference_mode()
def _head_parts(schedule: MtpSchedule, state: RequestState) -> list[Part]:
    """Draft row i takes the target's state of row i and token i + 1."""
    length, tokens = state.committed, state.tokens
    target, head = _Fresh(schedule.target), _Fresh(schedule.draft)
    hidden_TD = target.run(tokens[:length])
    draft_TD = head.run(tokens[1 : length + 1], hidden_TD)
    return [
        *target.cache_parts("target", state.row, [-1]),
        *head.cache_parts("draft", state.row, range(len(head.pool.k))),
        ("relay hidden", schedule.hidden_RD[state.row], draft_TD[-1]),
        _relay_part(schedule, state.row, draft_TD[-1:]),
    ]


def _relay_part(schedule: MtpSchedule, row: int, fresh_1D: torch.Tensor) -> Part:
    """Logits, or the logits of the columns that are held beside those of the best."""
    held_X, logits_W = schedule.drawn_from_RX[row], schedule.head.logits(fresh_1D)[0]
    if not schedule.num_choices:
        return "relay logits", held_X, logits_W
    return "relay choice", logits_W[held_X], logits_W.topk(len(held_X)).values


@torch.inference_mode()
def draft_model_parts(schedule: DraftTargetSchedule, state: RequestState) -> list[Part]:
    """The draft is a model of its own and has processed every known token. For the leader."""
    assert schedule.draft is not None, "only the leader has draft state"
    draft = _Fresh(schedule.draft)
    draft_TD = draft.run(state.tokens)
    return [
        *draft.cache_parts("draft", state.row, range(len(draft.pool.k))),
        (
            "relay logits",
            schedule.logits_RV[state.row],
            schedule.draft.model.logits(draft_TD[-1:])[0],
        ),
    ]


@torch.inference_mode()
def _target_parts(schedule: PlainSchedule, state: RequestState) -> list[Part]:
    target = _Fresh(schedule.target)
    target.run(state.tokens[:-1])
    return target.cache_parts("target", state.row, [-1])


class _Fresh:
    """One forward of a runner's model over an empty cache of its own."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.length = 0

    def run(self, ids: list[int], hidden_TD: torch.Tensor | None = None) -> torch.Tensor:
        self.length = len(ids)
        num_pages = -(-self.length // _PAGE_SIZE)
        self.table = SlotTable(
            num_rows=1, max_len=self.length, page_size=_PAGE_SIZE, num_pages=num_pages
        )
        row = self.table.acquire_row()
        self.table.reserve(row, self.length)
        model = self.runner.model
        self.pool = model.new_pool(num_pages * _PAGE_SIZE)
        batch = build_batch(
            BatchMode.PREFILL,
            table=self.table,
            table_rows=[row],
            starts=[0],
            q_lens=[self.length],
            input_ids_N=upload_ids(ids, model.device),
            device=model.device,
            hidden_ND=hidden_TD,
        )
        return model.forward(batch, self.table, self.pool)

    def cache_parts(self, name: str, row: int, layers: Iterable[int]) -> list[Part]:
        """K and V of the runner's pool at table row ``row`` beside those of :meth:`run`."""
        held = self.runner.table.slots(row, 0, self.length)
        fresh = self.table.slots(0, 0, self.length)
        pool = self.runner.pool
        return [
            (f"{name} {kind}", mine[layer][held], other[layer][fresh])
            for layer in layers
            for kind, mine, other in (("K", pool.k, self.pool.k), ("V", pool.v, self.pool.v))
        ]
