"""What the configured target needs: bytes of weights, K/V, features and head. Nothing is loaded.

Weights and K/V are exact, from ``config.json``. The trainer's figure is an estimate: fp32 weights,
gradients and two moments of the head, without activations and logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mtp_train.attention import decide_attention
from mtp_train.config import Codec, Config
from mtp_train.console import format_bytes
from mtp_train.doctor.facts import Finding, Machine
from mtp_train.features.codecs import STORED_DTYPES
from mtp_train.features.estimate import estimate_size, room_for_dump
from mtp_train.features.target import target_directory, target_dtype
from mtp_train.heads.init import follows_target, make_head_spec, unknown_draft_vocab
from mtp_train.layer_ids import choose_layer_ids
from mtp_train.plan.facts import count_weights
from mtp_train.trainer import training_dtype
from runtime.models.config import ModelConfig, load_config

_TRAINER_BYTES = 16  # per parameter of the head
_MILLION = 1_000_000


@dataclass(frozen=True)
class Sizes:
    """Bytes; ``kv_*`` per token of context."""

    dtype: torch.dtype
    parameters: int
    weights: int
    kv_target: int
    kv_head: int
    kv_pool: int
    head_parameters: int
    head_weights: int
    features: dict[Codec, int]  # per million tokens, in samples of a thousand

    @property
    def head_training(self) -> int:
        return self.head_parameters * _TRAINER_BYTES


def check_target(config: Config, machine: Machine) -> list[Finding]:
    """Sizes of ``config.target`` beside what the machine has. Needs torch."""
    is_gpu = config.target.device != "cpu" and machine.torch.sees_gpu
    device = torch.device("cuda" if is_gpu else "cpu")
    try:
        model = load_config(target_directory(config.target))
    except ValueError as error:
        return [Finding("target", "fail", str(error), "name a supported model with target.path")]
    sizes = measure_sizes(model, config, dtype=target_dtype(config.target, device))
    return [
        _check_weights(sizes, model, machine, is_gpu=is_gpu),
        Finding(
            "K/V per token",
            "ok",
            f"{format_bytes(sizes.kv_target)} target + {format_bytes(sizes.kv_head)} head",
        ),
        _check_features(sizes, config, machine),
        Finding(
            "head",
            "ok",
            f"{sizes.head_parameters / _MILLION:.1f} M parameters, "
            f"{format_bytes(sizes.head_weights)}; training it takes about "
            f"{format_bytes(sizes.head_training)} beside the target (estimated)",
        ),
        *_check_attention(config, model, device),
    ]


def _check_attention(config: Config, model: ModelConfig, device: torch.device) -> list[Finding]:
    """Which attention trains the head, and why. Medusa has none."""
    if config.head.kind == "medusa":
        return []
    name = "training attention"
    try:
        choice = decide_attention(
            config.trainer.attention,
            device=device,
            dtype=training_dtype(config, device),
            head_dim=model.head_dim,
        )
    except ValueError as error:
        return [Finding(name, "fail", str(error), "trainer.attention=auto")]
    return [Finding(name, "ok", f"{choice.backend}, {choice.why}")]


def measure_sizes(model: ModelConfig, config: Config, *, dtype: torch.dtype) -> Sizes:
    """Sizes of a target of shape ``model`` in ``dtype`` and of its head."""
    parameters = _count(model.tensor_shapes())
    width = model.hidden_size
    kv_target = model.kv_width * model.num_layers * dtype.itemsize
    head_width = model.kv_width if follows_target(config.head) else 2 * model.kv_dim
    kv_head = head_width * config.head.num_layers * dtype.itemsize
    head_parameters = _count_head(config, model)
    slots = config.runtime.num_pages * config.runtime.page_size
    features = {
        codec: estimate_size(
            [1000] * 1000,
            hidden_size=width,
            codec=codec,
            num_states=1 + len(choose_layer_ids(config.head, num_layers=model.num_layers)),
        ).num_bytes
        for codec in STORED_DTYPES
    }
    return Sizes(
        dtype=dtype,
        parameters=parameters,
        weights=parameters * dtype.itemsize,
        kv_target=kv_target,
        kv_head=kv_head,
        kv_pool=(kv_target + kv_head) * slots,
        head_parameters=head_parameters,
        head_weights=head_parameters * dtype.itemsize,
        features=features,
    )


def _count_head(config: Config, model: ModelConfig) -> int:
    vocab = unknown_draft_vocab(config.head.draft_vocab_size)
    return count_weights(make_head_spec(config.head, model, fingerprint="", draft_vocab=vocab))


def _check_weights(sizes: Sizes, model: ModelConfig, machine: Machine, *, is_gpu: bool) -> Finding:
    place, available = "memory", machine.memory.usable
    if is_gpu and machine.gpus and machine.gpus[0].memory_bytes:  # 0: shared with the processor
        place, available = "GPU memory", machine.gpus[0].memory_bytes
    needed = sizes.weights + sizes.kv_pool + sizes.head_weights
    text = (
        f"{model.architecture}, {sizes.parameters / _MILLION:,.0f} M parameters in "
        f"{str(sizes.dtype).removeprefix('torch.')}: {format_bytes(sizes.weights)}; with "
        f"{format_bytes(sizes.kv_pool)} of K/V and the head {format_bytes(needed)} of "
        f"{format_bytes(available)} {place}"
    )
    if needed > available:
        fix = (
            "lower runtime.num_pages"
            if sizes.weights + sizes.head_weights < available
            else "a device with more memory: the target must fit on one (no tensor parallelism yet)"
        )
        return Finding("target", "fail", text, fix)
    if needed > 0.9 * available:
        return Finding("target", "warn", f"{text}: tight", "lower runtime.num_pages")
    return Finding("target", "ok", text)


def _check_features(sizes: Sizes, config: Config, machine: Machine) -> Finding:
    listed = ", ".join(f"{codec} {format_bytes(size)}" for codec, size in sizes.features.items())
    disk = machine.disk
    share = config.features.min_free_disk_share
    spare = room_for_dump(disk.total, disk.free, min_free_share=share)
    fitting = spare / sizes.features[config.features.codec]
    text = (
        f"per million tokens {listed}; {fitting:,.1f} million fit on the disk in "
        f"{config.features.codec}"
    )
    wanted = config.data.max_tokens_total / _MILLION
    if wanted > fitting:
        text += f", fewer than data.max_tokens_total={config.data.max_tokens_total}"
        fix = "features=fp8, or features.path on a larger disk"
        return Finding("features", "fail", text, fix)
    return Finding("features", "ok", text)


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
