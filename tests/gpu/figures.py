"""Figures of a device: one JSON line per row, written as soon as it is measured.

    python -m tests.gpu.figures --out figures.jsonl --seconds 240          # an 8B-shaped target
    python -m tests.gpu.figures --device cpu --shape tiny --out x.jsonl    # a rehearsal

Weights are random, so acceptance is simulated: each draft is accepted with the rate of the row,
whatever the target says. Steps cost what they cost; only which tokens come out is made up.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.base import Model
from runtime.models.llama import LlamaModel
from runtime.request import Phase, Request, SamplingParams
from runtime.verify import Verified
from tests.gpu.models import SHAPES, Shape, random_head, random_target
from tests.gpu.stopwatch import StepWatch, synchronize, time_call

ROW_NAMES = (
    "hardware",
    "dump",
    "decode_sdpa",
    "decode",
    "decode_graphs",
    "mtp1",
    "mtp1_graphs",
    "mtp3_graphs",
    "draft_target",
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured. ``rate``: simulated acceptance of each draft."""

    dump_sequences: int
    dump_len: int
    batches: tuple[int, ...]
    context: int
    steps: int
    copy_bytes: int
    square: int
    rate: float = 0.8


SIZES = {
    "8b": Sizes(32, 2048, (1, 16, 64), 1024, 48, 2 << 30, 8192),
    "1b": Sizes(32, 2048, (1, 16, 64), 1024, 48, 2 << 30, 8192),
    "tiny": Sizes(2, 24, (1, 2), 16, 4, 1 << 20, 64),
}


@dataclass(frozen=True)
class Limits:
    """What the device showed a moment before, in bytes and bf16 operations per second."""

    bytes_per_s: float
    flops_per_s: float


class Rig:
    """The target, and the limits that its figures are shares of."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        self.shape: Shape = SHAPES[name]
        self.sizes: Sizes = SIZES[name]
        self.draft_shape = SHAPES["tiny" if name == "tiny" else "1b"]
        self._target: LlamaModel | None = None
        self._limits: Limits | None = None

    @property
    def target(self) -> LlamaModel:
        if self._target is None:
            self._target = random_target(self.shape, device=self.device)
        return self._target

    @property
    def limits(self) -> Limits:
        if self._limits is None:
            self._limits = measure_limits(self.sizes, self.device)
        return self._limits

    def engine(self, target: LlamaModel, batch: int, **settings: Any) -> Engine:
        """An engine with room for ``batch`` requests and the steps that are measured."""
        draft: Model | None = settings.pop("draft", None)
        k = settings.get("num_draft_tokens", 0)
        length = self.sizes.context + (self.sizes.steps + 16) * (k + 1)
        page_size = 16
        config = EngineConfig(
            page_size=page_size,
            num_pages=batch * (-(-length // page_size) + 1),
            max_running=batch,
            max_model_len=length,
            max_batch_tokens=max(8192, batch * (k + 1)),
            **settings,
        )
        return Engine(target, config=config, draft=draft)  # type: ignore[arg-type]


def measure_limits(sizes: Sizes, device: torch.device) -> Limits:
    """The rate of a copy (bytes read and written) and of a square bf16 product."""
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    place = torch.empty_like(source)
    copy_s = time_call(lambda: place.copy_(source), device, repeats=5)
    side = sizes.square
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = time_call(lambda: a @ b, device, repeats=5)
    return Limits(2 * sizes.copy_bytes / copy_s, 2 * side**3 / product_s)


# -- rows ------------------------------------------------------------------------------------------


def hardware(rig: Rig) -> Iterator[dict[str, Any]]:
    is_gpu = rig.device.type == "cuda"
    yield {
        "device": torch.cuda.get_device_name(rig.device) if is_gpu else "cpu",
        "torch": torch.__version__,
        "flashinfer": _version("flashinfer"),
        "attention": type(rig.target.backend).__name__,
        "copy_gb_s": rig.limits.bytes_per_s / 1e9,
        "matmul_tflop_s": rig.limits.flops_per_s / 1e12,
    }


def dump(rig: Rig) -> Iterator[dict[str, Any]]:
    """Hidden states of whole sequences, as the feature dump computes them."""
    sizes = rig.sizes
    sequences = [_ids(rig, sizes.dump_len, seed) for seed in range(sizes.dump_sequences)]
    engine = rig.engine(rig.target, sizes.dump_sequences)
    list(engine.forward_hidden(sequences[:2]))
    synchronize(rig.device)
    start = time.perf_counter()
    list(engine.forward_hidden(sequences))
    synchronize(rig.device)
    tokens_per_s = sizes.dump_sequences * sizes.dump_len / (time.perf_counter() - start)
    shape = rig.shape
    head = shape.vocab_size * shape.hidden_size  # a dump computes no logits
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * sizes.dump_len
    flops_per_token = 2 * (shape.num_matrix_weights - head) + attention
    yield {
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * flops_per_token / rig.limits.flops_per_s,
        "sequences": sizes.dump_sequences,
        "length": sizes.dump_len,
    }


def decode_with(**settings: Any) -> Callable[[Rig], Iterator[dict[str, Any]]]:
    attention = settings.pop("target_attention", "")

    def rows(rig: Rig) -> Iterator[dict[str, Any]]:
        target = rig.target
        if attention:
            target = _with_attention(target, attention)
        for batch in rig.sizes.batches:
            engine = rig.engine(target, batch, **settings)
            row = measure_steps(rig, engine, batch)
            moved = 2 * rig.shape.num_matrix_weights + rig.shape.kv_bytes(
                batch * (rig.sizes.context + rig.sizes.steps // 2)
            )
            gb_s = moved / row["step_ms"] / 1e6
            share = gb_s * 1e9 / rig.limits.bytes_per_s
            yield {**row, "gb_s": gb_s, "share_of_roofline": share}
            del engine

    return rows


def mtp_with(k: int, **settings: Any) -> Callable[[Rig], Iterator[dict[str, Any]]]:
    def rows(rig: Rig) -> Iterator[dict[str, Any]]:
        head = random_head(rig.target)
        for batch in rig.sizes.batches:
            engine = rig.engine(rig.target, batch, draft=head, num_draft_tokens=k, **settings)
            with simulated_acceptance(rig.sizes.rate, "runtime.spec.mtp"):
                yield {**measure_steps(rig, engine, batch), "k": k, "rate": rig.sizes.rate}
            del engine

    return rows


def draft_target(rig: Rig) -> Iterator[dict[str, Any]]:
    module = "runtime.spec.draft_target"
    if importlib.util.find_spec(module) is None:
        yield {"skipped": f"{module} is not there"}
        return
    draft = random_target(rig.draft_shape, device=rig.device, seed=1)
    for batch in rig.sizes.batches:
        engine = rig.engine(rig.target, batch, draft=draft, num_draft_tokens=3)
        with simulated_acceptance(rig.sizes.rate, module):
            yield {**measure_steps(rig, engine, batch), "k": 3, "rate": rig.sizes.rate}
        del engine


ROWS: dict[str, Callable[[Rig], Iterator[dict[str, Any]]]] = {
    "hardware": hardware,
    "dump": dump,
    "decode_sdpa": decode_with(target_attention="sdpa"),
    "decode": decode_with(),
    "decode_graphs": decode_with(cuda_graphs=True),
    "mtp1": mtp_with(1),
    "mtp1_graphs": mtp_with(1, cuda_graphs=True),
    "mtp3_graphs": mtp_with(3, cuda_graphs=True),
    "draft_target": draft_target,
}


# -- how it is measured ----------------------------------------------------------------------------


def measure_steps(rig: Rig, engine: Engine, batch: int) -> dict[str, Any]:
    """Steps in which every request decodes, after a few that record graphs and compile kernels."""
    for seed in range(batch):
        sampling = SamplingParams(max_tokens=1 << 20, ignore_eos=True)
        engine.add(Request(f"r{seed}", tuple(_ids(rig, rig.sizes.context, seed)), sampling))
    while any(state.phase is not Phase.DECODE for state in engine._states.values()):
        engine.step()
    for _ in range(6):
        engine.step()
    watch, num_tokens = StepWatch(), 0
    with watch.watching(engine):
        for _ in range(rig.sizes.steps):
            num_tokens += sum(len(event.token_ids) for event in engine.step())
    per_step = num_tokens / rig.sizes.steps / batch
    step_s = watch.wall_s / rig.sizes.steps
    for request_id in list(engine._states):
        engine.abort(request_id)
    return {
        "batch": batch,
        "context": rig.sizes.context,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": num_tokens / watch.wall_s,
        "emitted_per_step": per_step,
        "itl_ms": 1e3 * step_s / max(per_step, 1e-9),
        "host_ms": 1e3 * watch.host_s / rig.sizes.steps,
        "host_hidden": watch.share_hidden,
    }


@contextmanager
def simulated_acceptance(rate: float, module_name: str) -> Iterator[None]:
    """Verification costs what it costs; then each draft is accepted with chance ``rate``."""
    module: Any = importlib.import_module(module_name)
    verify = module.verify_chain
    generators: dict[torch.device, torch.Generator] = {}

    def simulated(
        mode: Any, logits: torch.Tensor, draft_ids_BK: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Verified:
        real = verify(mode, logits, draft_ids_BK, *args, **kwargs)
        device = draft_ids_BK.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        chance_BK = torch.rand(draft_ids_BK.shape, device=device, generator=generator)
        accepted_B = (chance_BK < rate).long().cumprod(1).sum(1)
        own_B1 = logits.argmax(-1).gather(1, accepted_B[:, None])
        padded_BK1 = torch.cat([draft_ids_BK, own_B1], 1).scatter(1, accepted_B[:, None], own_B1)
        steps = torch.arange(padded_BK1.shape[1], device=device)
        ids_BK1 = padded_BK1.masked_fill(steps > accepted_B[:, None], -1)
        return type(real)(ids_BK1, accepted_B + 1, own_B1[:, 0])

    module.verify_chain = simulated
    try:
        yield
    finally:
        module.verify_chain = verify


def _with_attention(target: LlamaModel, attention: str) -> LlamaModel:
    """The same weights under another attention."""
    from copy import copy

    from runtime.attention.sdpa import SdpaBackend

    assert attention == "sdpa"
    other = copy(target)
    other.backend = SdpaBackend()
    return other


def _ids(rig: Rig, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, rig.shape.vocab_size, (count,), generator=generator).tolist()


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return ""
    return str(importlib.import_module(package).__version__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="8b", choices=tuple(SHAPES))
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no row after that")
    parser.add_argument("--only", action="append", choices=ROW_NAMES, help="may be repeated")
    options = parser.parse_args(argv)
    rig = Rig(options.shape, torch.device(options.device))
    start = time.monotonic()
    has_failed = False
    with options.out.open("w") as out, torch.inference_mode():
        for name in options.only or ROW_NAMES:
            begun = time.monotonic()
            if begun - start > options.seconds:
                _write(out, {"name": name, "skipped": "no time left"})
                continue
            try:
                for row in ROWS[name](rig):
                    seconds = time.monotonic() - begun
                    _write(out, {"name": name, "seconds": round(seconds, 2), **row})
            except (
                RuntimeError,
                ValueError,
                AssertionError,
            ) as error:
                has_failed = True
                _write(out, {"name": name, "failed": f"{type(error).__name__}: {error}"})
    return int(has_failed)


def _write(out: Any, row: dict[str, Any]) -> None:
    out.write(json.dumps(row) + "\n")
    out.flush()


if __name__ == "__main__":
    raise SystemExit(main())
