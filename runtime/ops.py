"""The small operations between and behind a model's products: one interface, torch or CPU kernels.

Arithmetic is float32 between loads and stores in either. Shape legend: N rows, D model width, X
heads of any kind, C head width, I MLP width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from runtime.sampling import best_tokens
from runtime.spec.shift import ShiftedInputs, shift_inputs
from runtime.verify import Verified, accept_chain
from runtime.verify_tree import VerifiedTree, walk_tree


@dataclass(frozen=True)
class NormWeight:
    """An RMSNorm: float32 weight ``[D]`` (the one in ``1 + w`` already added) and epsilon."""

    weight_D: torch.Tensor
    eps: float


@dataclass(frozen=True)
class RotaryAngles:
    """Angles of one batch, both halves, in the model's dtype: ``x * cos + swap_halves(x) * sin``.

    The first half of ``sin`` is negative.
    """

    cos_NC: torch.Tensor
    sin_NC: torch.Tensor


class BlockOps(ABC):
    """What a decoder block computes besides linear products and attention."""

    @abstractmethod
    def add_rms_norm(
        self, x_ND: torch.Tensor, delta_ND: torch.Tensor | None, norm: NormWeight
    ) -> torch.Tensor:
        """Add ``delta`` to the residual stream ``x`` *in place*; return ``x``'s RMSNorm.

        ``x / sqrt(mean(x^2) + eps) * w`` in float32, rounded once to ``x``'s dtype.
        """

    @abstractmethod
    def norm_heads(self, heads_NXC: torch.Tensor, norm: NormWeight) -> None:
        """RMSNorm of every head in place, all with the same weight ``[C]``; rows may be strided.

        Arithmetic and rounding are those of :meth:`add_rms_norm`.
        """

    @abstractmethod
    def rotate(self, qkv_NXC: torch.Tensor, num_rotated: int, angles: RotaryAngles) -> None:
        """Rotate the first ``num_rotated`` heads in place; ``c`` is paired with ``c + C/2``."""

    @abstractmethod
    def silu_mul(self, gate_up_N2I: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``, ``[N, I]``; gate is the first half of the columns."""

    def argmax(self, logits_MV: torch.Tensor) -> torch.Tensor:
        """Best column of each row, int64 ``[M]``; the lowest on a tie."""
        return best_tokens(logits_MV)

    def accept_chain(self, tokens_BK1: torch.Tensor, draft_ids_BK: torch.Tensor) -> Verified:
        """As :func:`runtime.verify.accept_chain`."""
        return accept_chain(tokens_BK1, draft_ids_BK)

    def shift_inputs(
        self, ids_BK1: torch.Tensor, last_ids_B: torch.Tensor, num_emitted_B: torch.Tensor
    ) -> ShiftedInputs:
        """As :func:`runtime.spec.shift.shift_inputs`."""
        return shift_inputs(ids_BK1, last_ids_B, num_emitted_B)

    def walk_tree(
        self,
        tokens_BR: torch.Tensor,
        node_ids_BN: torch.Tensor,
        parents_BN: torch.Tensor,
        depth: int,
    ) -> VerifiedTree:
        """As :func:`runtime.verify_tree.walk_tree`."""
        return walk_tree(tokens_BR, node_ids_BN, parents_BN, depth)


class TorchOps(BlockOps):
    """Any device; also the reference of the fused kernels."""

    def add_rms_norm(
        self, x_ND: torch.Tensor, delta_ND: torch.Tensor | None, norm: NormWeight
    ) -> torch.Tensor:
        if delta_ND is not None:
            x_ND.add_(delta_ND)
        return _rms_norm(x_ND, norm)

    def norm_heads(self, heads_NXC: torch.Tensor, norm: NormWeight) -> None:
        heads_NXC.copy_(_rms_norm(heads_NXC, norm))

    def rotate(self, qkv_NXC: torch.Tensor, num_rotated: int, angles: RotaryAngles) -> None:
        x = qkv_NXC[:, :num_rotated]
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        x.mul_(angles.cos_NC[:, None]).addcmul_(swapped, angles.sin_NC[:, None])

    def silu_mul(self, gate_up_N2I: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_N2I.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def _rms_norm(x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (wide * scale * norm.weight_D).to(x.dtype)
