"""Layers that are spread over the ranks of a group. With a single process they cost a call.

What is cut by outputs needs no layer of its own: it is a plain linear with fewer outputs. What is
cut by inputs gives partial sums, which the ranks add up; what is cut by vocabulary is looked up
where it lies, and its logits are gathered, so that every rank has the same ones bit for bit.

Shape legend: N, M rows, D model width, I inputs, O outputs, V vocabulary, P vocabulary rows of one
rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn import functional as F

from runtime.linear import Linear
from runtime.parallel import ProcessGroup
from runtime.sharding import Shard, even_shard


class RowParallelLinear:
    """A linear whose inputs are cut: each rank multiplies its own, the results are added up."""

    def __init__(self, linear: Linear, group: ProcessGroup) -> None:
        self.linear = linear
        self._group = group

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        """This rank's inputs ``[M, I]`` -> all outputs ``[M, O]``, the same on every rank."""
        return self.add_up(self.linear(x_MI))

    def add_up(self, part_MO: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of what ``linear`` gave each of them."""
        return self._group.all_reduce(part_MO)

    def dense_weight(self) -> torch.Tensor:
        """This rank's plain weight."""
        return self.linear.dense_weight()


class Vocabulary(ABC):
    """Where the rows of embedding and ``lm_head`` lie."""

    shard: Shard  # of dimension 0

    @abstractmethod
    def lookup(self, weight_PD: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        """Rows of the whole matrix, ``[N, D]``; a copy, the same on every rank."""

    @abstractmethod
    def gather(self, logits_MP: torch.Tensor) -> torch.Tensor:
        """All logits ``[M, V]``, from every rank's own columns."""


class WholeVocabulary(Vocabulary):
    """All rows are here."""

    def __init__(self, size: int) -> None:
        self.shard = Shard(0, ((0, size),))

    def lookup(self, weight_PD: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids_N, weight_PD)

    def gather(self, logits_MP: torch.Tensor) -> torch.Tensor:
        return logits_MP


class ParallelVocabulary(Vocabulary):
    """Each rank holds equally many neighbouring rows; the last ones may be zeros."""

    def __init__(self, size: int, group: ProcessGroup) -> None:
        self._size = size
        self._group = group
        self.shard = even_shard(0, size, rank=group.rank, world_size=group.world_size)
        self._first = group.rank * self.shard.size

    def lookup(self, weight_PD: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        local_N = ids_N - self._first
        is_elsewhere_N = (local_N < 0) | (local_N >= self.shard.size)
        rows_ND = F.embedding(local_N.masked_fill(is_elsewhere_N, 0), weight_PD)
        return self._group.all_reduce(rows_ND.masked_fill_(is_elsewhere_N[:, None], 0.0))

    def gather(self, logits_MP: torch.Tensor) -> torch.Tensor:
        parts = self._group.all_gather(logits_MP)
        logits_MV = parts.transpose(0, 1).reshape(logits_MP.shape[0], -1)
        if logits_MV.shape[1] == self._size:
            return logits_MV
        return logits_MV[:, : self._size].contiguous()


def vocabulary_of(size: int, group: ProcessGroup) -> Vocabulary:
    """How ``size`` rows lie on the ranks of ``group``."""
    return WholeVocabulary(size) if group.world_size == 1 else ParallelVocabulary(size, group)
