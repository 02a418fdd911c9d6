"""The shape of a draft tree: which nodes a fixed tree has, and who is whose ancestor.

A tree has rows: row 0 is the root (the last token, not drafted), row ``i`` its i-th node. Rows are
in breadth-first order, so a parent comes before its children and row ``i`` is at depth at most
``i``. ``parents`` holds the parent's *row*.

Shape legend: B requests, N nodes, R = N + 1 rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeShape:
    """A tree that is known beforehand: node ``i`` (row ``i + 1``) is its parent's child number
    ``ranks[i]`` (0: the most likely), at ``depths[i]`` (from 1).
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def num_children(self) -> int:
        """Most children that any node or the root has."""
        return max(self.ranks) + 1

    def expanded_rows(self, depth: int) -> tuple[int, ...]:
        """Rows at ``depth`` that have children: the draft runs on them, level by level."""
        inner = set(self.parents)
        return tuple(
            row for row, level in enumerate(self.depths, start=1) if level == depth and row in inner
        )


def fixed_tree(num_nodes: int, *, depth: int, rates: Sequence[float]) -> TreeShape:
    """The ``num_nodes`` nodes that are most likely to be accepted, at most ``depth`` deep.

    ``rates[r]`` is how often the draft's candidate number ``r`` is the target's token, falling with
    ``r``. A node is reached when all of its path is right: its chance is the product of the rates.
    """
    assert num_nodes > 0, "a tree has at least one node"
    # Candidates by falling chance; every candidate's chance is at most that of the node it enters
    # behind (its parent, or the sibling before it), so the first ones out are the best.
    waiting: list[tuple[float, tuple[int, ...]]] = [(-rates[0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while waiting and len(chosen) < num_nodes:
        chance, path = heapq.heappop(waiting)
        chosen.append(path)
        if len(path) < depth:
            heapq.heappush(waiting, (chance * rates[0], (*path, 0)))
        rank = path[-1] + 1
        if rank < len(rates):
            sibling = chance / rates[path[-1]] * rates[rank]
            heapq.heappush(waiting, (sibling, (*path[:-1], rank)))
    chosen.sort(key=lambda path: (len(path), path))
    row_of = {path: row for row, path in enumerate([(), *chosen])}
    return TreeShape(
        parents=tuple(row_of[path[:-1]] for path in chosen),
        ranks=tuple(path[-1] for path in chosen),
        depths=tuple(len(path) for path in chosen),
    )


def visible_rows(parents_BN: torch.Tensor, depth: int) -> torch.Tensor:
    """Bool ``[B, R, R]``: row i sees row j iff j is i itself or one of its ancestors.

    ``parents_BN`` are rows; no node is deeper than ``depth``. Never waits for the device.
    """
    batch, num_nodes = parents_BN.shape
    parents_BR = torch.cat([parents_BN.new_zeros(batch, 1), parents_BN], 1)
    seen_BR = torch.arange(num_nodes + 1, device=parents_BN.device).expand(batch, -1)
    visible_BRR = torch.zeros(
        batch, num_nodes + 1, num_nodes + 1, dtype=torch.bool, device=parents_BN.device
    )
    for _ in range(depth + 1):
        visible_BRR.scatter_(2, seen_BR[..., None], True)
        seen_BR = parents_BR.gather(1, seen_BR)
    return visible_BRR
