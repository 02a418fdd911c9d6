"""A decoder block as one kernel sees it: where its weights lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.cpu_kernels import BlockPointers
from runtime.linear import Linear
from runtime.ops import NormWeight
from runtime.panel_linear import PANEL, PanelLinear


@dataclass(frozen=True)
class FusedBlock:
    """``pointers`` into tensors of the block, which lives at least as long; ``inner``: MLP rows."""

    pointers: BlockPointers
    inner: int


def fuse_block(
    norms: Mapping[str, NormWeight | None],
    *,
    qkv: Linear,
    out: Linear,
    gate_up: Linear,
    down: Linear,
) -> FusedBlock | None:
    """``norms``: ``input_norm``, ``post_norm``, ``q_norm`` and ``k_norm``, all of one epsilon.

    ``None`` where a linear is no :class:`PanelLinear`, widths are no whole panels, or query, key
    and value read something wider than the residual stream.
    """
    if qkv.in_features != out.out_features:
        return None
    linears = {"qkv": qkv, "out": out, "gate_up": gate_up, "down": down}
    pointers = BlockPointers()
    for name, linear in linears.items():
        if not isinstance(linear, PanelLinear):
            return None
        setattr(pointers, name, linear.panels.data_ptr())
        if linear.bias_O is not None:
            setattr(pointers, f"{name}_bias", linear.bias_O.data_ptr())
    if out.out_features % PANEL or gate_up.out_features % (2 * PANEL):
        return None
    for name, norm in norms.items():
        if norm is not None:
            setattr(pointers, name, norm.weight_D.data_ptr())
            pointers.eps = norm.eps
    return FusedBlock(pointers, gate_up.out_features // 2)
