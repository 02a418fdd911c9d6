"""Latent attention and experts as parts of a decoder block, of a target or of a head."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.attention.base import AttentionBackend
from runtime.layer_parts import ExpertSpec, LatentSpec
from runtime.layers import Attention, Mlp, TensorSource
from runtime.linear import LinearMaker
from runtime.models.mla import LatentAttention
from runtime.moe import ExpertMlp
from runtime.ops import BlockOps
from runtime.parallel import ProcessGroup


def sparse_parts(
    latent: LatentSpec | None,
    experts: ExpertSpec | None,
    num_heads: int,
    take: TensorSource,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    ops: BlockOps,
    make_linear: LinearMaker,
    group: ProcessGroup,
) -> tuple[Attention | None, Mlp | None]:
    """What takes the place of a block's attention and MLP, for :func:`runtime.layers.build_block`,
    with its arguments; ``None`` where the plain part stays. ``num_heads``: this rank's query heads.
    """
    attention: Attention | None = None
    mlp: Mlp | None = None
    if latent is not None:
        attention = LatentAttention(
            latent, num_heads, take, shapes, ops=ops, make_linear=make_linear, group=group
        )
    if experts is not None:
        mlp = ExpertMlp(experts, take, shapes, ops=ops, make_linear=make_linear, group=group)
    return attention, mlp


def check_backend(backend: AttentionBackend, latent: LatentSpec | None, owner: str) -> None:
    """Raise ``ValueError`` where ``backend`` does not compute the attention of ``owner``."""
    if latent is not None and not backend.has_latent:
        raise ValueError(
            f"{type(backend).__name__} has no latent attention ({owner}); use "
            "runtime.attention=sdpa"
        )


def why_not_recorded(latent: LatentSpec | None, experts: ExpertSpec | None) -> str | None:
    """Why CUDA graphs cannot record layers with these parts; ``None``: they can."""
    if latent is not None:
        return "latent attention runs through SDPA, which is not recorded"
    if experts is not None:
        return "the host has to know which experts were chosen"
    return None
