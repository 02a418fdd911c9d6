"""`decode_b1`, `decode_b16`: plain greedy decoding against `transformers` `generate`, both bf16."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.evaluation import evaluation_prompts
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.loader import Target
from runtime.request import Request, SamplingParams
from tests.bench.harness import BenchResult, interleave, streaming_bytes_per_second

NEW_TOKENS = 96


def run(target: Target, *, batch: int) -> BenchResult:
    """Tokens per second of `batch` MT-Bench prompts decoded together, sorted by length."""
    prompts = bench_prompts(target, batch=batch)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [Request(str(i), tuple(ids), sampling) for i, ids in enumerate(prompts)]
    engine = Engine(target.model, config=EngineConfig(max_running=batch, num_pages=512))

    peer = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.bfloat16).eval()
    longest = max(map(len, prompts))
    pad = target.eos_token_ids[0]
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])

    def peer_round() -> None:
        with torch.inference_mode():
            peer.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=pad,
            )

    limit = step_limit(target, prompts)
    timing = interleave(
        lambda: engine.generate(requests) and None,
        peer_round,
        lambda: batch * limit(),
        units=batch * NEW_TOKENS,
        rounds=5,
    )
    name = f"decode_b{batch}"
    return BenchResult.of(
        name,
        timing,
        units=batch * NEW_TOKENS,
        note=f"{bytes_per_step(target, prompts) / 1e6:.0f} MB per step",
    )


def bench_prompts(target: Target, *, batch: int) -> list[list[int]]:
    """``batch`` neighbouring prompts of MT-Bench by length, at most 128 tokens each."""
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    prompts = [p.prompt_ids for p in evaluation_prompts("mtbench", tokenizer, limit=80)]
    short = sorted((ids for ids in prompts if len(ids) <= 128), key=len)
    return [list(ids) for ids in short[8 : 8 + batch]]


def step_limit(target: Target, prompts: list[list[int]]) -> Callable[[], float]:
    """Measures how many steps per second the memory would allow, if nothing else took time."""
    size = bytes_per_step(target, prompts)
    model = target.model
    return lambda: streaming_bytes_per_second(model.dtype, model.make_linear) / size


def bytes_per_step(target: Target, prompts: list[list[int]]) -> float:
    """Weights and, in the middle of decoding, K/V of all prompts."""
    config = target.config
    kv_tokens = sum(map(len, prompts)) + len(prompts) * NEW_TOKENS / 2
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * kv_tokens
    return weight_bytes(target) + kv_bytes


def weight_bytes(target: Target) -> float:
    """Bytes of weights one decode step reads (a tied embedding counts once, as the head)."""
    config = target.config
    q_dim = config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q_dim + 2 * kv_dim + 3 * config.intermediate_size)
    elements = config.num_layers * layer + config.vocab_size * config.hidden_size
    return elements * torch.finfo(target.model.dtype).bits / 8
