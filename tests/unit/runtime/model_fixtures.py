"""Tiny random targets written with transformers, and batches over a real slot table."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from runtime.batch import BatchMode, ForwardBatch
from runtime.cpu_kernels import CpuKernels
from runtime.kernel_library import load_kernels
from runtime.kv_cache import SlotTable

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.2,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "truncate": True,
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.3,
    "eos_token_id": 2,
}


CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "deepseekv2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseekv3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
OWN: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 12},  # heads wider than the residual stream
    "qwen3moe": {
        "head_dim": 12,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "deepseekv2": {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseekv3": {
        **_LATENT,
        "q_lora_rank": 18,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_mtp_layers": 0,
    },
}


def save_llama(path: Path, *, seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    model = save_model(path, "llama", seed=seed, **overrides)
    assert isinstance(model, LlamaForCausalLM)
    return model


def save_model(path: Path, family: str, *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random model saved to ``path``; norms and biases are random too, or they test nothing."""
    torch.manual_seed(seed)
    config_class, model_class = CLASSES[family]
    config = config_class(**{**SMALL, **OWN.get(family, {}), **overrides})
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    model.save_pretrained(path)
    return model


def kernel_cache() -> Path:
    """One cache for every test of this user, so that the kernels are compiled once."""
    return Path(tempfile.gettempdir()) / f"mtp-train-tests-{os.getuid()}"


def fused_kernels() -> CpuKernels:
    """The compiled kernels; skips only where there is no compiler, not where they are rejected."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    kernels = load_kernels(kernel_cache())
    assert kernels is not None, "g++ is here, but the kernels did not build or disagree with torch"
    return kernels


def make_table(*, page_size: int = 16, num_rows: int = 8, num_pages: int = 256) -> SlotTable:
    return SlotTable(num_rows=num_rows, max_len=512, page_size=page_size, num_pages=num_pages)


def make_batch(
    table: SlotTable,
    rows: list[int],
    chunks: list[list[int]],
    starts: list[int],
    *,
    mode: BatchMode = BatchMode.PREFILL,
    hidden_ND: torch.Tensor | None = None,
) -> ForwardBatch:
    """``chunks[b]`` are the ids of request ``b`` at positions ``starts[b]`` and up."""
    positions, slots = [], []
    for row, chunk, start in zip(rows, chunks, starts, strict=True):
        table.reserve(row, start + len(chunk))
        positions.append(torch.arange(start, start + len(chunk)))
        slots.append(table.slots(row, start, start + len(chunk)))
    return ForwardBatch(
        mode=mode,
        input_ids_N=torch.tensor([token for chunk in chunks for token in chunk]),
        positions_N=torch.cat(positions),
        write_slots_N=torch.cat(slots),
        q_lens=tuple(len(chunk) for chunk in chunks),
        kv_lens=tuple(s + len(c) for s, c in zip(starts, chunks, strict=True)),
        table_rows=tuple(rows),
        hidden_ND=hidden_ND,
    )


def scatter_pages(table: SlotTable, rows: list[int], length: int) -> None:
    """Reserve ``length`` tokens per row page by page, and occupy the page after each of them."""
    for stop in range(table.page_size, length + table.page_size, table.page_size):
        for row in rows:
            table.reserve(row, min(stop, length))
            last = int(table.slots(row, stop - table.page_size, stop)[0]) // table.page_size
            table.allocator.allocate(1, after=last)


def random_ids(count: int, *, seed: int, vocab_size: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
