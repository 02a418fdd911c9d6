"""Forwards as recorded graphs: one launch in place of hundreds, for batches of a few fixed sizes.

A graph reads fixed memory. Before each replay the batch is copied there, the attention is planned
again, and the batch is filled up to the next recorded size with a *dummy request*: its rows attend
to one page that no request owns, and write their K/V there. Decoding, verification and the draft's
extension are recorded per (size, rows per request), the whole draft loop per (size, K); prompts and
sizes beyond the largest run without a graph. A graph is recorded when its size first comes up.

Results are copied out of the graph's memory: the next replay may come before they are read.

Shape legend: S requests of a recorded size, B requests, N rows, K draft length, D width of hidden
states, V draft vocabulary.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from runtime.attention.paged import PagedLayout, pad_layout, page_layout
from runtime.batch import BatchMode, ForwardBatch, upload
from runtime.draft_vocab import to_target_ids
from runtime.kv_cache import KVPool, SlotTable
from runtime.models.base import DraftModel, Model

logger = logging.getLogger(__name__)


class GraphRecorder(ABC):
    """Records what a function enqueues on the device."""

    @abstractmethod
    def record(self, body: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """The result's memory, and what replays ``body`` into it. May run ``body`` several times,
        and before recording does so at least once.
        """


class CudaRecorder(GraphRecorder):
    """CUDA graphs that share one memory pool (they are replayed one after the other)."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, body: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # kernels are compiled and chosen here, not within the recording
                body()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = body()
        return result, graph.replay


@runtime_checkable
class GraphAttention(Protocol):
    """What an attention backend needs to have for graphs."""

    def graph_plan(
        self, layout: PagedLayout, write_slots_N: torch.Tensor, *, q_len: int, max_pages: int
    ) -> Any:
        """A plan in fixed memory for as many requests as ``layout`` has, of ``q_len`` rows each."""

    def update(self, plan: Any, layout: PagedLayout) -> None:
        """Plan again, in the same memory."""


@dataclass(frozen=True)
class GraphSizes:
    """The numbers of requests that are recorded, rising. ``dummy_page`` belongs to nobody."""

    sizes: tuple[int, ...]
    dummy_page: int

    @classmethod
    def up_to(cls, max_running: int, *, dummy_page: int) -> GraphSizes:
        """Powers of two below ``max_running``, and that."""
        powers = [2**power for power in range(max_running.bit_length())]
        return cls((*(size for size in powers if size < max_running), max_running), dummy_page)

    def fitting(self, num_requests: int) -> int | None:
        return next((size for size in self.sizes if size >= num_requests), None)


class _Layouts:
    """Padded layouts of one table."""

    def __init__(self, table: SlotTable, sizes: GraphSizes) -> None:
        self.table = table
        self.sizes = sizes
        self.max_pages = -(-table.max_len // table.page_size)
        self.dummy_slot = sizes.dummy_page * table.page_size

    def make(
        self, size: int, *, q_len: int, table_rows: Sequence[int], kv_lens: Sequence[int]
    ) -> PagedLayout:
        layout = page_layout(
            self.table, table_rows=table_rows, q_lens=[q_len] * len(kv_lens), kv_lens=kv_lens
        )
        return pad_layout(layout, size, q_len=q_len, page=self.sizes.dummy_page)


@dataclass(frozen=True)
class _Forward:
    batch: ForwardBatch  # fixed memory
    result: torch.Tensor
    replay: Callable[[], None]


class ForwardGraphs:
    """One model's forward over batches with as many rows, at most ``max_rows``, per request."""

    def __init__(
        self,
        model: Model,
        *,
        table: SlotTable,
        pool: KVPool,
        sizes: GraphSizes,
        max_rows: int,
        recorder: GraphRecorder,
    ) -> None:
        self._model, self._pool = model, pool
        self._attention = graph_attention(model)
        self._layouts = _Layouts(table, sizes)
        self._max_rows = max_rows
        self._recorder = recorder
        self._forwards: dict[tuple[int, tuple[int, int]], _Forward] = {}

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """``[N, D]`` as the model's own ``forward``; ``None``: not a batch that is recorded."""
        q_len, count = batch.q_lens[0], len(batch.q_lens)
        size = self._layouts.sizes.fitting(count)
        if (
            size is None
            or batch.mode is BatchMode.PREFILL
            or batch.visible_BSJ is not None
            or q_len > self._max_rows
            or set(batch.q_lens) != {q_len}
        ):
            return None
        layout = self._layouts.make(
            size, q_len=q_len, table_rows=batch.table_rows, kv_lens=batch.kv_lens
        )
        # A head may take rows of the target and rows of its own, which are narrower.
        width = 0 if batch.hidden_ND is None else batch.hidden_ND.shape[1]
        recorded = self._forwards.get((size, (q_len, width)))
        if recorded is None:
            recorded = self._record(batch, layout, q_len)
            self._forwards[size, (q_len, width)] = recorded
        else:
            self._fill(recorded.batch, batch)
            self._attention.update(recorded.batch.attention_plan, layout)
        recorded.replay()
        return recorded.result[: count * q_len].clone()

    def _record(self, batch: ForwardBatch, layout: PagedLayout, q_len: int) -> _Forward:
        size = layout.num_requests
        device = batch.positions_N.device

        def fixed(source: torch.Tensor) -> torch.Tensor:
            shape = (size * q_len, *source.shape[1:])
            return torch.zeros(shape, dtype=source.dtype, device=device)

        write_slots_N = fixed(batch.write_slots_N)
        plan = self._attention.graph_plan(
            layout, write_slots_N, q_len=q_len, max_pages=self._layouts.max_pages
        )
        static = ForwardBatch(
            mode=batch.mode,
            input_ids_N=fixed(batch.input_ids_N),
            positions_N=fixed(batch.positions_N),
            write_slots_N=write_slots_N,
            q_lens=(q_len,) * size,
            kv_lens=tuple(layout.kv_lens_B.tolist()),
            table_rows=(*batch.table_rows, *[0] * (size - len(batch.table_rows))),
            hidden_ND=None if batch.hidden_ND is None else fixed(batch.hidden_ND),
            attention_plan=plan,
        )
        self._fill(static, batch)
        logger.info("recording a graph: %d requests of %d rows", size, q_len)
        result, replay = self._recorder.record(
            lambda: self._model.forward(static, self._layouts.table, self._pool)
        )
        return _Forward(static, result, replay)

    def _fill(self, static: ForwardBatch, batch: ForwardBatch) -> None:
        """Copy the batch; rows behind it keep their old ids but must not keep their old slots."""
        count = batch.input_ids_N.shape[0]
        static.input_ids_N[:count].copy_(batch.input_ids_N)
        static.positions_N[:count].copy_(batch.positions_N)
        static.write_slots_N[:count].copy_(batch.write_slots_N)
        static.write_slots_N[count:].fill_(self._layouts.dummy_slot)
        if static.hidden_ND is not None:
            assert batch.hidden_ND is not None
            static.hidden_ND[:count].copy_(batch.hidden_ND)


@dataclass(frozen=True)
class _LoopInputs:
    """Of S requests and the K - 1 draft rows of each: the relay state, positions and slots."""

    hidden_SD: torch.Tensor
    columns_S1: torch.Tensor
    positions_KS: torch.Tensor
    slots_KS: torch.Tensor


@dataclass(frozen=True)
class _Loop:
    inputs: _LoopInputs  # fixed memory
    plans: tuple[Any, ...]
    result: torch.Tensor
    replay: Callable[[], None]


class DraftLoopGraphs:
    """The K arg-maxed drafts of a chain, K - 1 forwards and heads, as one graph."""

    def __init__(
        self,
        head: DraftModel,
        *,
        table: SlotTable,
        pool: KVPool,
        sizes: GraphSizes,
        num_draft_tokens: int,
        recorder: GraphRecorder,
    ) -> None:
        self._head, self._pool = head, pool
        self._attention = graph_attention(head)
        self._layouts = _Layouts(table, sizes)
        self._num_draft_tokens = num_draft_tokens
        self._recorder = recorder
        self._loops: dict[int, _Loop] = {}

    def propose(
        self,
        hidden_BD: torch.Tensor,
        columns_B1: torch.Tensor,
        *,
        table_rows: Sequence[int],
        starts: Sequence[int],
        k: int,
    ) -> torch.Tensor | None:
        """K target ids ``[B, K]`` from the relay's states and best columns; draft row j goes to
        slot ``start + j``.

        ``None``: a K or a size that is not recorded (K is less than usual near a length limit).
        """
        size = self._layouts.sizes.fitting(len(starts))
        if size is None or k != self._num_draft_tokens or k < 2:
            return None
        layouts = [
            self._layouts.make(
                size,
                q_len=1,
                table_rows=table_rows,
                kv_lens=[start + step + 1 for start in starts],
            )
            for step in range(k - 1)
        ]
        positions_KB = np.asarray(starts) + np.arange(k - 1)[:, None]
        slots_KB = self._layouts.table.host_slots_RT[np.asarray(table_rows), positions_KB]
        given = _LoopInputs(
            hidden_BD,
            columns_B1,
            upload(torch.from_numpy(positions_KB), hidden_BD.device),
            upload(torch.from_numpy(slots_KB), hidden_BD.device),
        )
        loop = self._loops.get(size)
        if loop is None:
            loop = self._record(given, layouts)
            self._loops[size] = loop
        else:
            self._fill(loop.inputs, given)
            for plan, layout in zip(loop.plans, layouts, strict=True):
                self._attention.update(plan, layout)
        loop.replay()
        return loop.result[: len(starts)].clone()

    def _record(self, given: _LoopInputs, layouts: Sequence[PagedLayout]) -> _Loop:
        size, steps = layouts[0].num_requests, len(layouts)
        inputs = _LoopInputs(
            given.hidden_SD.new_zeros(size, given.hidden_SD.shape[1]),
            given.columns_S1.new_zeros(size, 1),
            given.positions_KS.new_zeros(steps, size),
            given.slots_KS.new_zeros(steps, size),
        )
        plans = tuple(
            self._attention.graph_plan(layout, slots_S, q_len=1, max_pages=self._layouts.max_pages)
            for layout, slots_S in zip(layouts, inputs.slots_KS, strict=True)
        )

        def body() -> torch.Tensor:
            state_SD, ids_S = inputs.hidden_SD, self._token_ids(inputs.columns_S1)
            drafts = [ids_S]
            for step, plan in enumerate(plans):
                batch = ForwardBatch(
                    mode=BatchMode.DECODE,
                    input_ids_N=ids_S,
                    positions_N=inputs.positions_KS[step],
                    write_slots_N=inputs.slots_KS[step],
                    q_lens=(1,) * size,
                    kv_lens=tuple(layouts[step].kv_lens_B.tolist()),
                    table_rows=(0,) * size,
                    hidden_ND=state_SD,
                    attention_plan=plan,
                )
                state_SD = self._head.forward(batch, self._layouts.table, self._pool)
                ids_S = self._token_ids(self._head.best_columns(state_SD, 1))
                drafts.append(ids_S)
            return torch.stack(drafts, 1)

        logger.info("recording a graph: %d drafts of %d requests", steps + 1, size)
        self._fill(inputs, given)
        result, replay = self._recorder.record(body)
        return _Loop(inputs, plans, result, replay)

    def _fill(self, inputs: _LoopInputs, given: _LoopInputs) -> None:
        count = len(given.hidden_SD)
        inputs.hidden_SD[:count].copy_(given.hidden_SD)
        inputs.columns_S1[:count].copy_(given.columns_S1)
        inputs.positions_KS[:, :count].copy_(given.positions_KS)
        inputs.slots_KS[:, :count].copy_(given.slots_KS)
        inputs.slots_KS[:, count:].fill_(self._layouts.dummy_slot)

    def _token_ids(self, columns_S1: torch.Tensor) -> torch.Tensor:
        return to_target_ids(columns_S1[:, 0], self._head.draft_vocab_ids)


def graph_attention(model: Model) -> GraphAttention:
    """The model's attention backend. Raises ``ValueError`` where it cannot be recorded."""
    if not isinstance(model.backend, GraphAttention):
        raise ValueError(
            "runtime.cuda_graphs=true: only FlashInfer's attention can be recorded, this model "
            f"attends through {type(model.backend).__name__}; use runtime.attention=flashinfer or "
            "runtime.cuda_graphs=false"
        )
    return model.backend
