"""The peer of the training benchmarks: the loop one would write first.

A Hugging Face decoder layer between two norms and a projection, padded batches, full logits of the
rows
that carry loss, AdamW from torch. bf16 parameters, losses in fp32. Same samples, same objective
and same
skipped rows as ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig
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

    def forward(self, embedding_BTD: torch.Tensor, hidden_BTD: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden_BTD.shape[1])[None]
        embedding_BTD = embedding_BTD.masked_fill((positions == 0)[..., None], 0.0)
        x = self.eh_proj(torch.cat([self.enorm(embedding_BTD), self.hnorm(hidden_BTD)], -1))
        out = self.layer(x, position_ids=positions, position_embeddings=self.rotary(x, positions))
        return self.norm(out[0] if isinstance(out, tuple) else out)


class PlainTrainer:
    """One optimiser step per batch of samples."""

    def __init__(
        self, target_path: str, embedding_VD: torch.Tensor, lm_head_VD: torch.Tensor, *, lr: float
    ) -> None:
        torch.manual_seed(0)
        self.head = PlainHead(target_path).to(torch.bfloat16)
        self.embedding_VD, self.lm_head_VD = embedding_VD, lm_head_VD
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=lr, betas=(0.9, 0.95))

    def step(self, samples: Sequence[Sample]) -> float:
        length = max(len(s.input_ids) for s in samples) - 1
        width = samples[0].hidden.shape[1]
        hidden = torch.zeros(len(samples), length, width, dtype=torch.bfloat16)
        target = torch.zeros_like(hidden)
        next_ids = torch.zeros(len(samples), length, dtype=torch.int64)
        active = torch.zeros(len(samples), length, dtype=torch.bool)
        for row, sample in enumerate(samples):
            count = len(sample.input_ids) - 1
            hidden[row, :count] = sample.hidden[:-1]
            target[row, :count] = sample.hidden[1:]
            next_ids[row, :count] = sample.input_ids[1:]
            active[row, : count - 1] = sample.loss_mask[2:]
        state = self.head(F.embedding(next_ids, self.embedding_VD), hidden)[active]
        wanted = target[active]
        with torch.no_grad():
            probs = F.linear(wanted, self.lm_head_VD).float().softmax(-1)
        logits = F.linear(state, self.lm_head_VD).float()
        soft = -(probs * logits.log_softmax(-1)).sum(-1).mean()
        loss = soft + 0.1 * F.smooth_l1_loss(state.float(), wanted.float())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())
