"""Which part of every tensor belongs to which rank of a tensor-parallel group.

Linears of a block are cut by heads and by columns of the MLP: query, key, value, gate and up by
outputs, ``o_proj`` and ``down_proj`` by inputs, whose partial sums the ranks add up. Embedding and
``lm_head`` are cut by vocabulary rows. Norms are whole everywhere, and so is what makes the latents
of latent attention.

Experts are cut by columns as an MLP is or, with ``expert_parallel``, dealt out whole; the experts
that all tokens pass are cut by columns in both.

But for whole experts, every rank has the same shapes. A key/value head goes to one rank with all of
its query heads; with fewer heads than ranks it is replicated and its query heads are shared out.
What does not divide is filled up with zero heads, zero columns and zero rows: they add exactly
nothing.

Shape legend: H query heads, G key/value heads, C head width, R = H/G.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.layer_parts import LatentSpec
from runtime.models.config import ModelConfig
from runtime.parallel import ProcessGroup

_EXPERTS = "mlp.experts."

ReadSlice = Callable[[int, int], torch.Tensor]  # (start, stop) along the cut dimension


@dataclass(frozen=True)
class Shard:
    """One rank's part of a tensor along ``dim``: ``(start, stop)`` runs of the whole, one after
    the other; a run of ``(-1, n)`` is ``n`` zeros.
    """

    dim: int
    runs: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(stop if start < 0 else stop - start for start, stop in self.runs)

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The part's shape, from the whole tensor's."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def is_whole(self, shape: Sequence[int]) -> bool:
        return self.runs == ((0, shape[self.dim]),)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part: ``tensor`` itself where that is all of it, else a copy."""
        if self.is_whole(tensor.shape):
            return tensor
        return self.assemble(
            lambda start, stop: tensor.narrow(self.dim, start, stop - start), tensor.shape
        )

    def assemble(self, read: ReadSlice, shape: Sequence[int]) -> torch.Tensor:
        """The part, from a reader of slices. Reads nothing beyond it."""
        part: torch.Tensor | None = None
        offset = 0
        for start, stop in self.runs:
            length = stop if start < 0 else stop - start
            if start >= 0:
                piece = read(start, stop)
                if part is None:
                    part = piece.new_zeros(self.shape_of(shape))
                part.narrow(self.dim, offset, length).copy_(piece)
            offset += length
        if part is None:  # zeros only; an empty slice tells the dtype
            return read(0, 0).new_zeros(self.shape_of(shape))
        return part


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank: ids of key/value heads and of query heads, -1 for a zero head.

    Local query head ``i`` reads local key/value head ``i // (len(query) / len(kv))``.
    """

    kv: tuple[int, ...]
    query: tuple[int, ...]


def share_heads(num_heads: int, num_kv_heads: int, *, rank: int, world_size: int) -> HeadShare:
    """The heads of ``rank``. ``num_heads`` is a multiple of ``num_kv_heads``."""
    repeat = num_heads // num_kv_heads
    if num_kv_heads >= world_size:
        width = -(-num_kv_heads // world_size)
        kv = _fill(_portion(num_kv_heads, rank, world_size), width)
        return HeadShare(
            kv=kv,
            query=tuple(
                head * repeat + i if head >= 0 else -1 for head in kv for i in range(repeat)
            ),
        )
    copies = world_size // num_kv_heads
    width = -(-repeat // copies)
    head, part = divmod(rank, copies)
    if head >= num_kv_heads:
        return HeadShare(kv=(-1,), query=(-1,) * width)
    mine = [head * repeat + i for i in _portion(repeat, part, copies)]
    return HeadShare(kv=(head,), query=_fill(mine, width))


def head_shard(dim: int, heads: Sequence[int], head_dim: int) -> Shard:
    """The elements of ``heads`` (-1: zeros), ``head_dim`` each."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        start, stop = head * head_dim, (head + 1) * head_dim
        if head < 0:
            runs.append((-1, head_dim))
        elif runs and runs[-1][0] >= 0 and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return Shard(dim, tuple(runs))


def even_shard(dim: int, size: int, *, rank: int, world_size: int) -> Shard:
    """One of ``world_size`` neighbouring parts of equal width, the last ones filled with zeros."""
    width = -(-size // world_size)
    start = min(rank * width, size)
    stop = min(start + width, size)
    runs = [(start, stop)] if stop > start else []
    if stop - start < width:
        runs.append((-1, width - (stop - start)))
    return Shard(dim, tuple(runs))


def portion_shard(dim: int, size: int, group: ProcessGroup) -> Shard:
    """One of the group's neighbouring parts, nothing filled up: widths differ by one at most."""
    portion = _portion(size, group.rank, group.world_size)
    return Shard(dim, ((portion[0], portion[-1] + 1),))


@dataclass(frozen=True)
class BlockShare:
    """One rank's part of a decoder block. Tensors without a shard are whole on every rank."""

    heads: HeadShare
    shards: dict[str, Shard]
    shapes: dict[str, tuple[int, ...]]  # of this rank's tensors


def share_block(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    group: ProcessGroup,
    latent: LatentSpec | None = None,
    expert_parallel: bool = False,
) -> BlockShare:
    """How the tensors of one decoder block are cut.

    ``shapes``: the block's own tensors (``self_attn.q_proj.weight`` …), whole. The bias of a linear
    that is cut by inputs belongs to the first rank alone, for the partial sums are added up.
    ``latent``: of latent attention, where every query head makes keys and values of its own, so
    that ``num_kv_heads`` and ``head_dim`` are not asked. ``expert_parallel``: each expert is whole
    and on one rank; tensors of the others are not listed.
    """
    rank, world_size = group.rank, group.world_size
    if expert_parallel:
        shapes = _with_own_experts(shapes, group)
    if latent is not None:
        num_kv_heads = num_heads
    heads = share_heads(num_heads, num_kv_heads, rank=rank, world_size=world_size)
    shards: dict[str, Shard] = {}
    if latent is not None:
        cut = _latent_shards(latent, heads.query)
        shards = {name: shard for name, shard in cut.items() if name in shapes}
    for name, shape in shapes.items():
        linear, _, kind = name.rpartition(".")
        if latent is not None and linear.startswith("self_attn."):
            continue
        if expert_parallel and linear.startswith(_EXPERTS):
            continue
        if linear.startswith("mlp."):  # an expert's linears as those of a plain MLP
            linear = "mlp." + linear.rpartition(".")[2]
        if linear == "self_attn.q_proj":
            shards[name] = head_shard(0, heads.query, head_dim)
        elif linear in ("self_attn.k_proj", "self_attn.v_proj"):
            shards[name] = head_shard(0, heads.kv, head_dim)
        elif linear in ("mlp.gate_proj", "mlp.up_proj"):
            shards[name] = even_shard(0, shape[0], rank=rank, world_size=world_size)
        elif linear in ("self_attn.o_proj", "mlp.down_proj") and kind == "bias":
            shards[name] = Shard(0, ((0, shape[0]) if rank == 0 else (-1, shape[0]),))
        elif linear == "self_attn.o_proj":
            shards[name] = head_shard(1, heads.query, head_dim)
        elif linear == "mlp.down_proj":
            shards[name] = even_shard(1, shape[1], rank=rank, world_size=world_size)
    local = {
        name: shards[name].shape_of(shape) if name in shards else shape
        for name, shape in shapes.items()
    }
    return BlockShare(heads, shards, local)


def _latent_shards(latent: LatentSpec, heads: Sequence[int]) -> dict[str, Shard]:
    """Latent attention is cut by heads where there are any; latents and what makes them are whole
    on every rank, and so is the cache.
    """
    return {
        "self_attn.q_proj.weight": head_shard(0, heads, latent.query_dim),
        "self_attn.q_b_proj.weight": head_shard(0, heads, latent.query_dim),
        "self_attn.kv_b_proj.weight": head_shard(0, heads, latent.nope_dim + latent.value_dim),
        "self_attn.o_proj.weight": head_shard(1, heads, latent.value_dim),
    }


def _with_own_experts(
    shapes: Mapping[str, tuple[int, ...]], group: ProcessGroup
) -> dict[str, tuple[int, ...]]:
    """Without the experts of other ranks. Rank r of R has neighbouring ones, from rX/R up to
    (r + 1)X/R of X, both rounded down.
    """
    expert_of = {name: int(name.split(".")[2]) for name in shapes if name.startswith(_EXPERTS)}
    own = _portion(len(set(expert_of.values())), group.rank, group.world_size)
    return {n: shape for n, shape in shapes.items() if n not in expert_of or expert_of[n] in own}


def target_shards(
    config: ModelConfig, group: ProcessGroup, *, expert_parallel: bool = False
) -> dict[str, Shard]:
    """How the tensors of a target's checkpoint are cut, by name."""
    rows = even_shard(0, config.vocab_size, rank=group.rank, world_size=group.world_size)
    shards = {"model.embed_tokens.weight": rows, "lm_head.weight": rows}
    for index in range(config.num_layers):
        share = share_layer(config, index, group, expert_parallel=expert_parallel)
        for name, shard in share.shards.items():
            shards[f"model.layers.{index}.{name}"] = shard
    return shards


def share_layer(
    config: ModelConfig, index: int, group: ProcessGroup, *, expert_parallel: bool = False
) -> BlockShare:
    """:func:`share_block` of a target's decoder layer."""
    return share_block(
        config.block_shapes(index),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        group=group,
        latent=config.latent,
        expert_parallel=expert_parallel,
    )


def _portion(count: int, index: int, num_parts: int) -> list[int]:
    """Neighbouring numbers below ``count``: part ``index`` of ``num_parts``, sizes differ by one
    at most.
    """
    return list(range(index * count // num_parts, (index + 1) * count // num_parts))


def _fill(values: Sequence[int], width: int) -> tuple[int, ...]:
    return (*values, *[-1] * (width - len(values)))
