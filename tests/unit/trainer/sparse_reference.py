"""Latent attention and experts one row at a time, from the papers' formulas alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from runtime.head_spec import HeadSpec
from runtime.layer_parts import ExpertSpec, LatentSpec


def rotate_pairs(x: torch.Tensor, position: int, latent: LatentSpec, theta: float) -> torch.Tensor:
    """Element pairs ``(2j, 2j + 1)``, or ``(j, j + R/2)``, turned by ``position * theta^(-2j/R)``,
    one at a time.
    """
    width = x.shape[-1]
    out = torch.empty_like(x)
    for j in range(width // 2):
        a, b = (2 * j, 2 * j + 1) if latent.is_interleaved else (j, j + width // 2)
        angle = torch.tensor(position * theta ** (-2 * j / width))
        out[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        out[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return out


def latent_attention(head: Any, a: torch.Tensor, name: str, position: int, cache: list) -> Any:
    """DeepSeek-V2 (arXiv:2405.04434, 2.1), expanded, with a cache of whole keys and values.

    ``head`` is a ``StepwiseHead``; returns what ``o_proj`` reads.
    """
    spec: HeadSpec = head.spec
    latent = spec.latent
    assert latent is not None

    def norm(x: torch.Tensor, weight: str) -> torch.Tensor:
        return x / (x.pow(2).mean() + latent.norm_eps).sqrt() * head.w[name + weight + ".weight"]

    if latent.query_rank is None:
        query = head.linear(a, name + "q_proj")
    else:
        query = norm(head.linear(a, name + "q_a_proj"), "q_a_layernorm")
        query = head.linear(query, name + "q_b_proj")
    joined = head.linear(a, name + "kv_a_proj_with_mqa")
    c, key = joined[: latent.kv_rank], joined[latent.kv_rank :]
    up = head.linear(norm(c, "kv_a_layernorm"), name + "kv_b_proj").view(spec.num_heads, -1)
    theta = spec.rope.theta
    cache.append((up, rotate_pairs(key, position, latent, theta)))
    mixed = []
    for number, q in enumerate(query.view(spec.num_heads, -1)):
        q_nope, q_pe = q[: latent.nope_dim], q[latent.nope_dim :]
        q_pe = rotate_pairs(q_pe, position, latent, theta)
        scores = torch.stack(
            [
                (q_nope @ up[number, : latent.nope_dim] + q_pe @ pe) * latent.scale
                for up, pe in cache
            ]
        )
        values = torch.stack([up[number, latent.nope_dim :] for up, _ in cache])
        mixed.append(torch.softmax(scores, 0) @ values)
    return torch.cat(mixed)


def expert_mlp(head: Any, m: torch.Tensor, name: str) -> torch.Tensor:
    """The weighted sum over the chosen experts, chosen in plain Python."""
    spec: ExpertSpec | None = head.spec.experts
    assert spec is not None

    def gated(prefix: str) -> torch.Tensor:
        gate = F.silu(head.linear(m, prefix + "gate_proj"))
        return head.linear(gate * head.linear(m, prefix + "up_proj"), prefix + "down_proj")

    logits = head.w[name + "gate.weight"] @ m
    if spec.scores == "softmax":
        scores = logits.exp() / logits.exp().sum()
    else:
        scores = 1 / (1 + (-logits).exp())
    bias = head.w.get(name + "gate.e_score_correction_bias", torch.zeros(spec.num_experts))
    ranked = (scores + bias).tolist()
    size = spec.num_experts // spec.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(spec.num_groups)]
    best = 1 if spec.group_score == "best" else 2
    worth = [math.fsum(sorted((ranked[x] for x in group), reverse=True)[:best]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda g: -worth[g])[: spec.num_kept_groups]
    allowed = [x for g in kept for x in groups[g]]
    chosen = sorted(allowed, key=lambda x: -ranked[x])[: spec.num_chosen]
    total = sum(scores[x] for x in chosen) if spec.normalises else 1.0
    out = sum(scores[x] / total * spec.scaling * gated(f"{name}experts.{x}.") for x in chosen)
    return out + gated(name + "shared_experts.") if spec.num_shared else out
