"""`dump_sharegpt`: hidden states of ShareGPT conversations against `transformers`' forward.

Ours includes what `mtp precompute` does with a row: fp8 codec, checksum, shard on disk. The peer's
states are dropped.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from data_prep.ids import hash_token_ids
from mtp_train.features.manifest import Fingerprint
from mtp_train.features.sources import HuggingFaceSource, RuntimeSource, load_hugging_face
from mtp_train.features.writer import FeatureWriter, recover_store
from runtime.models.loader import Target
from tests.bench.harness import BenchResult, interleave, matrix_seconds_per_row
from tests.bench.train import sharegpt_rows

BATCH_TOKENS = 2048
NUM_ROWS = 192


def run(target: Target) -> BenchResult:
    """Tokens per second over the same conversations and the same token budget per batch."""
    rows = sharegpt_rows(target, limit=NUM_ROWS)
    sequences = sorted((ids for ids, _ in rows), key=len, reverse=True)
    ours = RuntimeSource(target.model, max_batch_tokens=BATCH_TOKENS, max_len=1024)
    model = load_hugging_face(target.path, dtype=torch.bfloat16, device=torch.device("cpu"))
    peer = HuggingFaceSource(model, max_batch_tokens=BATCH_TOKENS)

    mask = torch.ones(1024, dtype=torch.bool)
    fingerprint = Fingerprint("bench", "bench", "bench", target.config.hidden_size, "fp8_e4m3")

    def dump() -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder)
            recover_store(store, fingerprint)
            with FeatureWriter(
                store, fingerprint=fingerprint, shard_tokens=65536, max_quarantined=0
            ) as writer:
                for rows_ in ours.hidden(sequences):
                    ids = torch.tensor(rows_.token_ids)
                    writer.add(
                        hash_token_ids(rows_.token_ids), ids, mask[: len(ids)], rows_.hidden_TD
                    )

    def forward_only() -> None:
        for _ in peer.hidden(sequences):
            pass

    num_tokens = sum(map(len, sequences))
    timing = interleave(
        dump, forward_only, lambda: _limit(target, sequences), units=num_tokens, rounds=5
    )
    return BenchResult.of(
        "dump_sharegpt",
        timing,
        units=num_tokens,
        note=f"mean length {num_tokens / len(sequences):.0f}",
    )


def _limit(target: Target, sequences: list[list[int]]) -> float:
    """Linear layers at their best packed rate; attention's products counted at the same rate."""
    config = target.config
    width, inner = config.hidden_size, config.intermediate_size
    q_dim = config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    shapes = [(q_dim + 2 * kv_dim, width), (width, q_dim), (2 * inner, width), (width, inner)]
    per_row, rate = matrix_seconds_per_row(
        shapes, target.model.dtype, target.model.make_linear, rows=1024
    )
    num_tokens = sum(map(len, sequences))
    pairs = sum(n * (n + 1) / 2 for n in map(len, sequences))
    attention_s = 4 * q_dim * pairs / num_tokens / rate
    return 1 / (config.num_layers * (per_row + attention_s))
