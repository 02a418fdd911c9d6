"""Norms, rotary embedding and the decoder block of targets and draft heads, with its dense parts.

Norms are computed in float32 and rounded once. Rotary angles are computed in float32 from the
positions of each batch, so no table bounds the length and nothing is lost at long positions.

Shape legend: N rows, D model width, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from runtime.attention.base import AttentionBackend
from runtime.fused_block import FusedBlock, fuse_block
from runtime.head_spec import RopeSpec
from runtime.kv_cache import KVPool
from runtime.linear import Linear, LinearMaker, LinearSource, TensorSource
from runtime.ops import BlockOps, NormWeight, RotaryAngles
from runtime.parallel import ProcessGroup
from runtime.parallel_layers import RowParallelLinear
from runtime.rope import attention_factor, inverse_frequencies

_FIRST_POSITIONS = 1024  # whose angles are computed at once


@dataclass(frozen=True)
class BlockShape:
    """What one decoder block needs to know besides its weights."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


def norm_weight(weight_D: torch.Tensor, *, eps: float, plus_one: bool = False) -> NormWeight:
    """RMSNorm parameters; ``plus_one`` is the Gemma form, the stored weight is added to one."""
    weight = weight_D.float()
    return NormWeight(weight + 1.0 if plus_one else weight, eps)


class RotaryEmbedding:
    """Half-layout rotary embedding (element ``c`` is paired with ``c + C/2``)."""

    def __init__(self, spec: RopeSpec, head_dim: int, *, device: torch.device) -> None:
        self._inverse = inverse_frequencies(spec, head_dim).to(device)
        self._factor = attention_factor(spec)
        self._tables: dict[torch.dtype, RotaryAngles] = {}

    def angles(self, positions_N: torch.Tensor, dtype: torch.dtype, *, end: int) -> RotaryAngles:
        """Angles in float32, rounded to ``dtype`` once per batch (as transformers does).

        All positions are below ``end``, as the host knows. On a CPU, where a step pays for every
        operator, angles are looked up; the table grows by powers of two.
        """
        if not positions_N.is_cpu:
            return self._compute(positions_N, dtype)
        table = self._tables.get(dtype)
        if table is None or len(table.cos_NC) < end:
            size = max(_FIRST_POSITIONS, 1 << (end - 1).bit_length())
            table = self._tables[dtype] = self._compute(torch.arange(size), dtype)
        return RotaryAngles(
            table.cos_NC.index_select(0, positions_N), table.sin_NC.index_select(0, positions_N)
        )

    def _compute(self, positions_N: torch.Tensor, dtype: torch.dtype) -> RotaryAngles:
        angle = positions_N.to(torch.float32)[:, None] * self._inverse
        cos, sin = angle.cos() * self._factor, angle.sin() * self._factor
        return RotaryAngles(
            torch.cat((cos, cos), -1).to(dtype),
            torch.cat((-sin, sin), -1).to(dtype),
        )


class Attention(Protocol):
    """What mixes the rows of a sequence, with the cache that it reads and writes."""

    def __call__(
        self,
        inputs_NI: torch.Tensor,
        angles: RotaryAngles,
        *,
        backend: AttentionBackend,
        plan: Any,
        pool: KVPool,
        layer: int,
    ) -> torch.Tensor:
        """What is to be added to the residual stream, ``[N, D]``."""

    def own_part(
        self,
        inputs_NI: torch.Tensor,
        angles: RotaryAngles,
        *,
        backend: AttentionBackend,
        plan: Any,
        pool: KVPool,
        layer: int,
    ) -> torch.Tensor:
        """This rank's part of it: the sum over the ranks is what a call gives."""


class Mlp(Protocol):
    """What works on each row by itself."""

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        """What is to be added to the residual stream, ``[N, D]``."""

    def own_part(self, x_ND: torch.Tensor) -> torch.Tensor:
        """This rank's part of it: the sum over the ranks is what a call gives."""


class GroupedAttention:
    """Grouped-query attention, with merged QKV and, where they are listed, head norms.

    ``shapes``, ``take`` and ``group`` as in :func:`build_block`.
    """

    def __init__(
        self,
        shape: BlockShape,
        take: TensorSource,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        ops: BlockOps,
        make_linear: LinearMaker,
        group: ProcessGroup,
        plus_one_norms: bool = False,
    ) -> None:
        self.shape = shape
        self.ops = ops
        self.q_norm: NormWeight | None = None
        self.k_norm: NormWeight | None = None
        if "self_attn.q_norm.weight" in shapes:
            self.q_norm, self.k_norm = (
                norm_weight(
                    take(f"self_attn.{name}.weight"), eps=shape.norm_eps, plus_one=plus_one_norms
                )
                for name in ("q_norm", "k_norm")
            )
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        self.qkv = merge_linears(take, shapes, names, make_linear)
        out = merge_linears(take, shapes, ["self_attn.o_proj"], make_linear)
        self.out = RowParallelLinear(out, group)

    def __call__(
        self,
        inputs_NI: torch.Tensor,
        angles: RotaryAngles,
        *,
        backend: AttentionBackend,
        plan: Any,
        pool: KVPool,
        layer: int,
    ) -> torch.Tensor:
        return self.out.add_up(
            self.own_part(inputs_NI, angles, backend=backend, plan=plan, pool=pool, layer=layer)
        )

    def own_part(
        self,
        inputs_NI: torch.Tensor,
        angles: RotaryAngles,
        *,
        backend: AttentionBackend,
        plan: Any,
        pool: KVPool,
        layer: int,
    ) -> torch.Tensor:
        shape = self.shape
        rows, num_heads = inputs_NI.shape[0], shape.num_heads
        num_rotated = num_heads + shape.num_kv_heads
        qkv = self.qkv(inputs_NI).view(rows, num_rotated + shape.num_kv_heads, shape.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            self.ops.norm_heads(qkv[:, :num_heads], self.q_norm)
            self.ops.norm_heads(qkv[:, num_heads:num_rotated], self.k_norm)
        self.ops.rotate(qkv, num_rotated, angles)
        q_NHC, k_NGC, v_NGC = qkv.split((num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        attended = backend.run(plan, pool, layer, q_NHC, k_NGC, v_NGC)
        return self.out.linear(attended.view(rows, num_heads * shape.head_dim))


class GatedMlp:
    """``down(silu(gate) * up)``, with merged gate and up; the tensors below ``prefix``."""

    def __init__(
        self,
        take: TensorSource,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        ops: BlockOps,
        make_linear: LinearMaker,
        group: ProcessGroup,
        prefix: str = "mlp.",
    ) -> None:
        self.ops = ops
        names = [prefix + "gate_proj", prefix + "up_proj"]
        self.gate_up = merge_linears(take, shapes, names, make_linear)
        down = merge_linears(take, shapes, [prefix + "down_proj"], make_linear)
        self.down = RowParallelLinear(down, group)

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self.down(self.partial(x_ND))

    def own_part(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self.down.linear(self.partial(x_ND))

    def partial(self, x_ND: torch.Tensor) -> torch.Tensor:
        """What ``down`` reads."""
        return self.ops.silu_mul(self.gate_up(x_ND))


class DecoderBlock:
    """Pre-norm attention and MLP. A norm that is ``None`` does nothing.

    ``group``: the ranks over which its parts are spread. ``fused``: where one kernel finds all of
    it, if there is one.
    """

    def __init__(
        self,
        shape: BlockShape,
        attention: Attention,
        mlp: Mlp,
        *,
        input_norm: NormWeight | None,
        post_attention_norm: NormWeight | None,
        ops: BlockOps,
        group: ProcessGroup,
        fused: FusedBlock | None = None,
    ) -> None:
        self.shape = shape
        self.group = group
        self.attention = attention
        self.mlp = mlp
        self.input_norm = input_norm
        self.post_attention_norm = post_attention_norm
        self.ops = ops
        self.fused = fused

    def __call__(
        self,
        x_ND: torch.Tensor,
        delta_ND: torch.Tensor | None,
        angles: RotaryAngles,
        *,
        backend: AttentionBackend,
        plan: Any,
        pool: KVPool,
        layer: int,
    ) -> torch.Tensor:
        """Update the residual stream ``x`` in place; return what is still to be added to it.

        The sum is left to whoever norms it next (``delta`` here is that of the block before), so
        that addition and norm are one pass over the rows.
        """
        normed_ND = self.add_norm(x_ND, delta_ND, self.input_norm)
        return self.behind_first_norm(
            x_ND, normed_ND, angles, backend=backend, plan=plan, pool=pool, layer=layer
        )

    def behind_first_norm(
        self,
        x_ND: torch.Tensor,
        inputs_NI: torch.Tensor,
        angles: RotaryAngles,
        *,
        backend: AttentionBackend,
        plan: Any,
        pool: KVPool,
        layer: int,
    ) -> torch.Tensor:
        """All but the first norm: ``inputs`` is what the attention reads."""
        delta_ND = self.attention(
            inputs_NI, angles, backend=backend, plan=plan, pool=pool, layer=layer
        )
        return self.mlp(self.add_norm(x_ND, delta_ND, self.post_attention_norm))

    def add_norm(
        self, x_ND: torch.Tensor, delta_ND: torch.Tensor | None, norm: NormWeight | None
    ) -> torch.Tensor:
        """Add ``delta`` to the residual stream in place; what the next part reads."""
        if norm is not None:
            return self.ops.add_rms_norm(x_ND, delta_ND, norm)
        return x_ND if delta_ND is None else x_ND.add_(delta_ND)


def build_block(
    shape: BlockShape,
    take: TensorSource,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    ops: BlockOps,
    make_linear: LinearMaker,
    group: ProcessGroup,
    plus_one_norms: bool = False,
    attention: Attention | None = None,
    mlp: Mlp | None = None,
) -> DecoderBlock:
    """A block of a dense decoder, but for the parts that are given.

    ``shapes`` lists the block's tensors without their layer prefix (``self_attn.q_proj.weight`` …);
    ``take`` hands them over one at a time, so that loading holds one of them beside the merged one.
    A norm or bias that is not listed does nothing. On several ranks ``shape``, ``shapes`` and
    ``take`` are those of this rank's part (:mod:`runtime.sharding`); the residual stream is whole
    on each.
    """
    norms = {
        name: norm_weight(take(name + ".weight"), eps=shape.norm_eps, plus_one=plus_one_norms)
        for name in ("input_layernorm", "post_attention_layernorm")
        if name + ".weight" in shapes
    }
    input_norm, post_norm = norms.get("input_layernorm"), norms.get("post_attention_layernorm")
    if attention is None:
        attention = GroupedAttention(
            shape,
            take,
            shapes,
            ops=ops,
            make_linear=make_linear,
            group=group,
            plus_one_norms=plus_one_norms,
        )
    if mlp is None:
        mlp = GatedMlp(take, shapes, ops=ops, make_linear=make_linear, group=group)
    fused = None
    is_alone = group.world_size == 1
    if is_alone and isinstance(attention, GroupedAttention) and isinstance(mlp, GatedMlp):
        fused = fuse_block(
            {
                "input_norm": input_norm,
                "post_norm": post_norm,
                "q_norm": attention.q_norm,
                "k_norm": attention.k_norm,
            },
            qkv=attention.qkv,
            out=attention.out.linear,
            gate_up=mlp.gate_up,
            down=mlp.down.linear,
        )
    return DecoderBlock(
        shape,
        attention,
        mlp,
        input_norm=input_norm,
        post_attention_norm=post_norm,
        ops=ops,
        group=group,
        fused=fused,
    )


def run_blocks(
    blocks: Sequence[DecoderBlock],
    x_ND: torch.Tensor,
    angles: RotaryAngles,
    *,
    backend: AttentionBackend,
    plan: Any,
    pool: KVPool,
    first_layer: int = 0,
) -> torch.Tensor | None:
    """Update the residual stream ``x`` in place over the layers of ``pool`` from ``first_layer``
    on, one for each block; return what is still to be added to it, if anything.
    """
    if not blocks or backend.run_blocks(blocks, x_ND, angles, plan, pool, first_layer):
        return None
    delta_ND: torch.Tensor | None = None
    for layer, block in enumerate(blocks, start=first_layer):
        delta_ND = block(x_ND, delta_ND, angles, backend=backend, plan=plan, pool=pool, layer=layer)
    return delta_ND


def merge_linears(
    take: TensorSource,
    shapes: Mapping[str, tuple[int, ...]],
    names: list[str],
    make_linear: LinearMaker,
) -> Linear:
    """One linear whose outputs are those of ``names``, one after the other."""
    bias = None
    if names[0] + ".bias" in shapes:
        bias = _concat_rows(take, shapes, [name + ".bias" for name in names])
    if isinstance(take, LinearSource):
        linear = take.linear(names, bias, make_linear)
        if linear is not None:
            return linear
    weight = _concat_rows(take, shapes, [name + ".weight" for name in names])
    return make_linear(weight, bias)


def _concat_rows(
    take: TensorSource, shapes: Mapping[str, tuple[int, ...]], names: list[str]
) -> torch.Tensor:
    if len(names) == 1:
        return take(names[0])
    rows = [shapes[name][0] for name in names]
    merged: torch.Tensor | None = None
    for index, name in enumerate(names):
        part = take(name)
        if merged is None:
            merged = part.new_empty((sum(rows), *part.shape[1:]))
        start = sum(rows[:index])
        merged[start : start + rows[index]] = part
        del part
    assert merged is not None, "no tensors to merge"
    return merged
