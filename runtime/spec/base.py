"""The schedule interface and plain decoding, which is also the step every schedule falls back to.

A schedule decides which model runs on which rows. ``enqueue`` never waits for the device; the host
waits in ``collect`` for the token ids alone. Prefill and mixed batches decode without speculation
and carry the relay state over.

Shape legend: B requests, N rows, D model width, V vocabulary, R table rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.batch import BatchMode, ForwardBatch, build_batch, upload_ids
from runtime.cuda_graph import DraftLoopGraphs, ForwardGraphs
from runtime.kv_cache import KVPool, SlotTable
from runtime.models.base import Model
from runtime.request import Phase, SamplingParams
from runtime.sampling import SamplingTensors, Stream, sample
from runtime.scheduler import StepPlan, Work
from runtime.transfer import HostTransfer


@dataclass(frozen=True)
class Runner:
    """One model with its own pool over the shared slot table."""

    model: Model
    pool: KVPool
    table: SlotTable
    graphs: ForwardGraphs | None = None
    draft_loop: DraftLoopGraphs | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states ``[N, D]``, from a graph where one is recorded for such a batch."""
        if self.graphs is not None:
            hidden_ND = self.graphs.forward(batch)
            if hidden_ND is not None:
                return hidden_ND
        return self.model.forward(batch, self.table, self.pool)


@dataclass(frozen=True)
class PendingStep:
    """A step in flight. ``hidden_ND`` are the target's rows in the order of ``plan.works``."""

    plan: StepPlan
    handle: Any
    hidden_ND: torch.Tensor
    draft_hidden_ND: torch.Tensor | None
    rows_per_work: tuple[int, ...]
    is_speculative: bool

    @property
    def is_plain_decode(self) -> bool:
        return self.plan.is_decode_only and not self.is_speculative


@dataclass(frozen=True)
class WorkResult:
    """What one step gave one request: ``num_committed`` rows became final.

    ``draft_ids`` is empty when nothing was drafted; of a tree they are the nodes, row by row, and
    ``tree_parents`` their parents' rows.
    """

    work: Work
    new_ids: tuple[int, ...]
    num_committed: int
    num_accepted: int
    draft_ids: tuple[int, ...]
    tree_parents: tuple[int, ...] = ()


class PlainSchedule:
    """Autoregressive decoding: one row per request and step."""

    may_look_ahead = True  # the next step's inputs are on the device before the host knows them
    draft_ahead = 0  # slots by which the draft's cache is longer than the target's
    announces_itself = False  # it tells the other ranks of a step when it suits it

    def __init__(self, target: Runner, *, num_rows: int, transfer: HostTransfer) -> None:
        self.target = target
        self.table = target.table
        self.device = target.model.device
        self.transfer = transfer
        # Relay state per table row: the last sampled token stays on the device.
        self.last_ids_R = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self._sampling_key: tuple[SamplingParams, ...] = ()
        self._sampling: SamplingTensors | None = None

    def enqueue(self, plan: StepPlan) -> PendingStep:
        """Enqueue one step (see docs/architecture.md). Never waits for the device."""
        return self._enqueue_plain(plan)

    def collect(self, pending: PendingStep) -> list[WorkResult]:
        """Wait for the ids of ``pending`` and hand them out per request."""
        (ids,) = self.transfer.wait(pending.handle)
        results, taken = [], 0
        for work in pending.plan.works:
            new_ids: tuple[int, ...] = ()
            if work.samples:
                new_ids = (ids[taken],)
                taken += 1
            results.append(WorkResult(work, new_ids, work.num_rows, 0, ()))
        return results

    def _enqueue_plain(self, plan: StepPlan) -> PendingStep:
        works = plan.works
        q_lens = tuple(work.num_rows for work in works)
        batch = build_batch(
            BatchMode.DECODE if plan.is_decode_only else BatchMode.PREFILL,
            table=self.table,
            table_rows=[work.state.row for work in works],
            starts=[work.start for work in works],
            q_lens=q_lens,
            input_ids_N=self._input_ids(works),
            device=self.device,
        )
        hidden_ND = self.target.forward(batch)
        sampled = [work for work in works if work.samples]
        last_rows = _last_rows(works)
        if sampled:
            logits_MV = self.target.model.logits(_select(hidden_ND, last_rows, self.device))
            positions = [work.start + work.num_rows for work in sampled]
            new_ids_M = sample(
                logits_MV,
                self.sampling(sampled),
                upload_ids(positions, self.device),
                Stream.TARGET,
            )
            self.agree(new_ids_M)
            table_rows = upload_ids([work.state.row for work in sampled], self.device)
            self.last_ids_R.index_copy_(0, table_rows, new_ids_M)
        else:
            new_ids_M = torch.empty(0, dtype=torch.int64, device=self.device)
        handle = self.transfer.enqueue(new_ids_M)
        self.transfer.mark("copy")
        draft_hidden_ND = self._extend_draft(works, batch, hidden_ND, last_rows, new_ids_M)
        return PendingStep(plan, handle, hidden_ND, draft_hidden_ND, q_lens, False)

    def _extend_draft(
        self,
        works: Sequence[Work],
        batch: ForwardBatch,
        hidden_ND: torch.Tensor,
        last_rows: Sequence[int],
        new_ids_M: torch.Tensor,
    ) -> torch.Tensor | None:
        """Hook: fill the draft's K/V over the target's rows. Plain decoding has no draft."""
        return None

    def agree(self, *drawn: torch.Tensor) -> None:
        """Overwrite what this rank drew with what the leader drew; call it before it is used.

        Gathered logits are the same on every rank, but not every kernel that draws from them is
        deterministic. On one process nothing happens.
        """
        for ids in drawn:
            self.target.model.group.broadcast(ids)

    def sampling(self, works: Sequence[Work]) -> SamplingTensors:
        """Sampling tensors of these requests, rebuilt only when the batch changes."""
        key = tuple(work.state.request.sampling for work in works)
        if self._sampling is None or key != self._sampling_key:
            self._sampling = SamplingTensors.build(
                key, self.device, argmax=self.target.model.argmax
            )
            self._sampling_key = key
        return self._sampling

    def _input_ids(self, works: Sequence[Work]) -> torch.Tensor:
        """Known tokens from the host; last sampled tokens (all rows decode) from the relay."""
        if all(work.state.phase is Phase.DECODE for work in works):
            rows = upload_ids([work.state.row for work in works], self.device)
            return self.last_ids_R.index_select(0, rows)
        known: list[int] = []
        for work in works:
            start = work.start
            known.extend(work.state.tokens[start : start + work.num_rows])
        return upload_ids(known, self.device)


def chain_results(
    plan: StepPlan,
    ids_BK1: Sequence[Sequence[int]],
    num_emitted_B: Sequence[int],
    draft_ids_BK: Sequence[Sequence[int]],
) -> list[WorkResult]:
    """What a verified chain of drafts gave each request of ``plan``."""
    return [
        WorkResult(work, tuple(ids[:count]), count, count - 1, tuple(drafts))
        for work, ids, count, drafts in zip(
            plan.works, ids_BK1, num_emitted_B, draft_ids_BK, strict=True
        )
    ]


def _last_rows(works: Sequence[Work]) -> list[int]:
    """Flat index of the last row of each work that samples."""
    rows, end = [], 0
    for work in works:
        end += work.num_rows
        if work.samples:
            rows.append(end - 1)
    return rows


def _select(hidden_ND: torch.Tensor, rows: Sequence[int], device: torch.device) -> torch.Tensor:
    if len(rows) == hidden_ND.shape[0]:
        return hidden_ND
    return hidden_ND.index_select(0, upload_ids(rows, device))
