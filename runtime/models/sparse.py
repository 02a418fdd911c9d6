"""Latent attention and experts as the configurations of Qwen3-MoE and DeepSeek state them.

Meanings and defaults of keys are transformers'. What it reads and we do not compute, and what the
published model code would compute otherwise than transformers, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.layer_parts import ExpertSpec, LatentSpec
from runtime.models.fields import count, flag, number, only, positive
from runtime.rope import yarn_mscale


def read_qwen3_experts(raw: Mapping[str, Any], source: str) -> ExpertSpec:
    """Experts in every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not name."""
    field = "num_experts" if "num_experts" in raw else "num_local_experts"  # transformers 5
    step = positive({"decoder_sparse_step": 1, **raw}, "decoder_sparse_step", source)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ValueError(f"{source}: mlp_only_layers={dense!r}; expected a list of layer indices")
    layers = range(positive(raw, "num_hidden_layers", source))
    spec = ExpertSpec(
        num_experts=positive(raw, field, source),
        num_chosen=positive(raw, "num_experts_per_tok", source),
        inner=positive(raw, "moe_intermediate_size", source),
        normalises=flag(raw, "norm_topk_prob", source),
        dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
    )
    return _checked(spec, source)


def read_latent(raw: Mapping[str, Any], source: str) -> LatentSpec:
    """DeepSeek's attention. Scores have the factor of yarn's ``mscale_all_dim``, squared."""
    only(raw, "attention_bias", source, supported=False)
    heads = positive(raw, "num_attention_heads", source)
    only(raw, "num_key_value_heads", source, supported=heads)
    nope, rope = (positive(raw, f"qk_{kind}_head_dim", source) for kind in ("nope", "rope"))
    if rope % 2:
        raise ValueError(f"{source}: qk_rope_head_dim={rope}; rotary embedding needs an even width")
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    mscale = 1.0
    is_plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    if not is_plain and scaling.get("mscale_all_dim"):
        factor = number(scaling, "factor", f"{source}: rope_scaling")
        mscale = yarn_mscale(factor, scaling["mscale_all_dim"])
    return LatentSpec(
        query_rank=count(raw, "q_lora_rank", source) or None,
        kv_rank=positive(raw, "kv_lora_rank", source),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=positive(raw, "v_head_dim", source),
        scale=(nope + rope) ** -0.5 * mscale * mscale,
        is_interleaved=flag(raw, "rope_interleave", source, default=True),
    )


def read_deepseek_v2_experts(raw: Mapping[str, Any], source: str) -> ExpertSpec:
    """Softmax scores, greedy or among the groups with the best experts; never made to sum to one,
    for transformers does not whatever ``norm_topk_prob`` says.
    """
    only(raw, "norm_topk_prob", source, supported=False)
    only(raw, "scoring_func", source, supported="softmax")
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"{source}: topk_method={method!r}; supported: 'greedy', 'group_limited_greedy'"
        )
    is_limited = method == "group_limited_greedy"
    return _read_deepseek_experts(
        raw,
        source,
        scaling=1.0,
        num_groups=positive(raw, "n_group", source) if is_limited else 1,
        num_kept_groups=positive(raw, "topk_group", source) if is_limited else 1,
    )


def read_deepseek_v3_experts(raw: Mapping[str, Any], source: str) -> ExpertSpec:
    """Sigmoid scores with a bias for the choice, among the groups whose two best experts have the
    highest sum.
    """
    only(raw, "scoring_func", source, supported="sigmoid")
    only(raw, "topk_method", source, supported="noaux_tc")
    return _read_deepseek_experts(
        raw,
        source,
        scaling=2.5,
        scores="sigmoid",
        has_bias=True,
        num_groups=positive({"n_group": 8, **raw}, "n_group", source),
        num_kept_groups=positive({"topk_group": 4, **raw}, "topk_group", source),
        group_score="best_two",
        normalises=flag(raw, "norm_topk_prob", source, default=True),
    )


def _read_deepseek_experts(
    raw: Mapping[str, Any], source: str, *, scaling: float, **own: Any
) -> ExpertSpec:
    only(raw, "moe_layer_freq", source, supported=1)
    layers = positive(raw, "num_hidden_layers", source)
    dense = count(raw, "first_k_dense_replace", source)
    spec = ExpertSpec(
        num_experts=positive(raw, "n_routed_experts", source),
        num_chosen=positive(raw, "num_experts_per_tok", source),
        inner=positive(raw, "moe_intermediate_size", source),
        num_shared=count(raw, "n_shared_experts", source),
        scaling=number({"routed_scaling_factor": scaling, **raw}, "routed_scaling_factor", source),
        is_float32=True,
        dense_layers=tuple(range(min(dense, layers + 1))),  # an MTP layer is one more
        **own,
    )
    return _checked(spec, source)


def _checked(spec: ExpertSpec, source: str) -> ExpertSpec:
    experts, groups, kept = spec.num_experts, spec.num_groups, spec.num_kept_groups
    if experts % groups or kept > groups:
        raise ValueError(
            f"{source}: {experts} experts in n_group={groups}, topk_group={kept}; expected groups "
            "of one size, and no more of them kept than there are"
        )
    per_group = experts // groups
    if kept < groups and spec.group_score == "best_two" and per_group < 2:
        raise ValueError(f"{source}: n_group={groups}; a group needs two experts, it has one")
    if spec.num_chosen > kept * per_group:
        raise ValueError(
            f"{source}: num_experts_per_tok={spec.num_chosen}; there are {kept * per_group} "
            "experts to choose from"
        )
    return spec
