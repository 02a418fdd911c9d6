"""Slow, obvious references for the trainer's parts, and tiny inputs to feed them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mtp_train.heads.init import initialise
from mtp_train.heads.mtp import MtpHead
from runtime.head_spec import HeadSpec, RopeSpec


@dataclass(frozen=True)
class TinySample:
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor


def tiny_spec(**changes) -> HeadSpec:
    values = {
        "kind": "mtp",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "max_position_embeddings": 512,
        "rope": RopeSpec(theta=10000.0),
        "norm_eps": 1e-5,
        "target_fingerprint": "f" * 64,
    }
    return HeadSpec(**(values | changes))


def random_head(spec: HeadSpec, seed: int = 0) -> MtpHead:
    """Weights large enough that every part of the head matters, norm weights away from one."""
    head = MtpHead(spec)
    tensors = initialise(
        spec,
        method="random",
        seed=seed,
        initializer_range=0.2,
        num_target_layers=1,
        read_target=lambda name: torch.empty(0),
    )
    generator = torch.Generator().manual_seed(seed + 1)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensors[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
    head.load_tensors(tensors)
    return head


def random_embedding(spec: HeadSpec, seed: int = 7) -> torch.Tensor:
    return torch.randn(
        spec.vocab_size, spec.hidden_size, generator=torch.Generator().manual_seed(seed)
    )


def random_sample(spec: HeadSpec, length: int, seed: int, mask: str = "answer") -> TinySample:
    generator = torch.Generator().manual_seed(seed)
    masks = {
        "answer": torch.arange(length) >= length // 3,
        "all": torch.ones(length, dtype=torch.bool),
        "none": torch.zeros(length, dtype=torch.bool),
        "spans": (torch.arange(length) // 3) % 2 == 1,
    }
    return TinySample(
        torch.randint(spec.vocab_size, (length,), generator=generator),
        masks[mask],
        torch.randn(length, spec.hidden_size, generator=generator),
    )


class StepwiseHead:
    """The head one row at a time with a K/V cache, written from the formulas alone."""

    def __init__(self, spec: HeadSpec, tensors: dict[str, torch.Tensor], embedding: torch.Tensor):
        self.spec, self.w, self.embedding = spec, tensors, embedding

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name not in self.w:
            return x
        weight = self.w[name] + (1.0 if self.spec.norm_form == "1+w" else 0.0)
        return x / (x.pow(2).mean() + self.spec.norm_eps).sqrt() * weight

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        out = torch.empty_like(x)
        half = self.spec.head_dim // 2
        for j in range(half):
            angle = torch.tensor(position * self.spec.rope.theta ** (-2 * j / (2 * half)))
            a, b = x[:, j], x[:, j + half]
            out[:, j] = a * angle.cos() - b * angle.sin()
            out[:, j + half] = b * angle.cos() + a * angle.sin()
        return out

    def row(self, hidden, token, position, cache):
        """Append this row's K/V to ``cache`` and return (state for logits, recycled state)."""
        spec, w = self.spec, self.w
        e = self.embedding[token]
        if spec.first_embedding_mask and position == 0:
            e = torch.zeros_like(e)
        parts = [self.norm(e, "enorm.weight"), self.norm(hidden, "hnorm.weight")]
        if spec.concat == "hidden_embedding":
            parts.reverse()
        x = w["eh_proj.weight"] @ torch.cat(parts) + w.get("eh_proj.bias", 0.0)
        for number in range(spec.num_layers):
            x = self.layer(x, f"layers.{number}.", position, cache.setdefault(number, []))
        final = self.norm(x, "norm.weight")
        state = final if spec.logits_from == "post_norm" else x
        return state, final if spec.recycle == "post_norm" else x

    def layer(self, x, layer, position, cache):
        spec, w = self.spec, self.w
        a = self.norm(x, layer + "input_layernorm.weight")
        heads = {
            n: (w[f"{layer}self_attn.{n}_proj.weight"] @ a).view(-1, spec.head_dim) for n in "qkv"
        }
        q, k = self.rotate(heads["q"], position), self.rotate(heads["k"], position)
        cache.append((k, heads["v"]))
        mixed = []
        for head in range(spec.num_heads):
            group = head * spec.num_kv_heads // spec.num_heads
            keys = torch.stack([k[group] for k, _ in cache])
            values = torch.stack([v[group] for _, v in cache])
            probs = torch.softmax(keys @ q[head] / spec.head_dim**0.5, dim=0)
            mixed.append(probs @ values)
        x = x + w[layer + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        m = self.norm(x, layer + "post_attention_layernorm.weight")
        gate = F.silu(w[layer + "mlp.gate_proj.weight"] @ m)
        return x + w[layer + "mlp.down_proj.weight"] @ (
            gate * (w[layer + "mlp.up_proj.weight"] @ m)
        )

    def unroll(self, sample: TinySample, start: int, num_steps: int) -> list[torch.Tensor]:
        """States of ``num_steps`` chained steps from ``start``: a cache of rows ``<= start``, then
        recycled rows on top of it."""
        cache: dict = {}
        for i in range(start + 1):
            state, recycled = self.row(sample.hidden[i], sample.input_ids[i + 1], i, cache)
        states = [state]
        for k in range(1, num_steps):
            token = sample.input_ids[start + 1 + k]
            state, recycled = self.row(recycled, token, start + k, cache)
            states.append(state)
        return states


def reference_loss(
    head_states: dict[tuple[int, int], torch.Tensor],
    sample: TinySample,
    lm_head: torch.Tensor,
    *,
    beta: float,
    hidden_weight: float,
    logit_weight: float,
) -> tuple[torch.Tensor, float]:
    """(weighted loss sum, weighted count) of one sample; ``head_states[i, k]`` as unrolled."""
    total, count = torch.zeros(()), 0.0
    for (i, k), state in head_states.items():
        label = i + 2 + k
        if label >= len(sample.input_ids) or not sample.loss_mask[label]:
            continue
        target = sample.hidden[i + 1 + k]
        log_q = torch.log_softmax(lm_head @ state, 0)
        p = torch.softmax(lm_head @ target, 0)
        hidden = F.smooth_l1_loss(state, target)
        total = total + beta**k * (hidden_weight * hidden - logit_weight * (p * log_q).sum())
        count += beta**k
    return total, count
