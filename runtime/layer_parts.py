"""Which tensors a dense decoder layer has: one list for targets and for the heads that follow them.

Every layer has query, key, value and output projections, a gated MLP and two RMSNorms. Families
differ in biases and in norms of query and key heads.
"""

from __future__ import annotations

from dataclasses import dataclass


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
) -> dict[str, tuple[int, ...]]:
    """Names without the layer's prefix -> shapes; linear weights are ``[out, in]``. ``inputs``:
    columns that query, key and value read.
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
    if has_input_norm:
        shapes["input_layernorm.weight"] = (width,)
    if has_post_attention_norm:
        shapes["post_attention_layernorm.weight"] = (width,)
    return shapes
