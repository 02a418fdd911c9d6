"""`unroll_k*`, `unroll_*k`: one forward and backward of a head's unroll, over K and the length.

Ours beside the same head with dense masks: one mask of query rows × (packed rows + all entries of
the chain), whose scores exist at once. Kept memory is what the forward saves for the backward, each
storage counted once. `unroll_*k` is one sample of so many tokens without a dense peer that would
fit: the peer is the same tokens as samples of 1,024, so the ratio is what a longer sample costs
per token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mtp_train.attention import (
    BLOCKWISE,
    AttentionPlan,
    ChainStep,
    TrainingAttention,
    choose_attention,
)
from mtp_train.heads import build_training_head
from mtp_train.heads.init import initialise
from mtp_train.heads.mtp import MtpHead
from mtp_train.packing import HeadBatch, pack
from runtime.head_spec import HeadSpec, RopeSpec
from tests.bench.harness import BenchResult

STEPS = (1, 2, 3, 5, 7)
LENGTHS = (8192, 16384, 32768)
ROWS = 1024
SAMPLE = 1024


class DenseAttention(TrainingAttention):
    """One mask over everything."""

    def __call__(
        self,
        q_NHC: torch.Tensor,
        k_SGC: torch.Tensor,
        v_SGC: torch.Tensor,
        plan: AttentionPlan,
        chain: Sequence[ChainStep] = (),
    ) -> torch.Tensor:
        borders = sorted({block.k_start for block in plan.blocks})
        rows_N = plan.rows_N
        starts = torch.tensor(borders)[
            torch.bucketize(rows_N, torch.tensor(borders), right=True) - 1
        ]
        columns = torch.arange(len(k_SGC))
        seen = [(columns <= rows_N[:, None]) & (columns >= starts[:, None])]
        seen += [torch.arange(len(s.k_MGC)) == s.rows_N[:, None] for s in chain]
        keys = torch.cat([k_SGC, *(s.k_MGC for s in chain)]).transpose(0, 1)[None]
        values = torch.cat([v_SGC, *(s.v_MGC for s in chain)]).transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(
            q_NHC.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=torch.cat(seen, 1),
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


@dataclass(frozen=True)
class _Sample:
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class _Measured:
    seconds: float
    kept_bytes: int


def run_steps(num_steps: int) -> BenchResult:
    spec = _spec(width=128, heads=4)
    batch = _batch(spec, [ROWS // 2] * 2, num_steps)
    ours, peer = _compare(
        spec,
        (BLOCKWISE, batch),
        (DenseAttention(), batch),
        rounds=3,
    )
    return _result(f"unroll_k{num_steps}", ROWS, ours, peer, f"{num_steps} steps of {ROWS} rows")


def run_length(length: int) -> BenchResult:
    spec = _spec(width=64, heads=2)
    flash = choose_attention(
        "flash", device=torch.device("cpu"), dtype=torch.float32, head_dim=spec.head_dim
    )
    ours, peer = _compare(
        spec,
        (flash, _batch(spec, [length], 2)),
        (flash, _batch(spec, [SAMPLE] * (length // SAMPLE), 2)),
        rounds=1,
    )
    name = f"unroll_{length // 1024}k"
    return _result(name, length, ours, peer, f"one sample of {length} tokens, 2 steps")


def _result(name: str, num_rows: int, ours: _Measured, peer: _Measured, what: str) -> BenchResult:
    return BenchResult(
        name=name,
        ours=num_rows / ours.seconds,
        peer=num_rows / peer.seconds,
        ratio=peer.seconds / ours.seconds,
        limit=None,
        share_of_limit=None,
        unit="tokens/s",
        command=f"make bench BENCH={name}",
        note=f"{what}; kept {ours.kept_bytes / 2**20:.1f} MiB, peer {peer.kept_bytes / 2**20:.1f}",
    )


def _compare(
    spec: HeadSpec,
    ours: tuple[TrainingAttention, HeadBatch],
    peer: tuple[TrainingAttention, HeadBatch],
    *,
    rounds: int,
) -> tuple[_Measured, _Measured]:
    sides = [_side(spec, *side) for side in (ours, peer)]
    kept = [side() for side in sides]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for index, side in enumerate(sides):
            started = time.perf_counter()
            side()
            times[index].append(time.perf_counter() - started)
    first, second = (_Measured(statistics.median(t), k) for t, k in zip(times, kept, strict=True))
    return first, second


def _side(spec: HeadSpec, attention: TrainingAttention, batch: HeadBatch) -> Callable[[], int]:
    head = build_training_head(spec, dtype=torch.float32, attention=attention)
    head.load_tensors(
        initialise(
            spec,
            method="random",
            seed=1,
            initializer_range=0.05,
            num_target_layers=1,
            read_target=lambda name: torch.empty(0),
        )
    )
    embedding = torch.randn(spec.vocab_size, spec.hidden_size)
    return lambda: kept_bytes(head, batch, embedding)


def kept_bytes(head: MtpHead, batch: HeadBatch, embedding_VD: torch.Tensor) -> int:
    """Forward and backward; bytes of the storages that the forward saved, parameters included."""
    seen: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        states = head(batch, embedding_VD)
    torch.stack([state.sum() for state in states]).sum().backward()
    return sum(seen.values())


def _spec(*, width: int, heads: int) -> HeadSpec:
    return HeadSpec(
        kind="mtp",
        hidden_size=width,
        intermediate_size=2 * width,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=width // heads,
        vocab_size=64,
        max_position_embeddings=max(LENGTHS),
        rope=RopeSpec(10000.0),
        norm_eps=1e-5,
        target_fingerprint="bench",
    )


def _batch(spec: HeadSpec, lengths: Sequence[int], num_steps: int) -> HeadBatch:
    generator = torch.Generator().manual_seed(0)
    samples = [
        _Sample(
            torch.randint(spec.vocab_size, (length,), generator=generator),
            torch.ones(length, dtype=torch.bool),
            torch.randn(length, spec.hidden_size, generator=generator),
        )
        for length in lengths
    ]
    return pack(samples, num_steps=num_steps)
