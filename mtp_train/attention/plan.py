"""Which keys a query row sees in training, as data: contracts of all attention backends.

Recycled step k of row i sees what a step-wise decode with a K/V cache sees: the step-0 keys of its
sample at rows ``<= i`` (the prefix) and the keys of its own steps ``1..k`` (the chain), nobody
else's. Samples never see each other.

Shape legend: S packed key rows, N query rows, M rows of an earlier step, G key/value heads, C head
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

QUERY_BLOCK = 64  # query rows whose scores are alive at once


@dataclass(frozen=True)
class QueryBlock:
    """Query rows ``q_start:q_end`` of one sample attend to key rows ``k_start:k_end``.

    ``first_row`` is the packed row of the first of them, ``k_end - 1`` that of the last.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    first_row: int


@dataclass(frozen=True)
class AttentionPlan:
    """Blocks (host) that cover every query row, and the packed row each query sits at."""

    blocks: tuple[QueryBlock, ...]
    rows_N: torch.Tensor  # int64, device


@dataclass(frozen=True)
class ChainStep:
    """Keys and values of one recycled step, and which of its rows each query row continues.

    The rows of a step are a subset of those of the step before, so an earlier step's tensors are
    pointed into, not copied: what K steps hold grows with K, not with its square.
    """

    k_MGC: torch.Tensor
    v_MGC: torch.Tensor
    rows_N: torch.Tensor  # int64, ascending, no row twice


def cut_queries(
    rows_N: torch.Tensor, cu_seqlens: Sequence[int], *, block: int = QUERY_BLOCK
) -> tuple[QueryBlock, ...]:
    """Cut ascending query rows (int64, host) into blocks that never cross a sample border.

    ``cu_seqlens`` are the samples' borders in packed rows, starting with 0.
    """
    borders = torch.searchsorted(rows_N, torch.tensor(cu_seqlens)).tolist()
    blocks = []
    for start, begin, end in zip(cu_seqlens, borders, borders[1:], strict=False):
        for q_start in range(begin, end, block):
            q_end = min(q_start + block, end)
            first, last = int(rows_N[q_start]), int(rows_N[q_end - 1])
            blocks.append(QueryBlock(q_start, q_end, start, last + 1, first))
    return tuple(blocks)


def sample_spans(blocks: Sequence[QueryBlock]) -> tuple[QueryBlock, ...]:
    """The blocks of one sample joined: one span per sample that has queries."""
    spans: list[QueryBlock] = []
    for block in blocks:
        if spans and spans[-1].k_start == block.k_start:
            spans[-1] = replace(spans[-1], q_end=block.q_end, k_end=block.k_end)
        else:
            spans.append(block)
    return tuple(spans)


def picked(parts: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The chain entries of every query row, ``[N, G, J, C]``, from one ``[M, G, C]`` a step."""
    return torch.stack([p[index] for p, index in zip(parts, rows, strict=True)], 2)


def extend_chain(
    chain: Sequence[ChainStep],
    parent_N: torch.Tensor,
    k_NGC: torch.Tensor,
    v_NGC: torch.Tensor,
) -> tuple[ChainStep, ...]:
    """The chain of the next step's rows: ``parent_N`` picks them from the rows of the last one."""
    rows_N = torch.arange(len(parent_N), device=parent_N.device)
    return (
        *(replace(step, rows_N=step.rows_N[parent_N]) for step in chain),
        ChainStep(k_NGC, v_NGC, rows_N),
    )
