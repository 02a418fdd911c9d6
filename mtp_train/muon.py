"""Muon for the matrices of a head, at every ZeRO stage; AdamW for everything else.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) steps along the momentum of a
matrix with all its singular values brought to about one. The step is scaled so that its entries are
as large as AdamW's (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2): rates mean
about the same to both.

DeepSpeed hands its optimiser flat pieces of a group of parameters, one per rank. Every matrix is a
group of its own here, so that a piece is one of a known matrix: ranks put its momentum together,
compute the same step, and each takes its piece of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mtp_train.optim import GatedAdamW
from runtime.parallel import ProcessGroup

_MOMENTUM = 0.95
_RMS = 0.2  # of AdamW's usual step, in units of the learning rate
_VECTOR_RATE = 0.2  # AdamW's learning rate, as a share of that of the matrices
# Newton-Schulz: a quintic that pushes every singular value in (0, 1] to within 0.7 and 1.2.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class GatedMuon(GatedAdamW):
    """Groups with a ``matrix_shape`` hold one matrix, or one rank's flat piece of it padded to
    equal pieces; all others are AdamW's. See :class:`GatedAdamW` for the gate.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, ranks: ProcessGroup, **options: Any
    ) -> None:
        super().__init__(groups, **options)
        self._ranks = ranks

    def __setstate__(self, state: dict[str, Any]) -> None:
        """AdamW's loading looks for a count of steps in every state."""
        for kept in state.get("state", {}).values():
            kept.setdefault("step", torch.zeros(()))
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.is_closed:
            return None
        groups = self.param_groups
        for group in groups:
            if "matrix_shape" in group:
                for piece in group["params"]:
                    if piece.grad is not None:
                        self._step_matrix(piece, piece.grad, group)
        try:
            self.param_groups = [group for group in groups if "matrix_shape" not in group]
            return super().step(closure)
        finally:
            self.param_groups = groups

    def _step_matrix(
        self, piece: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[piece]
        rows, columns = group["matrix_shape"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(piece)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        ahead = torch.lerp(gradient, momentum, _MOMENTUM)  # Nesterov
        if is_piece := piece.dim() == 1:
            whole = self._ranks.all_gather(ahead).flatten()
            ahead = whole[: rows * columns].view(rows, columns)
        step = orthogonalise(ahead).mul_(_RMS * math.sqrt(max(rows, columns)))
        if is_piece:
            step = _cut_piece(step.flatten(), len(piece), self._ranks.rank)
        piece.mul_(1 - group["lr"] * group["weight_decay"])
        piece.add_(step.to(piece.dtype), alpha=-group["lr"])


def _cut_piece(step: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """A rank's ``size`` entries of all, zeros behind the last one."""
    own = step[rank * size : (rank + 1) * size]
    return own if len(own) == size else torch.cat((own, own.new_zeros(size - len(own))))


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """``U S' V^T`` of ``matrix = U S V^T`` with ``S'`` about one, by Newton-Schulz iterations in
    bfloat16 (as in the source); fp32 ``[M, N]``.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix / (matrix.norm() + 1e-7)).bfloat16()
    x = x.t().contiguous() if is_tall else x
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if is_tall else x).float()


def make_muon(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    ranks: ProcessGroup,
) -> GatedMuon:
    """Muon for matrices but ``lm_head``'s, whose rows are one token's each; AdamW for the rest, at
    a fifth of the rate and, norm weights, without decay. ``ranks``: those that hold pieces.
    """
    groups: list[dict[str, Any]] = []
    for name, parameter in parameters:
        if parameter.dim() == 2 and not name.startswith("lm_head"):
            shape = tuple(parameter.shape)
            groups.append(
                {"params": [parameter], "weight_decay": weight_decay, "matrix_shape": shape}
            )
        else:
            decay = weight_decay if parameter.dim() > 1 else 0.0
            groups.append(
                {"params": [parameter], "weight_decay": decay, "rate_share": _VECTOR_RATE}
            )
    return GatedMuon(groups, ranks=ranks, lr=learning_rate, betas=betas, fused=True)
