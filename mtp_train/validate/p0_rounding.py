"""P0 of a target whose linears round what they read (int8 or fp8 inputs).

Rounding is discontinuous: a last bit moves a value by a step, and layers multiply that. Two correct
ways to such a model therefore differ by far more than rounding errors, transformers from itself
too. What is continuous is compared instead, in two parts that make up the whole: the model without
rounding, against transformers without rounding, by the bounds of any target; and every linear with
rounding, on the inputs that transformers gives its own one.

Shape legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from runtime.config import Int8Grid
from runtime.layers import GatedMlp, GroupedAttention
from runtime.linear import Linear
from runtime.models.llama import LlamaModel

MAX_LINEAR_ERROR = 1e-3  # of the length of the outputs; a value that is a step off costs 3e-4
_NUM_TOKENS = 128


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` of one of the runtime's merged linears: a module of its own in
    transformers.
    """

    linear: Linear
    start: int
    stop: int


@dataclass(frozen=True)
class LinearErrors:
    """``worst``: the largest relative error of any of ``count`` linears, that of ``name``."""

    count: int
    worst: float
    name: str


def stop_rounding(hugging_face: Any) -> int:
    """Make compressed-tensors' modules of a model of transformers read what they are given.

    Returns how many there are: none where transformers made the weights plain and rounds nothing.
    """
    modules = [module for _, module in _rounding_modules(hugging_face)]
    for module in modules:
        module.quantization_enabled = False
    return len(modules)


@torch.inference_mode()
def compare_linears(
    model: LlamaModel, hugging_face: Any, token_ids: list[int], *, grid: Int8Grid
) -> LinearErrors | None:
    """Every linear of ``model`` (float32) on the inputs that transformers, rounding on ``grid``,
    gives its own one over the first tokens of ``token_ids``. ``None`` where it rounds nothing.
    """
    parts = dict(_parts(model))
    errors: dict[str, float] = {}

    def look(name: str, module: Any, args: tuple[torch.Tensor], out_1TO: torch.Tensor) -> None:
        del module
        part = parts[name]
        theirs_TO = out_1TO.flatten(0, -2)
        ours_TO = part.linear(args[0].flatten(0, -2))[:, part.start : part.stop]
        length = theirs_TO.norm().clamp_min(torch.finfo(torch.float32).tiny)
        errors[name] = float((ours_TO - theirs_TO).norm() / length)

    with ExitStack() as hooks:
        for name, module in _rounding_modules(hugging_face):
            if name in parts:
                handle = module.register_forward_hook(partial(look, name))
                hooks.callback(handle.remove)
        if grid == "vllm":
            hooks.enter_context(_rounding_in_127_steps())
        ids = torch.tensor([token_ids[:_NUM_TOKENS]], device=model.device)
        hugging_face.model(ids)
    if not errors:
        return None
    name = max(errors, key=lambda name: errors[name])
    return LinearErrors(len(errors), errors[name], name)


@contextmanager
def _rounding_in_127_steps() -> Iterator[None]:
    """compressed-tensors on vLLM's grid: the largest value of a row is 127 steps, not 127.5."""
    from compressed_tensors.quantization.lifecycle import forward

    published = forward.compute_dynamic_scales_and_zp

    def compute(
        value: torch.Tensor, args: Any, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero_point = published(value, args, *rest, **named)
        is_int8 = args.type == "int" and args.symmetric
        return (scale * (127.5 / 127) if is_int8 else scale), zero_point

    forward.compute_dynamic_scales_and_zp = compute
    try:
        yield
    finally:
        forward.compute_dynamic_scales_and_zp = published


def _rounding_modules(hugging_face: Any) -> Iterator[tuple[str, Any]]:
    for name, module in hugging_face.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.input_activations is not None:
            yield name, module


def _parts(model: LlamaModel) -> Iterator[tuple[str, Part]]:
    """By transformers' names. Routed experts have none there, and are left out."""
    heads = (model.block_shape.num_heads, model.block_shape.num_kv_heads)
    widths = [n * model.block_shape.head_dim for n in (heads[0], heads[1], heads[1])]
    for index, block in enumerate(model.blocks):
        prefix = f"model.layers.{index}."
        if isinstance(block.attention, GroupedAttention):
            names = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
            yield from _split(block.attention.qkv, names, widths)
            out = block.attention.out.linear
            yield f"{prefix}self_attn.o_proj", Part(out, 0, out.out_features)
        if isinstance(block.mlp, GatedMlp):
            names = [f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]
            inner = block.mlp.gate_up.out_features // 2
            yield from _split(block.mlp.gate_up, names, [inner, inner])
            down = block.mlp.down.linear
            yield f"{prefix}mlp.down_proj", Part(down, 0, down.out_features)


def _split(linear: Linear, names: list[str], widths: list[int]) -> Iterator[tuple[str, Part]]:
    start = 0
    for name, width in zip(names, widths, strict=True):
        yield name, Part(linear, start, start + width)
        start += width
