"""What a recipe costs, from stated assumptions: the arithmetic of docs/recipes.md."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_train.config import Config
from mtp_train.features.estimate import estimate_size
from runtime.head_spec import HeadSpec, RopeSpec

# One H100 SXM. Shares are assumed, not measured.
PEAK_FLOPS = 989e12  # bf16, dense
MEMORY_BYTES_PER_S = 3.35e12
DISK_BYTES_PER_S = 2e9  # of the whole node
DUMP_SHARE = 0.4  # of the peak
TRAIN_SHARE = 0.3
DECODE_SHARE = 0.5  # of the memory bandwidth
STEP_OVERHEAD_S = 4e-3  # of one decoding step
DECODE_BATCH = 128  # requests per replica
ROW_TOKENS = 600  # prompt and answer
ANSWER_TOKENS = 400


@dataclass(frozen=True)
class TargetShape:
    """Of the target's ``config.json``, and its number of weights."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    num_weights: float
    replica_gpus: int = 1  # that hold one copy of it


SHAPES = {
    "llama32_1b": TargetShape(2048, 8192, 32, 8, 128256, 1.236e9),
    "llama31_8b": TargetShape(4096, 14336, 32, 8, 128256, 8.030e9),
    "llama33_70b": TargetShape(8192, 28672, 64, 8, 128256, 70.554e9, replica_gpus=8),
}


@dataclass(frozen=True)
class Bill:
    """Bytes, steps of the optimiser, and hours per stage."""

    num_head_weights: int
    feature_bytes: int
    steps: int
    answers_h: float
    dump_h: float
    train_h: float

    @property
    def total_h(self) -> float:
        return self.answers_h + self.dump_h + self.train_h


def head_weights(shape: TargetShape) -> int:
    spec = HeadSpec(
        kind="mtp",
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=131072,
        rope=RopeSpec(theta=500000.0),
        norm_eps=1e-5,
        target_fingerprint="",
    )
    total = 0
    for dimensions in spec.tensor_shapes().values():
        count = 1
        for size in dimensions:
            count *= size
        total += count
    return total


def bill(config: Config, shape: TargetShape, *, num_gpus: int) -> Bill:
    """What ``config`` costs on ``num_gpus`` H100."""
    tokens = config.data.max_tokens_total
    rows = tokens // ROW_TOKENS
    lengths = [ROW_TOKENS] * rows + [tokens - ROW_TOKENS * rows]
    stored = estimate_size(
        lengths, hidden_size=shape.hidden_size, codec=config.features.codec
    ).num_bytes
    replicas = num_gpus // shape.replica_gpus
    weight_bytes = 2 * shape.num_weights
    step_s = STEP_OVERHEAD_S + weight_bytes / (
        shape.replica_gpus * MEMORY_BYTES_PER_S * DECODE_SHARE
    )
    answers_s = rows * ANSWER_TOKENS * step_s / (DECODE_BATCH * replicas)
    dump_flops = 2 * shape.num_weights * tokens
    dump_s = max(dump_flops / (num_gpus * PEAK_FLOPS * DUMP_SHARE), stored / DISK_BYTES_PER_S)
    k, epochs = config.loss.num_unroll_steps, config.trainer.epochs
    logits = shape.vocab_size * shape.hidden_size
    head = head_weights(shape)
    train_flops = (6 * head * k + (4 * k + 2) * logits) * tokens * epochs
    train_s = max(
        train_flops / (num_gpus * PEAK_FLOPS * TRAIN_SHARE), epochs * stored / DISK_BYTES_PER_S
    )
    return Bill(
        num_head_weights=head,
        feature_bytes=stored,
        steps=tokens * epochs // config.trainer.tokens_per_step,
        answers_h=answers_s / 3600,
        dump_h=dump_s / 3600,
        train_h=train_s / 3600,
    )
