"""Multi-head latent attention over the compressed cache (DeepSeek-V2, arXiv:2405.04434).

A token's cache is one vector ``[c | k_pe]``: the normed latent ``c`` and the rotated key that all
heads share. The absorbed form never expands it: a query's unrotated part is multiplied with the
head's up-projection of keys (``q_nope . (U c) = (q_nope U) . c``), and the up-projection of values
is applied to the attended latent, which is linear in ``c`` too. So every head reads the same
vectors, as key and as value.

On several ranks each has some of the query heads. All of them read the same latents, so each rank
makes and caches these whole; what the heads give is added up over the ranks.

Where the checkpoint rotates neighbouring elements, rows of the projections are put into halves when
they are loaded; scores do not change, for queries and keys are permuted alike.

Shape legend: N rows, D model width, H query heads, P unrotated and R rotated elements of a query or
key head, L latent width, U value width, C = L + R.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from runtime.attention.base import AttentionBackend
from runtime.kv_cache import KVPool
from runtime.layer_parts import LatentSpec
from runtime.layers import merge_linears, norm_weight
from runtime.linear import LinearMaker, TensorSource
from runtime.ops import BlockOps, NormWeight, RotaryAngles
from runtime.parallel import ProcessGroup
from runtime.parallel_layers import RowParallelLinear


class LatentAttention:
    """``shapes``, ``take`` and ``group`` as in :func:`runtime.layers.build_block`; ``num_heads``
    are this rank's query heads. One of zeros reads the latents evenly and makes zeros of them.
    """

    def __init__(
        self,
        spec: LatentSpec,
        num_heads: int,
        take: TensorSource,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        ops: BlockOps,
        make_linear: LinearMaker,
        group: ProcessGroup,
    ) -> None:
        self.spec = spec
        self.num_heads = num_heads
        self.ops = ops

        def take_in_halves(name: str) -> torch.Tensor:
            tensor = take(name)
            if not spec.is_interleaved:
                return tensor
            if name.endswith(("q_proj.weight", "q_b_proj.weight")):
                return _rotated_in_halves(tensor, spec.query_dim, spec.rope_dim)
            if name.endswith("kv_a_proj_with_mqa.weight"):
                return _rotated_in_halves(tensor, spec.cache_width, spec.rope_dim)
            return tensor

        first = "self_attn.q_proj" if spec.query_rank is None else "self_attn.q_a_proj"
        names = [first, "self_attn.kv_a_proj_with_mqa"]
        self.inputs = merge_linears(take_in_halves, shapes, names, make_linear)
        self.query_norm: NormWeight | None = None
        if spec.query_rank is not None:
            self.query_norm = norm_weight(take("self_attn.q_a_layernorm.weight"), eps=spec.norm_eps)
            self.query_up = make_linear(take_in_halves("self_attn.q_b_proj.weight"), None)
        self.kv_norm = norm_weight(take("self_attn.kv_a_layernorm.weight"), eps=spec.norm_eps)
        up_HXL = take("self_attn.kv_b_proj.weight").unflatten(0, (num_heads, -1))
        self.key_up_HPL = up_HXL[:, : spec.nope_dim].contiguous()
        self.value_up_HLU = up_HXL[:, spec.nope_dim :].transpose(1, 2).contiguous()
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
        """As :meth:`own_part`, added up over the ranks."""
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
        """Store ``[c | k_pe]`` of the rows, attend in the absorbed form; ``[N, D]``."""
        spec, num_heads = self.spec, self.num_heads
        merged = self.inputs(inputs_NI)
        query, latent_NL, key_NR = merged.split(
            (merged.shape[1] - spec.cache_width, spec.kv_rank, spec.rope_dim), dim=1
        )
        if self.query_norm is not None:
            query = self.query_up(self.ops.add_rms_norm(query.contiguous(), None, self.query_norm))
        latent_NL = self.ops.add_rms_norm(latent_NL.contiguous(), None, self.kv_norm)
        q_NHP, q_NHR = query.unflatten(1, (num_heads, -1)).split(
            (spec.nope_dim, spec.rope_dim), dim=-1
        )
        rotated = torch.cat((q_NHR, key_NR[:, None]), dim=1)
        self.ops.rotate(rotated, num_heads + 1, angles)
        q_NHL = torch.bmm(q_NHP.transpose(0, 1), self.key_up_HPL).transpose(0, 1)
        q_NHC = torch.cat((q_NHL, rotated[:, :num_heads]), dim=-1)
        latent_N1C = torch.cat((latent_NL[:, None], rotated[:, num_heads:]), dim=-1)
        attended_NHC = backend.run_latent(plan, pool, layer, q_NHC, latent_N1C, scale=spec.scale)
        attended_HNL = attended_NHC[..., : spec.kv_rank].transpose(0, 1)
        values_NHU = torch.bmm(attended_HNL, self.value_up_HLU).transpose(0, 1)
        return self.out.linear(values_NHU.reshape(len(values_NHU), -1))


def _rotated_in_halves(weight: torch.Tensor, head_rows: int, num_rotated: int) -> torch.Tensor:
    """``weight`` ``[heads * head_rows, ...]`` with the last ``num_rotated`` rows of each head in
    the order 0, 2, 4 … 1, 3, 5 …
    """
    kept = torch.arange(head_rows - num_rotated)
    pairs = torch.arange(head_rows - num_rotated, head_rows).view(-1, 2)
    order = torch.cat((kept, pairs[:, 0], pairs[:, 1])).to(weight.device)
    return weight.unflatten(0, (-1, head_rows))[:, order].flatten(0, 1)
