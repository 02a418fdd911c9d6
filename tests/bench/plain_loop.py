"""The peer of the training benchmarks: the loop one would write first.

A Hugging Face decoder layer between two norms and a projection, padded batches, full logits of the
rows that carry loss, AdamW from torch. bf16 parameters, losses in fp32. K steps are unrolled over a
growing Hugging Face cache with a dense mask: every row of step k sees the rows of step 0 up to its
own and, of the later steps, its own alone. Same samples, same objective and same rows that carry
loss as ours.

Shape legend: B samples, T padded rows, K steps, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, DynamicCache
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from mtp_train.packing import Sample


class PlainHead(nn.Module):
    """`eh_proj([enorm(e), hnorm(h)])` -> `LlamaDecoderLayer` -> norm, on padded `[B, T]`
    batches.
    """

    def __init__(self, target_path: str) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(target_path)
        config._attn_implementation = "sdpa"
        width = config.hidden_size
        self.enorm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.hnorm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(
        self, embedding_BTD: torch.Tensor, hidden_BTD: torch.Tensor, step: int, cache: DynamicCache
    ) -> torch.Tensor:
        """Step ``step`` of every row; ``cache`` holds the keys and values of the steps before."""
        length = hidden_BTD.shape[1]
        positions = torch.arange(length)[None] + step
        embedding_BTD = embedding_BTD.masked_fill((positions == 0)[..., None], 0.0)
        x = self.eh_proj(torch.cat([self.enorm(embedding_BTD), self.hnorm(hidden_BTD)], -1))
        own = torch.eye(length, dtype=torch.bool)
        seen = torch.cat([torch.ones_like(own).tril(), *[own] * step], 1)
        out = self.layer(
            x,
            attention_mask=seen[None, None],
            position_ids=positions,
            cache=cache,
            use_cache=True,
            position_embeddings=self.rotary(x, positions),
        )
        return self.norm(out[0] if isinstance(out, tuple) else out)


@dataclass(frozen=True)
class _Padded:
    """One batch. ``ids`` and ``targets`` are K longer than the rows: step k reads k further on."""

    hidden_BTD: torch.Tensor
    ids: torch.Tensor
    targets: torch.Tensor
    is_answer: torch.Tensor


class PlainTrainer:
    """One optimiser step per batch of samples."""

    def __init__(
        self,
        target_path: str,
        embedding_VD: torch.Tensor,
        lm_head_VD: torch.Tensor,
        *,
        lr: float,
        num_steps: int = 1,
    ) -> None:
        torch.manual_seed(0)
        self.num_steps = num_steps
        self.head = PlainHead(target_path).to(embedding_VD.dtype)
        self.embedding_VD, self.lm_head_VD = embedding_VD, lm_head_VD
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=lr, betas=(0.9, 0.95))

    def step(self, samples: Sequence[Sample]) -> float:
        loss = self.loss(samples)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def loss(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Mean over the active pairs of all steps."""
        batch = self._pad(samples)
        length = batch.hidden_BTD.shape[1]
        state_BTD, cache = batch.hidden_BTD, DynamicCache()
        total, count = torch.zeros(()), 0
        for k in range(self.num_steps):
            embedding_BTD = F.embedding(batch.ids[:, k : k + length], self.embedding_VD)
            state_BTD = self.head(embedding_BTD, state_BTD, k, cache)
            active = batch.is_answer[:, k : k + length]
            total = total + self._sum(state_BTD[active], batch.targets[:, k : k + length][active])
            count += int(active.sum())
        return total / max(count, 1)

    def _sum(self, state: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            probs = F.linear(wanted, self.lm_head_VD).float().softmax(-1)
        logits = F.linear(state, self.lm_head_VD).float()
        soft = -(probs * logits.log_softmax(-1)).sum()
        near = F.smooth_l1_loss(state.float(), wanted.float(), reduction="none").mean(-1).sum()
        return soft + 0.1 * near

    def _pad(self, samples: Sequence[Sample]) -> _Padded:
        """Row i reads ``g_i`` and ``t_{i+1}`` and predicts ``t_{i+2}``."""
        length = max(len(s.input_ids) for s in samples) - 1
        shape = len(samples), length + self.num_steps
        width, dtype = samples[0].hidden.shape[1], self.embedding_VD.dtype
        hidden = torch.zeros(len(samples), length, width, dtype=dtype)
        targets = torch.zeros(*shape, width, dtype=dtype)
        ids = torch.zeros(shape, dtype=torch.int64)
        is_answer = torch.zeros(shape, dtype=torch.bool)
        for row, sample in enumerate(samples):
            count = len(sample.input_ids) - 1
            hidden[row, :count] = sample.hidden[:count]
            targets[row, :count] = sample.hidden[1 : count + 1]
            ids[row, :count] = sample.input_ids[1:]
            is_answer[row, : count - 1] = sample.loss_mask[2:]
        return _Padded(hidden, ids, targets, is_answer)
