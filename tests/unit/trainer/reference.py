"""Slow, obvious references for the trainer's parts, and tiny inputs to feed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mtp_train.heads import build_training_head
from mtp_train.heads.base import TrainingHead
from mtp_train.heads.init import OwnHead, initialise
from runtime.head_spec import (
    EAGLE3_FIELDS,
    MEDUSA_FIELDS,
    DraftVocab,
    HeadSpec,
    RopeSpec,
    hash_vocab_ids,
)
from runtime.layer_parts import ExpertSpec, LatentSpec
from tests.unit.trainer.sparse_reference import expert_mlp, latent_attention


@dataclass(frozen=True)
class TinySample:
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor
    layers: torch.Tensor | None = None


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


def random_head(spec: HeadSpec, seed: int = 0) -> TrainingHead:
    """Weights large enough that every part of the head matters, norm weights away from one."""
    head = build_training_head(spec, dtype=torch.float32)
    own_head = None
    if spec.lm_head == "own":
        generator = torch.Generator().manual_seed(seed + 2)
        rows_WD = 0.3 * torch.randn(spec.draft_vocab_size, spec.hidden_size, generator=generator)
        ids_W = draft_ids(spec) if spec.draft_vocab else None
        own_head = OwnHead(ids_W, rows_WD)
    tensors = initialise(
        spec,
        method="random",
        seed=seed,
        initializer_range=0.2,
        num_target_layers=1,
        read_target=lambda name: torch.empty(0),
        own_head=own_head,
    )
    generator = torch.Generator().manual_seed(seed + 1)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensors[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
    head.load_tensors(tensors)
    return head


def draft_ids(spec: HeadSpec) -> torch.Tensor:
    """Every third id, as many as the spec's draft vocabulary has."""
    assert spec.draft_vocab is not None
    return torch.arange(spec.draft_vocab.size) * 3


def eagle3(draft_vocab: int = 0, **changes: Any) -> dict[str, Any]:
    """Changes of :func:`tiny_spec` that make it a head of EAGLE-3 over two residual streams."""
    vocab = None
    if draft_vocab:
        ids_W = torch.arange(draft_vocab) * 3
        vocab = DraftVocab(draft_vocab, 0.5, hash_vocab_ids(ids_W))
    fields = {"layer_ids": (1, 3), "recycle": "pre_norm", "draft_vocab": vocab}
    return {"kind": "eagle3", **EAGLE3_FIELDS, **fields, **changes}


NARROW: dict[str, Any] = {"target_hidden_size": 40, "embedding": "own"}  # of the head's 32


def medusa(num_blocks: int = 3, **changes: Any) -> dict[str, Any]:
    """Changes of :func:`tiny_spec` that make it a Medusa head."""
    fields = {"num_blocks": num_blocks, "projection_bias": True}
    return {"kind": "medusa", **MEDUSA_FIELDS, **fields, **changes}


def latent(query_rank: int | None = None, **changes: Any) -> dict[str, Any]:
    """Changes of :func:`tiny_spec` that give it latent attention; no two widths are equal."""
    fields = {"kv_rank": 20, "nope_dim": 10, "rope_dim": 6, "value_dim": 14, "scale": 0.21}
    spec = LatentSpec(query_rank=query_rank, **fields | changes)
    return {"latent": spec, "num_kv_heads": 4}


EXPERTS = {
    "qwen3": ExpertSpec(6, 2, 24, normalises=True),
    "v2-lite": ExpertSpec(8, 3, 24, num_shared=2, is_float32=True),
    "v2": ExpertSpec(8, 3, 24, 2, num_groups=4, num_kept_groups=2, scaling=4.0, is_float32=True),
    "v3": ExpertSpec(
        8,
        3,
        24,
        num_shared=1,
        scores="sigmoid",
        has_bias=True,
        num_groups=4,
        num_kept_groups=2,
        group_score="best_two",
        normalises=True,
        scaling=2.5,
        is_float32=True,
    ),
}


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
        torch.randn(length, spec.target_width, generator=generator),
        torch.randn(length, spec.input_size, generator=generator) if spec.reads_layers else None,
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

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.w[name + ".weight"] @ x + self.w.get(name + ".bias", 0.0)

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        out = torch.empty_like(x)
        half = self.spec.head_dim // 2
        for j in range(half):
            angle = torch.tensor(position * self.spec.rope.theta ** (-2 * j / (2 * half)))
            a, b = x[:, j], x[:, j + half]
            out[:, j] = a * angle.cos() - b * angle.sin()
            out[:, j + half] = b * angle.cos() + a * angle.sin()
        return out

    def row(self, hidden, token, position, cache, *, is_recycled=False):
        """Append this row's K/V to ``cache`` and return (state for logits, recycled state)."""
        spec = self.spec
        e = self.w.get("embed_tokens.weight", self.embedding)[token]
        if spec.kind == "eagle3":
            x = hidden if is_recycled else self.fuse(hidden)
            e = self.norm(e, "layers.0.input_layernorm.weight")
            h = self.norm(x, "layers.0.hidden_norm.weight")
            x = h if spec.residual == "normed" else x
            inputs = torch.cat((e, h))
            x = self.layer(x, "layers.0.", position, cache.setdefault(0, []), inputs=inputs)
            final = self.norm(x, "norm.weight")
            return final, final if spec.recycle == "post_norm" else x
        if spec.first_embedding_mask and position == 0:
            e = torch.zeros_like(e)
        parts = [self.norm(e, "enorm.weight"), self.norm(hidden, "hnorm.weight")]
        if spec.concat == "hidden_embedding":
            parts.reverse()
        x = self.linear(torch.cat(parts), "eh_proj")
        for number in range(spec.num_layers):
            x = self.layer(x, f"layers.{number}.", position, cache.setdefault(number, []))
        final = self.norm(x, "norm.weight")
        state = final if spec.logits_from == "post_norm" else x
        return state, final if spec.recycle == "post_norm" else x

    def fuse(self, streams):
        width = self.spec.target_hidden_size or self.spec.hidden_size
        parts = [streams[i : i + width] for i in range(0, len(streams), width)]
        if self.spec.fusion_norm == "each":
            parts = [self.norm(p, f"fc_norm.{i}.weight") for i, p in enumerate(parts)]
        joined = torch.cat(parts)
        if self.spec.fusion_norm == "joined":
            joined = self.norm(joined, "input_norm.weight")
        return self.w["fc.weight"] @ joined

    def layer(self, x, layer, position, cache, *, inputs=None):
        a = self.norm(x, layer + "input_layernorm.weight") if inputs is None else inputs
        spec, attention = self.spec, layer + "self_attn."
        mix = latent_attention if spec.latent else StepwiseHead.grouped_attention
        mixed = mix(self, a, attention, position, cache)
        x = x + self.linear(mixed, attention + "o_proj")
        m = self.norm(x, layer + "post_attention_layernorm.weight")
        mlp = layer + "mlp."
        if spec.experts:
            return x + expert_mlp(self, m, mlp)
        gate = F.silu(self.linear(m, mlp + "gate_proj"))
        return x + self.linear(gate * self.linear(m, mlp + "up_proj"), mlp + "down_proj")

    def grouped_attention(self, a, attention, position, cache):
        spec = self.spec
        heads = {n: self.linear(a, f"{attention}{n}_proj").view(-1, spec.head_dim) for n in "qkv"}
        for n in "qk":
            each = [self.norm(head, f"{attention}{n}_norm.weight") for head in heads[n]]
            heads[n] = self.rotate(torch.stack(each), position)
        q, k = heads["q"], heads["k"]
        cache.append((k, heads["v"]))
        mixed = []
        for head in range(spec.num_heads):
            group = head * spec.num_kv_heads // spec.num_heads
            keys = torch.stack([k[group] for k, _ in cache])
            values = torch.stack([v[group] for _, v in cache])
            probs = torch.softmax(keys @ q[head] / spec.head_dim**0.5, dim=0)
            mixed.append(probs @ values)
        return torch.cat(mixed)

    def block(self, index: int, g: torch.Tensor) -> torch.Tensor:
        name = f"blocks.{index}.layers.0."
        z = self.w[name + "weight"] @ g + self.w.get(name + "bias", 0.0)
        return g + z / (1 + (-z).exp())

    def unroll(self, sample: TinySample, start: int, num_steps: int) -> list[torch.Tensor]:
        """States of ``num_steps`` chained steps from ``start``: a cache of rows ``<= start``, then
        recycled rows on top of it."""
        if self.spec.kind == "medusa":
            return [self.block(k, sample.hidden[start]) for k in range(num_steps)]
        cache: dict = {}
        read = sample.layers if self.spec.reads_layers else sample.hidden
        for i in range(start + 1):
            state, recycled = self.row(read[i], sample.input_ids[i + 1], i, cache)
        states = [state]
        for k in range(1, num_steps):
            token = sample.input_ids[start + 1 + k]
            state, recycled = self.row(recycled, token, start + k, cache, is_recycled=True)
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
