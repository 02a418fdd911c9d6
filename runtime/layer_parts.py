"""Which tensors a decoder layer has: one list for targets and for the heads that follow them.

A plain layer has query, key, value and output projections, a gated MLP and two RMSNorms. Families
differ in biases and in norms of query and key heads; some targets have latent attention in the
place of the former (:class:`LatentSpec`) or experts in the place of the latter
(:class:`ExpertSpec`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerParts:
    """What a layer has beyond that of a plain Llama."""

    qkv_bias: bool = False  # of query, key and value (Qwen2)
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False  # of gate, up and down
    qk_norm: bool = False  # an RMSNorm over each query and key head, before rotation (Qwen3)

    def __str__(self) -> str:
        present = [name for name, is_there in vars(self).items() if is_there]
        return ", ".join(present) or "no biases or head norms"


PLAIN_LAYER = LayerParts()  # a Llama's


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of a token are
    products of one latent vector, which is all that is cached, beside a rotated key that all heads
    share.

    ``query_rank``: width of the queries' own latent; ``None`` without one. ``scale`` multiplies
    scores. ``is_interleaved``: the checkpoint rotates pairs ``(2c, 2c + 1)``, not halves.
    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int  # of a query or key head, not rotated
    rope_dim: int  # of a query or key head, rotated
    value_dim: int
    scale: float
    is_interleaved: bool = True
    norm_eps: float = 1e-6  # of the latents' norms: fixed in transformers, whatever rms_norm_eps is

    @property
    def query_dim(self) -> int:
        """Width of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_width(self) -> int:
        """Values per token and layer."""
        return self.kv_rank + self.rope_dim

    def shapes(self, *, hidden_size: int, num_heads: int) -> dict[str, tuple[int, ...]]:
        """The attention's tensors, named as :func:`layer_shapes` does."""
        q_dim, rank = num_heads * self.query_dim, self.query_rank
        shapes: dict[str, tuple[int, ...]] = {}
        if rank is None:
            shapes["self_attn.q_proj.weight"] = (q_dim, hidden_size)
        else:
            shapes["self_attn.q_a_proj.weight"] = (rank, hidden_size)
            shapes["self_attn.q_a_layernorm.weight"] = (rank,)
            shapes["self_attn.q_b_proj.weight"] = (q_dim, rank)
        shapes["self_attn.kv_a_proj_with_mqa.weight"] = (self.cache_width, hidden_size)
        shapes["self_attn.kv_a_layernorm.weight"] = (self.kv_rank,)
        up = num_heads * (self.nope_dim + self.value_dim)
        shapes["self_attn.kv_b_proj.weight"] = (up, self.kv_rank)
        shapes["self_attn.o_proj.weight"] = (hidden_size, num_heads * self.value_dim)
        return shapes


CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"  # stays float32, whatever the model's dtype


@dataclass(frozen=True)
class ExpertSpec:
    """A router and experts, each a gated MLP, of which every token passes ``num_chosen``.

    ``num_groups`` and ``num_kept_groups``: experts are chosen within the best groups of
    neighbouring experts; 1 and 1 without groups. ``dense_layers`` of a target have a plain MLP
    instead; a head's own layers have none.
    """

    num_experts: int
    num_chosen: int
    inner: int  # MLP width of an expert
    num_shared: int = 0  # experts' worth of an MLP that all tokens pass
    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False  # added to scores for the choice alone
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    normalises: bool = False  # whether weights of the chosen are made to sum to one
    scaling: float = 1.0  # of these weights
    is_float32: bool = False  # whether the router's product is, whatever the model's dtype
    dense_layers: tuple[int, ...] = ()

    def shapes(self, *, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The tensors in the place of an MLP's, named as :func:`layer_shapes` does."""
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (self.num_experts, hidden_size)}
        if self.has_bias:
            shapes[CORRECTION_BIAS] = (self.num_experts,)
        inners = {f"mlp.experts.{index}": self.inner for index in range(self.num_experts)}
        if self.num_shared:
            inners["mlp.shared_experts"] = self.num_shared * self.inner
        for name, inner in inners.items():
            shapes[name + ".gate_proj.weight"] = (inner, hidden_size)
            shapes[name + ".up_proj.weight"] = (inner, hidden_size)
            shapes[name + ".down_proj.weight"] = (hidden_size, inner)
        return shapes


def layer_shapes(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    parts: LayerParts,
    inputs: int,
    has_input_norm: bool = True,
    has_post_attention_norm: bool = True,
    latent: LatentSpec | None = None,
    experts: ExpertSpec | None = None,
) -> dict[str, tuple[int, ...]]:
    """Names without the layer's prefix -> shapes; linear weights are ``[out, in]``. ``inputs``:
    columns that query, key and value read. ``latent`` and ``experts``: where the layer has them in
    the place of grouped attention and of a dense MLP.
    """
    width, inner = hidden_size, intermediate_size
    q_dim, kv_dim = num_heads * head_dim, num_kv_heads * head_dim
    linears = {
        "self_attn.q_proj": (q_dim, inputs, parts.qkv_bias),
        "self_attn.k_proj": (kv_dim, inputs, parts.qkv_bias),
        "self_attn.v_proj": (kv_dim, inputs, parts.qkv_bias),
        "self_attn.o_proj": (width, q_dim, parts.out_bias),
        "mlp.gate_proj": (inner, width, parts.mlp_bias),
        "mlp.up_proj": (inner, width, parts.mlp_bias),
        "mlp.down_proj": (width, inner, parts.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (out_dim, in_dim, has_bias) in linears.items():
        shapes[name + ".weight"] = (out_dim, in_dim)
        if has_bias:
            shapes[name + ".bias"] = (out_dim,)
    if parts.qk_norm:
        shapes["self_attn.q_norm.weight"] = (head_dim,)
        shapes["self_attn.k_norm.weight"] = (head_dim,)
    if latent is not None:
        shapes = {name: s for name, s in shapes.items() if not name.startswith("self_attn.")}
        shapes |= latent.shapes(hidden_size=width, num_heads=num_heads)
    if experts is not None:
        shapes = {name: s for name, s in shapes.items() if not name.startswith("mlp.")}
        shapes |= experts.shapes(hidden_size=width)
    if has_input_norm:
        shapes["input_layernorm.weight"] = (width,)
    if has_post_attention_norm:
        shapes["post_attention_layernorm.weight"] = (width,)
    return shapes
