"""Samples packed into rows of one head forward, with every loss target spelled out on the host.

Alignment: row i takes ``g_i`` and the embedding of ``t_{i+1}`` at position i; unroll step k reads
``t_{i+1+k}`` and predicts ``t_{i+2+k}`` and ``g_{i+1+k}``. The pair (i, k) is active iff row
``i+2+k`` exists and its loss mask is true. Only rows that an active pair depends on become query
rows; rows behind the last of them are dropped, because nobody attends to them.

A head that reads residual streams (``of_layers``) takes ``S_k`` of row i in the place of ``g_i``;
its targets are the same.

Shape legend: T tokens of one sample, S packed rows, N query rows of one step, A active rows,
D model width, E width of the residual streams side by side, K unroll steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mtp_train.attention import AttentionPlan, QueryBlock, cut_queries


class Sample(Protocol):
    """What packing reads of a feature sample."""

    @property
    def input_ids(self) -> torch.Tensor: ...  # int64 [T]

    @property
    def loss_mask(self) -> torch.Tensor: ...  # bool [T]

    @property
    def hidden(self) -> torch.Tensor: ...  # float [T, D], the target's g

    @property
    def layers(self) -> torch.Tensor | None: ...  # float [T, E], its residual streams


@dataclass(frozen=True)
class RowLayout:
    """How rows that several ranks share out lie in memory once they are gathered.

    Each rank sends ``width`` rows, of which the first ``num_rows`` are its own; row ``n`` of all is
    then at ``places_N[n]`` of ``num_places``.
    """

    num_rows: int
    width: int
    num_places: int
    places_N: torch.Tensor

    def to(self, device: torch.device) -> RowLayout:
        return dataclasses.replace(self, places_N=self.places_N.to(device))


@dataclass(frozen=True)
class WholeRows:
    """All rows of a step of which this rank has a share: what its attention is about."""

    rows_N: torch.Tensor
    parent_N: torch.Tensor
    layout: RowLayout

    def to(self, device: torch.device) -> WholeRows:
        rows_N, parent_N = self.rows_N.to(device), self.parent_N.to(device)
        return WholeRows(rows_N, parent_N, self.layout.to(device))


@dataclass(frozen=True)
class UnrollStep:
    """One unroll step of a packed batch. All index tensors are int64 and ascending."""

    rows_N: torch.Tensor  # packed row of each start i
    parent_N: torch.Tensor  # index of the same start among the previous step's rows
    ids_N: torch.Tensor  # t_{i+1+k}
    active_A: torch.Tensor  # indices into N that carry loss
    labels_A: torch.Tensor  # t_{i+2+k}
    target_AD: torch.Tensor  # g_{i+1+k}
    blocks: tuple[QueryBlock, ...]  # attention plan of the rows
    target_lse_A: torch.Tensor | None = None  # fp32, log-sum-exp of lm_head(g_{i+1+k})
    whole: WholeRows | None = None  # where the rows are shared out over ranks

    @property
    def layout(self) -> RowLayout | None:
        return None if self.whole is None else self.whole.layout

    @property
    def plan(self) -> AttentionPlan:
        """Of all rows, also where this rank has a share of them."""
        return AttentionPlan(self.blocks, self.rows_N if self.whole is None else self.whole.rows_N)

    @property
    def chain_parent_N(self) -> torch.Tensor:
        """``parent_N`` of all rows."""
        return self.parent_N if self.whole is None else self.whole.parent_N


@dataclass(frozen=True)
class HeadBatch:
    """Packed rows of several samples; ``cu_seqlens`` holds the sample borders, starting with 0."""

    hidden_SD: torch.Tensor  # what the head reads of the target: g, or residual streams [S, E]
    next_ids_S: torch.Tensor  # t_{i+1}
    positions_S: torch.Tensor  # position inside the sample
    cu_seqlens: tuple[int, ...]
    steps: tuple[UnrollStep, ...]
    layout: RowLayout | None = None  # of the packed rows, where they are shared out over ranks

    @property
    def plan(self) -> AttentionPlan:
        """Every packed row as a query."""
        rows_S = torch.arange(self.cu_seqlens[-1])
        return AttentionPlan(cut_queries(rows_S, self.cu_seqlens), rows_S.to(self.hidden_SD.device))

    @property
    def num_active(self) -> tuple[int, ...]:
        """Active pairs per unroll step."""
        return tuple(step.active_A.numel() for step in self.steps)

    def to(self, device: torch.device, dtype: torch.dtype) -> HeadBatch:
        """Move everything to ``device`` and the float rows to ``dtype`` (the normalisers stay)."""

        steps = tuple(
            UnrollStep(
                rows_N=step.rows_N.to(device),
                parent_N=step.parent_N.to(device),
                ids_N=step.ids_N.to(device),
                active_A=step.active_A.to(device),
                labels_A=step.labels_A.to(device),
                target_AD=step.target_AD.to(device, dtype),
                blocks=step.blocks,
                target_lse_A=None if step.target_lse_A is None else step.target_lse_A.to(device),
                whole=None if step.whole is None else step.whole.to(device),
            )
            for step in self.steps
        )
        return HeadBatch(
            self.hidden_SD.to(device, dtype),
            self.next_ids_S.to(device),
            self.positions_S.to(device),
            self.cu_seqlens,
            steps,
            None if self.layout is None else self.layout.to(device),
        )


@dataclass(frozen=True)
class _Plan:
    """Starts of one sample: ``needed[k]`` are computed at step k, ``active[k]`` carry loss."""

    num_rows: int
    needed: tuple[np.ndarray, ...]
    active: tuple[np.ndarray, ...]


def _plan_sample(loss_mask_T: np.ndarray, num_steps: int, every_row: bool) -> _Plan:
    length = len(loss_mask_T)
    active = [np.flatnonzero(loss_mask_T[2 + k :]) for k in range(num_steps)]
    needed: list[np.ndarray] = [np.empty(0, np.int64)] * num_steps
    later = np.empty(0, np.int64)
    for k in range(num_steps - 1, -1, -1):
        if every_row:
            needed[k] = np.arange(max(0, length - 1 - k))
        else:
            later = np.union1d(later, active[k])
            needed[k] = later
    num_rows = int(needed[0][-1]) + 1 if len(needed[0]) else 0
    return _Plan(num_rows, tuple(needed), tuple(active))


def count_active(loss_mask_T: torch.Tensor, num_steps: int) -> tuple[int, ...]:
    """Active pairs per unroll step of one sample (bool ``[T]``, host)."""
    return tuple(int(loss_mask_T[2 + k :].sum()) for k in range(num_steps))


def pack(
    samples: Sequence[Sample],
    *,
    num_steps: int = 1,
    every_row: bool = False,
    target_lse: Sequence[torch.Tensor] | None = None,
    input_hidden: Sequence[torch.Tensor] | None = None,
    of_layers: bool = False,
) -> HeadBatch:
    """Pack samples (host tensors) for ``num_steps`` unroll steps.

    ``every_row`` computes all starts that exist, not only those a loss depends on (validation).
    ``target_lse`` holds one fp32 ``[T]`` per sample, ``input_hidden`` the ``[T, D]`` that the head
    reads in place of the sample's states (None: those), which stay what is predicted. Without any
    active pair the batch keeps one row that carries no loss, so that every rank can step.
    """
    hidden, next_ids, positions, cu_seqlens = [], [], [], [0]
    columns: list[dict[str, list[torch.Tensor]]] = [
        {f.name: [] for f in dataclasses.fields(UnrollStep)} for _ in range(num_steps)
    ]
    num_queries = [0] * num_steps
    for index, sample in enumerate(samples):
        plan = _plan_sample(sample.loss_mask.numpy(), num_steps, every_row)
        if not plan.num_rows:
            continue
        start = cu_seqlens[-1]
        read = read_rows(sample, of_layers=of_layers)
        if input_hidden is not None:
            read = input_hidden[index]
        hidden.append(read[: plan.num_rows])
        next_ids.append(sample.input_ids[1 : plan.num_rows + 1])
        positions.append(torch.arange(plan.num_rows))
        cu_seqlens.append(start + plan.num_rows)
        for k, column in enumerate(columns):
            rows, active = plan.needed[k], torch.from_numpy(plan.active[k])
            before = plan.needed[k - 1] if k else np.arange(plan.num_rows)
            parents = torch.from_numpy(np.searchsorted(before, rows))
            column["rows_N"].append(torch.from_numpy(rows) + start)
            column["parent_N"].append(parents + (num_queries[k - 1] if k else start))
            column["ids_N"].append(sample.input_ids[rows + 1 + k])
            column["active_A"].append(
                torch.from_numpy(np.searchsorted(rows, plan.active[k])) + num_queries[k]
            )
            column["labels_A"].append(sample.input_ids[active + 2 + k])
            column["target_AD"].append(sample.hidden[active + 1 + k])
            if target_lse is not None:
                column["target_lse_A"].append(target_lse[index][active + 1 + k])
        # only now: the parents of step k + 1 count rows before this sample
        num_queries = [n + len(rows) for n, rows in zip(num_queries, plan.needed, strict=True)]
    if not hidden:
        return idle_batch(
            samples[0].hidden.shape[1],
            num_steps=num_steps,
            with_lse=target_lse is not None,
            input_size=read_rows(samples[0], of_layers=of_layers).shape[1],
        )
    steps = tuple(_join_step(column, tuple(cu_seqlens)) for column in columns)
    return HeadBatch(
        torch.cat(hidden), torch.cat(next_ids), torch.cat(positions), tuple(cu_seqlens), steps
    )


def read_rows(sample: Sample, *, of_layers: bool) -> torch.Tensor:
    """What a head reads of the target: ``g``, or the residual streams ``[T, E]``."""
    if not of_layers:
        return sample.hidden
    assert sample.layers is not None, "the head reads residual streams, the sample has none"
    return sample.layers


def _join_step(column: dict[str, list[torch.Tensor]], cu_seqlens: tuple[int, ...]) -> UnrollStep:
    joined = {name: torch.cat(parts) for name, parts in column.items() if parts}
    return UnrollStep(
        rows_N=joined["rows_N"],
        parent_N=joined["parent_N"],
        ids_N=joined["ids_N"],
        active_A=joined["active_A"],
        labels_A=joined["labels_A"],
        target_AD=joined["target_AD"],
        blocks=cut_queries(joined["rows_N"], cu_seqlens),
        target_lse_A=joined.get("target_lse_A"),
    )


def idle_batch(
    hidden_size: int, *, num_steps: int, with_lse: bool = False, input_size: int = 0
) -> HeadBatch:
    """One row at position 0, no loss anywhere: what a rank steps with that has nothing to do.

    ``input_size``: columns that the head reads, where these are not ``hidden_size``.
    """
    none = torch.empty(0, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    lse = torch.empty(0) if with_lse else None
    idle_block = (QueryBlock(0, 1, 0, 1, 0),)
    steps = tuple(
        UnrollStep(zero, zero, zero, none, none, torch.empty(0, hidden_size), idle_block, lse)
        for _ in range(num_steps)
    )
    return HeadBatch(torch.zeros(1, input_size or hidden_size), zero, zero, (0, 1), steps)


def plan_epoch(
    lengths: Sequence[int], *, tokens_per_step: int, seed: int, epoch: int
) -> list[list[int]]:
    """Sample indices of every optimiser step of one epoch.

    The order depends on (seed, epoch) alone, so a step holds the same samples at any world size. A
    step is closed as soon as it has ``tokens_per_step`` tokens.
    """
    order = np.random.default_rng((seed, epoch)).permutation(len(lengths))
    steps: list[list[int]] = []
    current: list[int] = []
    tokens = 0
    for index in order.tolist():
        current.append(index)
        tokens += int(lengths[index])
        if tokens >= tokens_per_step:
            steps.append(current)
            current, tokens = [], 0
    if current:
        steps.append(current)
    return steps


def choose_part(lengths: Sequence[int], *, max_tokens: int, seed: int) -> list[int]:
    """Indices of a random part of the samples of at most ``max_tokens`` tokens, ascending; all of
    them for 0. The part of one seed lies in every larger part of it; at least one sample.
    """
    if not max_tokens:
        return list(range(len(lengths)))
    order = np.random.default_rng(seed).permutation(len(lengths))
    totals = np.cumsum(np.asarray(lengths, dtype=np.int64)[order])
    count = max(1, int(np.searchsorted(totals, max_tokens, side="right")))
    return sorted(order[:count].tolist())


def split_step(
    indices: Sequence[int], lengths: Sequence[int], *, num_parts: int
) -> list[list[int]]:
    """Deal one step's samples to ``num_parts`` micro-batches, longest first to the lightest part.

    Parts may be empty when there are fewer samples than parts.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for index in sorted(indices, key=lambda i: (-int(lengths[i]), i)):
        lightest = loads.index(min(loads))
        parts[lightest].append(index)
        loads[lightest] += int(lengths[index])
    return parts
