"""`train_mtp_k1`, `train_mtp_k3_hot` …: the trainer against the plain loop of `plain_loop.py`.

Both see the same ShareGPT conversations (recorded answers, first exchange) with the target's real
hidden states. Ours is the whole trainer: DeepSpeed, fp32 master weights, packing, checks, logs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from data_prep.config import DataConfig
from data_prep.pipeline import prepare
from data_prep.token_set import load_token_set
from mtp_train import resident
from mtp_train.config import (
    Config,
    LossConfig,
    RunConfig,
    TargetConfig,
    TrainerConfig,
)
from mtp_train.distributed import ProcessGroup, init_process_group
from mtp_train.features.sources import RuntimeSource
from mtp_train.heads.init import initialise, make_head_spec
from mtp_train.packing import Sample
from mtp_train.train_loop import Trainer, TrainInputs
from mtp_train.trainer import frequent_answer_ids
from runtime.cpu import best_dtype, set_threads
from runtime.models.loader import Target, load_target
from tests.bench.harness import BenchResult, matrix_seconds_per_row
from tests.bench.plain_loop import PlainTrainer

TOKENS_PER_STEP = 2048
NUM_SAMPLES = 40
EPOCHS = 3
HOT = 12_000


@dataclass(frozen=True)
class MemorySample:
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor


class MemorySamples:
    """Feature samples held in memory: reading a store is measured elsewhere."""

    def __init__(self, samples: list[MemorySample]) -> None:
        self.samples = samples
        self.lengths = torch.tensor([len(s.input_ids) for s in samples])

    def __len__(self) -> int:
        return len(self.samples)

    def get(self, index: int, *, dtype: torch.dtype) -> Sample:
        return self.samples[index]


def sharegpt_rows(target: Target, *, limit: int) -> list[tuple[list[int], list[bool]]]:
    """Token ids and loss masks of first exchanges (prompt ≤ 300, answer ≤ 400 tokens)."""
    from transformers import AutoTokenizer

    config = DataConfig(
        sources=("sharegpt",),
        max_turns=1,
        max_prompt_tokens=300,
        max_answer_tokens=400,
        max_conversations=limit * 8,
    )
    with tempfile.TemporaryDirectory() as folder:
        prepare(
            config,
            out_dir=Path(folder),
            tokenizer=AutoTokenizer.from_pretrained(target.path),
            seed=1,
        )
        rows = list(load_token_set(Path(folder)).rows("train"))[:limit]
        return [(list(row.input_ids), list(row.loss_mask)) for row in rows]


def memory_samples(target: Target, *, limit: int = NUM_SAMPLES) -> MemorySamples:
    rows = sharegpt_rows(target, limit=limit)
    source = RuntimeSource(target.model, max_batch_tokens=2048, max_len=1024)
    hidden = {int(h.key): h.hidden_TD for h in source.hidden([ids for ids, _ in rows])}
    return MemorySamples(
        [
            MemorySample(torch.tensor(ids), torch.tensor(mask), hidden[index].clone())
            for index, (ids, mask) in enumerate(rows)
        ]
    )


def run(target: Target, group: ProcessGroup, *, num_steps: int, hot: bool) -> BenchResult:
    """Median tokens per second of whole short runs, alternating with the plain loop; and the peak
    memory of one epoch of each side.
    """
    samples = memory_samples(target)
    batches = _sorted_batches(samples)
    inputs = _inputs(target, samples, num_steps=num_steps, hot=hot)
    peer = _peer(target, num_steps)
    num_tokens = int(samples.lengths.sum())
    ours_rates, peer_rates = [], []
    for _ in range(3):
        ours_rates.append(_train(inputs, group, _loss(num_steps, hot), epochs=EPOCHS))
        started = time.perf_counter()
        for batch in batches:
            peer.step(batch)
        peer_rates.append(num_tokens / (time.perf_counter() - started))
    ours, theirs = statistics.median(ours_rates), statistics.median(peer_rates)
    limit, note = _limit(target, samples, num_steps=num_steps, hot=hot)
    name = f"train_mtp_k{num_steps}" + ("_hot" if hot else "")
    peaks = [
        _peak_in_process(side, samples, num_steps=num_steps, hot=hot) for side in ("ours", "peer")
    ]
    return BenchResult(
        name=name,
        ours=ours,
        peer=theirs,
        ratio=ours / theirs,
        limit=limit,
        share_of_limit=ours / limit,
        unit="tokens/s",
        command=f"make bench BENCH={name}",
        note=f"{note}; peak {peaks[0] / 1e6:,.0f} MB against {peaks[1] / 1e6:,.0f} MB "
        f"({peaks[0] / peaks[1]:.2f})",
    )


def _inputs(target: Target, samples: MemorySamples, *, num_steps: int, hot: bool) -> TrainInputs:
    embedding = target.model.embedding_VD.clone()
    head = _config("x", _loss(num_steps, hot), epochs=1).head
    spec = make_head_spec(head, target.config, fingerprint="bench")
    initial = initialise(
        spec,
        method="random",
        seed=1,
        initializer_range=0.02,
        num_target_layers=target.config.num_layers,
        read_target=lambda name: torch.empty(0),
    )
    kept = None
    if hot:
        kept = frequent_answer_ids(
            ((s.input_ids.numpy(), s.loss_mask.numpy()) for s in samples.samples),
            size=HOT,
            vocab_size=target.config.vocab_size,
        )
    return TrainInputs(spec, initial, embedding, embedding, samples, kept, {"bench": "bench"})


def _peer(target: Target, num_steps: int) -> PlainTrainer:
    embedding = target.model.embedding_VD.clone()
    return PlainTrainer(str(target.path), embedding, embedding, lr=2e-3, num_steps=num_steps)


def _train(inputs: TrainInputs, group: ProcessGroup, loss: LossConfig, *, epochs: int) -> float:
    """Tokens per second of a whole run."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(_config(folder, loss, epochs=epochs), inputs, group=group)
        return trainer.train().tokens_per_s


def _peak_in_process(side: str, samples: MemorySamples, *, num_steps: int, hot: bool) -> int:
    """Bytes by which one epoch raises the memory of a process that holds target and samples."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.pt"
        rows = [(s.input_ids, s.loss_mask, s.hidden) for s in samples.samples]
        torch.save(rows, file)
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.train", side, str(file), str(num_steps), str(hot)],
            capture_output=True,
            text=True,
            check=True,
        )
    return int(done.stdout.splitlines()[-1])


def _measure_peak(side: str, file: str, num_steps: int, *, hot: bool) -> int:
    set_threads(0)
    group = init_process_group(device="cpu")
    target = load_target("smollm2-135m-instruct", dtype=best_dtype(), device=torch.device("cpu"))
    rows = torch.load(file, weights_only=True)
    samples = MemorySamples([MemorySample(*row) for row in rows])
    inputs = _inputs(target, samples, num_steps=num_steps, hot=hot)
    resident.reset_peak()
    before = resident.resident()
    if side == "ours":
        _train(inputs, group, _loss(num_steps, hot), epochs=1)
    else:
        peer = _peer(target, num_steps)
        for batch in _sorted_batches(samples):
            peer.step(batch)
    group.close()
    return resident.peak() - before


def _loss(num_steps: int, hot: bool) -> LossConfig:
    return LossConfig(num_unroll_steps=num_steps, sub_vocab_size=HOT if hot else 0)


def _config(root: str, loss: LossConfig, *, epochs: int) -> Config:
    return Config(
        run=RunConfig(name="bench", root=root),
        target=TargetConfig(path="bench"),
        data=DataConfig(),
        loss=loss,
        trainer=TrainerConfig(
            epochs=epochs,
            tokens_per_step=TOKENS_PER_STEP,
            learning_rate=2e-3,
            checkpoint_every=10_000,
            validate_every=0,
            log_every=10,
            wandb="disabled",
            tensorboard=False,
        ),
    )


def _sorted_batches(samples: MemorySamples) -> list[list[MemorySample]]:
    """The peer's batches: sorted by length, as many tokens per step as ours."""
    ordered = sorted(samples.samples, key=lambda s: len(s.input_ids))
    batches: list[list[MemorySample]] = [[]]
    for sample in ordered:
        if sum(len(s.input_ids) for s in batches[-1]) >= TOKENS_PER_STEP:
            batches.append([])
        batches[-1].append(sample)
    return batches


def _limit(
    target: Target, samples: MemorySamples, *, num_steps: int, hot: bool
) -> tuple[float, str]:
    """Tokens per second if every matrix product ran at the best packed rate of its shape.

    Forward once, backward twice the head's layers on rows that carry loss (keys and values of step
    0 on all rows); logits: target, head, and the gradient's product back. Hot: the target's full
    logits once per run. The steps after the first go through all of the head on rows that carry
    loss.
    """
    config = target.config
    width, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_dim = config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    columns = HOT + LossConfig().tail_sample_size if hot else vocab
    all_rows = [(width, 2 * width), (2 * kv_dim, width)]
    loss_rows = [(q_dim, width), (width, q_dim), (2 * inner, width), (width, inner)]
    dtype, make_linear = target.model.dtype, target.model.make_linear
    per_row, _ = matrix_seconds_per_row(all_rows, dtype, make_linear, rows=2048)
    per_loss_row, _ = matrix_seconds_per_row(loss_rows, dtype, make_linear, rows=1536)
    logits, rate = matrix_seconds_per_row([(columns, width)], dtype, make_linear, rows=512)
    lengths = int(samples.lengths.sum())
    shares = [
        sum(int(s.loss_mask[2 + k :].sum()) for s in samples.samples) / lengths
        for k in range(num_steps)
    ]
    share = shares[0]
    seconds = 3 * per_row + sum(shares) * 3 * (per_loss_row + logits)
    seconds += sum(shares[1:]) * 3 * per_row
    if hot:
        full, _ = matrix_seconds_per_row([(vocab, width)], dtype, make_linear, rows=512)
        seconds += share * full / EPOCHS
    note = f"logits at {rate / 1e9:.0f} GFLOP/s, {share:.0%} of the rows carry loss"
    return 1 / seconds, note


if __name__ == "__main__":
    side, file, num_steps, hot = sys.argv[1:]
    sys.stdout.write(f"{_measure_peak(side, file, int(num_steps), hot=hot == 'True')}\n")
