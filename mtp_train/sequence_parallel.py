"""Sequence parallelism after DeepSpeed Ulysses (arXiv:2309.14509): rows or heads, never both whole.

Each rank of a group has a share of a batch's rows; around the attention, which needs all rows,
they exchange rows against heads. Row ``s`` of a pack belongs to rank ``s % P`` at every unroll
step, because step k continues the state of step k - 1; striding shares out answers evenly wherever
they lie. A rank's loss is that of its own rows, and the gradients of the ranks add up to the
gradient.

Shape legend: S packed rows, N query rows of one step, A active rows, P ranks of the group, H heads,
C head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from mtp_train.packing import HeadBatch, RowLayout, UnrollStep, WholeRows
from runtime.head_spec import HeadSpec
from runtime.parallel import TorchProcessGroup


class HeadExchange(ABC):
    """Rows of a rank with all heads, or all rows with a rank's heads."""

    @abstractmethod
    def to_heads(self, x_nHC: torch.Tensor, layout: RowLayout | None) -> torch.Tensor:
        """``[n, H, C]`` of this rank's rows -> ``[N, H/P, C]`` of all rows, in their order."""

    @abstractmethod
    def to_rows(self, x_NHC: torch.Tensor, layout: RowLayout | None) -> torch.Tensor:
        """The inverse of :meth:`to_heads`."""


class Alone(HeadExchange):
    """One rank has all rows and all heads."""

    def to_heads(self, x_nHC: torch.Tensor, layout: RowLayout | None) -> torch.Tensor:
        return x_nHC

    def to_rows(self, x_NHC: torch.Tensor, layout: RowLayout | None) -> torch.Tensor:
        return x_NHC


ALONE = Alone()


class Ulysses(HeadExchange):
    """DeepSpeed's differentiable all-to-all; every call is a collective of ``group``.

    It wants equal shares, so shares are filled up with zero rows. Works once DeepSpeed's
    communication is initialised, over gloo as over nccl.
    """

    def __init__(self, group: TorchProcessGroup) -> None:
        self._group = group.group

    def to_heads(self, x_nHC: torch.Tensor, layout: RowLayout | None) -> torch.Tensor:
        assert layout is not None, "a batch for several ranks has a layout"
        filled = F.pad(x_nHC, (0, 0, 0, 0, 0, layout.width - len(x_nHC)))
        return self._exchange(filled, scatter=2, gather=1).index_select(0, layout.places_N)

    def to_rows(self, x_NHC: torch.Tensor, layout: RowLayout | None) -> torch.Tensor:
        assert layout is not None, "a batch for several ranks has a layout"
        filled = x_NHC.new_zeros(layout.num_places, *x_NHC.shape[1:])
        filled = filled.index_copy(0, layout.places_N, x_NHC)
        return self._exchange(filled, scatter=1, gather=2)[: layout.num_rows]

    def _exchange(self, x: torch.Tensor, *, scatter: int, gather: int) -> torch.Tensor:
        from deepspeed.sequence.layer import _SeqAllToAll

        all_to_all: Any = _SeqAllToAll.apply
        out: torch.Tensor = all_to_all(self._group, x[None], scatter, gather, 0)[0]
        return out


def check_divides_heads(spec: HeadSpec, width: int) -> None:
    """Raise ``ValueError`` unless ``width`` ranks can share out the head's attention heads; a head
    without attention has its rows shared out alone.
    """
    if not spec.num_layers:
        return
    for name in ("num_heads", "num_kv_heads"):
        heads = getattr(spec, name)
        if heads % width:
            raise ValueError(
                f"trainer.sequence_parallel={width}: this head has {name}={heads}, which "
                f"{width} ranks cannot share out; use a divisor of both numbers of heads"
            )


def share_rows(batch: HeadBatch, *, rank: int, num_ranks: int) -> HeadBatch:
    """``rank``'s share of a batch (host tensors) that every rank of the group has packed."""
    num_rows = batch.cu_seqlens[-1]
    own = slice(rank, None, num_ranks)
    steps: list[UnrollStep] = []
    before_N: torch.Tensor | None = None  # which rows of the step before are this rank's
    for step in batch.steps:
        is_own_N = step.rows_N % num_ranks == rank
        steps.append(_share_step(step, is_own_N, before_N, rank=rank, num_ranks=num_ranks))
        before_N = is_own_N
    return replace(
        batch,
        hidden_SD=batch.hidden_SD[own],
        next_ids_S=batch.next_ids_S[own],
        positions_S=batch.positions_S[own],
        steps=tuple(steps),
        layout=_lay_out(torch.arange(num_rows), rank=rank, num_ranks=num_ranks),
    )


def _share_step(
    step: UnrollStep,
    is_own_N: torch.Tensor,
    before_N: torch.Tensor | None,
    *,
    rank: int,
    num_ranks: int,
) -> UnrollStep:
    rows, parents = step.rows_N[is_own_N] // num_ranks, step.parent_N[is_own_N]
    is_own_A = is_own_N[step.active_A]
    return UnrollStep(
        rows_N=rows,
        parent_N=rows if before_N is None else _places_among(before_N)[parents],
        ids_N=step.ids_N[is_own_N],
        active_A=_places_among(is_own_N)[step.active_A[is_own_A]],
        labels_A=step.labels_A[is_own_A],
        target_AD=step.target_AD[is_own_A],
        blocks=step.blocks,
        target_lse_A=None if step.target_lse_A is None else step.target_lse_A[is_own_A],
        whole=WholeRows(
            step.rows_N, step.parent_N, _lay_out(step.rows_N, rank=rank, num_ranks=num_ranks)
        ),
    )


def _places_among(chosen_N: torch.Tensor) -> torch.Tensor:
    """Where each chosen entry is among the chosen ones."""
    return chosen_N.cumsum(0) - 1


def _lay_out(rows_N: torch.Tensor, *, rank: int, num_ranks: int) -> RowLayout:
    owner_N = rows_N % num_ranks
    counts = torch.bincount(owner_N, minlength=num_ranks)
    width = max(1, int(counts.max()))
    places_N = torch.empty_like(rows_N)
    for number in range(num_ranks):
        own = owner_N == number
        places_N[own] = number * width + torch.arange(int(counts[number]))
    return RowLayout(int(counts[rank]), width, num_ranks * width, places_N)
