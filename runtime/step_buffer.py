"""One step's batch information in one buffer: what the leader scheduled, as its followers read it.

The buffer has a fixed size, so that one broadcast carries everything: which rows run, their tokens,
the pages of their requests and how they are sampled. Nothing is remembered between steps.

Layout, int64: ``[kind, works, is_decode_only, K, ids, pages | one record per work | ids | pages]``.
The floats of a record are stored by their bits.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from enum import IntEnum
from typing import SupportsIndex

import numpy as np
import torch

from runtime.config import EngineConfig
from runtime.kv_cache import SlotTable
from runtime.request import Phase, Request, RequestState, SamplingParams
from runtime.scheduler import StepPlan, Work

_HEADER = 6
_RECORD = 12


class MessageKind(IntEnum):
    """What the followers are to do next."""

    STEP = 1  # enqueue the step that this buffer holds
    LOGITS = 2  # logits of rows that are broadcast next; ``works`` is their number
    CALL = 3  # run the function that is broadcast next
    STOP = 4


class StepBuffer:
    """The buffer of one engine, in host memory. ``tensor`` is what is broadcast."""

    def __init__(self, config: EngineConfig) -> None:
        most_ids = config.max_batch_tokens + config.max_running
        size = _HEADER + _RECORD * config.max_running + most_ids + config.num_pages
        self.tensor = torch.zeros(size, dtype=torch.int64)
        self._values = self.tensor.numpy()  # the same memory
        self._max_rows = config.max_batch_tokens

    @property
    def kind(self) -> MessageKind:
        return MessageKind(int(self._values[0]))

    @property
    def count(self) -> int:
        return int(self._values[1])

    def set(self, kind: MessageKind, *, count: int = 0) -> None:
        """A message without a step."""
        self._values[:2] = kind, count

    def pack(self, plan: StepPlan, table: SlotTable) -> None:
        """Raises ``ValueError`` for more rows than ``runtime.max_batch_tokens``."""
        records, ids, pages = [], [], []
        num_rows = sum(work.num_rows for work in plan.works)
        if num_rows > self._max_rows:
            raise ValueError(
                f"max_batch_tokens: a step of {num_rows} rows; an engine over several ranks takes "
                f"at most runtime.max_batch_tokens={self._max_rows}"
            )
        for work in plan.works:
            state, sampling = work.state, work.state.request.sampling
            known = state.tokens[work.start : work.start + work.num_rows + 1]
            held = table.page_ids(state.row)
            floats = np.array([sampling.temperature, sampling.top_p, sampling.min_p])
            records += [
                state.row,
                work.start,
                work.num_rows,
                work.samples,
                state.phase is Phase.DECODE,
                len(known),
                len(held),
                *floats.view(np.int64).tolist(),
                sampling.top_k,
                sampling.seed,
            ]
            ids += known
            pages.append(held)
        held_pages = np.concatenate(pages)
        self._values[:_HEADER] = (
            MessageKind.STEP,
            len(plan.works),
            plan.is_decode_only,
            plan.num_draft_tokens,
            len(ids),
            len(held_pages),
        )
        stop = _HEADER + len(records)
        self._values[_HEADER:stop] = records
        self._values[stop : stop + len(ids)] = ids
        stop += len(ids)
        self._values[stop : stop + len(held_pages)] = held_pages

    def unpack(self, table: SlotTable) -> StepPlan:
        """The step, with ``table`` holding its requests' pages. Its states are of this step only:
        they know the tokens of the step's rows and one more.
        """
        _, count, is_decode_only, num_drafts, num_ids, _ = self._values[:_HEADER].tolist()
        ids_start = _HEADER + _RECORD * count
        records = self._values[_HEADER:ids_start].reshape(count, _RECORD)
        floats = records[:, 7:10].copy().view(np.float64).tolist()
        ids = self._values[ids_start : ids_start + num_ids].tolist()
        page_start, id_start = ids_start + num_ids, 0
        works = []
        for record, (temperature, top_p, min_p) in zip(records.tolist(), floats, strict=True):
            row, start, num_rows, samples, decodes, num_known, num_pages = record[:7]
            table.adopt(row, self._values[page_start : page_start + num_pages])
            page_start += num_pages
            sampling = SamplingParams(
                temperature=temperature,
                top_k=record[10],
                top_p=top_p,
                min_p=min_p,
                seed=record[11],
            )
            state = RequestState(
                request=Request(f"row {row}", (), sampling),
                tokens=TokenWindow(start, ids[id_start : id_start + num_known]),
                arrival=0,
                phase=Phase.DECODE if decodes else Phase.PREFILL,
                row=row,
                committed=start,
            )
            id_start += num_known
            works.append(Work(state, start, num_rows, bool(samples)))
        return StepPlan(tuple(works), bool(is_decode_only), num_drafts)


class TokenWindow(list[int]):
    """The tokens of a request from position ``start`` on, addressed by position in the request.

    Asking for an earlier one is an error, for it is not known here.
    """

    def __init__(self, start: int, ids: Sequence[int]) -> None:
        super().__init__(ids)
        self._start = start

    @typing.overload
    def __getitem__(self, key: SupportsIndex) -> int: ...

    @typing.overload
    def __getitem__(self, key: slice) -> list[int]: ...

    def __getitem__(self, key: SupportsIndex | slice) -> int | list[int]:
        if isinstance(key, slice):
            assert isinstance(key.start, int), "a window has no beginning"
            assert key.step is None, "a window is read in order"
            assert key.start >= self._start, f"tokens before {self._start} are not known here"
            stop = None if key.stop is None else key.stop - self._start
            return super().__getitem__(slice(key.start - self._start, stop))
        position = key.__index__() - self._start
        assert 0 <= position < len(self), f"token {key.__index__()} is not known here"
        return super().__getitem__(position)
