"""The benchmarks' peer computes what the trainer computes: otherwise its speed means nothing."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from mtp_train.config import LossConfig
from mtp_train.heads.mtp import MtpHead
from mtp_train.losses import head_loss, loss_weight
from mtp_train.packing import pack
from tests.bench.plain_loop import PlainTrainer
from tests.unit.trainer.reference import random_embedding, random_head, random_sample, tiny_spec


@pytest.mark.parametrize("num_steps", [1, 3])
def test_same_loss_and_same_gradients(num_steps, tmp_path):
    spec = tiny_spec()
    LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_hidden_layers=1,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
    ).save_pretrained(tmp_path)
    head, embedding = random_head(spec), random_embedding(spec)
    lm_head = random_embedding(spec, seed=8)
    samples = [random_sample(spec, length, seed=length) for length in (9, 14)]

    config = LossConfig(num_unroll_steps=num_steps)
    batch = pack(samples, num_steps=num_steps)
    parts = head_loss(head(batch, embedding), batch, lm_head, config=config)
    ours = parts.total / loss_weight(batch.num_active, step_decay=config.step_decay)
    ours.backward()

    peer = PlainTrainer(str(tmp_path), embedding, lm_head, lr=1e-3, num_steps=num_steps)
    peer.head.load_state_dict(_peer_names(head))
    theirs = peer.loss(samples)
    theirs.backward()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-5)
    gradients = {name: p.grad for name, p in peer.head.named_parameters()}
    for name, parameter in head.named_parameters():
        wanted = gradients[name.replace("layers.0.", "layer.")]
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5, msg=name)


def _peer_names(head: MtpHead) -> dict[str, torch.Tensor]:
    return {n.replace("layers.0.", "layer."): t for n, t in head.export_tensors().items()}
