"""Linears of quantised checkpoints: rounded inputs, and weights that keep their stored width.

Inputs are rounded as ``compressed-tensors`` does it: the largest magnitude of a row (or tensor) is
half of the range, 127.5 steps of int8 or 448 in fp8, and halves are rounded to even. So the largest
value of an int8 row is always a tie, which the last bit of its scale decides: two correct ways to
the same row may differ by a step there. vLLM's grid has 127 steps and no such tie.

Scales and steps are float32 whatever the model's dtype, as in engines: scales of bfloat16 would
move values by a quarter of a step.

Shape legend: M rows, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from runtime.config import Int8Grid
from runtime.linear import Linear
from runtime.models.quantisation import InputScheme
from runtime.stored_weight import StoredWeight

_FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = torch.finfo(_FP8).max
_INT8_STEPS = {"library": 127.5, "vllm": 127.0}
_CHUNK_VALUES = 1 << 22  # of a weight that are made dense at once
_MM_MULTIPLE = 16  # of both sizes of an fp8 product


@dataclass(frozen=True)
class StaticRange:
    """Stored scale and zero point of a linear's inputs."""

    scale: float
    zero_point: float = 0.0


class InputRounding:
    """How the inputs of one linear are rounded. ``static``: their range, unless it is dynamic.
    ``grid``: steps of the largest value of a symmetric dynamic int8 range.
    """

    def __init__(
        self,
        scheme: InputScheme,
        static: StaticRange | None = None,
        *,
        grid: Int8Grid = "library",
    ) -> None:
        assert scheme.is_dynamic == (static is None), "a stored range is that of a static scheme"
        self.scheme = scheme
        self.static = static
        self._half = _INT8_STEPS[grid] if scheme.kind == "int8" else _LARGEST_FP8

    def scale(self, x_MI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point, ``[M, 1]`` or ``[1, 1]``; all float32."""
        if self.static is not None:
            one = (1, 1)  # filled, not copied: nothing waits
            return x_MI.new_full(one, self.static.scale), x_MI.new_full(one, self.static.zero_point)
        low, high = (
            (x_MI.amin(1, keepdim=True), x_MI.amax(1, keepdim=True))
            if self.scheme.per_token
            else (x_MI.amin().view(1, 1), x_MI.amax().view(1, 1))
        )
        low, high = low.clamp(max=0), high.clamp(min=0)
        least = torch.finfo(x_MI.dtype).eps
        if self.scheme.is_symmetric:
            scale = torch.maximum(-low, high) / self._half
            scale = torch.where(scale == 0, torch.full_like(scale, least), scale)
            return scale, torch.zeros_like(scale)
        scale = (high - low) / 255
        scale = torch.where(scale == 0, torch.full_like(scale, least), scale)
        return scale, (-128 - low / scale).clamp(-128, 127).round()

    def steps(
        self, x_MI: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor
    ) -> torch.Tensor:
        """``x`` in whole steps, float32: of int8 from -128 to 127, of fp8 what it can hold."""
        steps_MI = x_MI / scale
        if self.scheme.kind == "fp8":
            held = steps_MI.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(_FP8)
            return held.to(x_MI.dtype)
        return (steps_MI + zero_point).clamp(-128, 127).round()

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        """What ``x`` is after it was rounded; same shape and dtype."""
        if not x_MI.numel():
            return x_MI
        exact_MI = x_MI.float()
        scale, zero_point = self.scale(exact_MI)
        rounded_MI = (self.steps(exact_MI, scale, zero_point) - zero_point) * scale
        return rounded_MI.to(x_MI.dtype)


class RoundedInputLinear(Linear):
    """Another linear behind rounded inputs."""

    def __init__(self, linear: Linear, rounding: InputRounding) -> None:
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.dtype = linear.dtype
        self._linear, self._rounding = linear, rounding

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        return self._linear(self._rounding(x_MI))

    def dense_weight(self) -> torch.Tensor:
        return self._linear.dense_weight()

    def num_bytes(self) -> int:
        return self._linear.num_bytes()


class StoredLinear(Linear):
    """A weight in its stored width, made dense for every product, some outputs at a time.

    Any device. A product reads one byte per weight and writes and reads the dense ones besides.
    """

    def __init__(
        self,
        weight: StoredWeight,
        bias_O: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        rounding: InputRounding | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.values_OI.shape
        self.dtype = dtype
        self._bias = bias_O
        self._weight = weight.by_rows()
        self._rounding = rounding

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        if self._rounding is not None:
            x_MI = self._rounding(x_MI)
        rows = max(1, _CHUNK_VALUES // self.in_features)
        out_MO = x_MI.new_empty(x_MI.shape[0], self.out_features)
        for start in range(0, self.out_features, rows):
            stop = min(start + rows, self.out_features)
            bias = None if self._bias is None else self._bias[start:stop]
            dense = self._weight.rows(start, stop).dense(self.dtype)
            out_MO[:, start:stop] = F.linear(x_MI, dense, bias)
        return out_MO

    def dense_weight(self) -> torch.Tensor:
        return self._weight.dense(self.dtype)

    def num_bytes(self) -> int:
        return self._weight.num_bytes()


class IntProductLinear(StoredLinear):
    """int8 rows times int8 weights, summed in int32 without an error (``torch._int_mm``), scaled
    once; symmetric rounding and a scale per output.
    """

    @staticmethod
    def can_hold(weight: StoredWeight, rounding: InputRounding | None) -> bool:
        is_int8 = weight.values_OI.dtype == torch.int8 and weight.values_OI.is_cpu
        is_symmetric = rounding is not None and rounding.scheme.is_symmetric
        has_row_scales = weight.zero_point_PQ is None and weight.scale_PQ.shape[1] == 1
        return is_int8 and is_symmetric and has_row_scales

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        assert self._rounding is not None
        if not x_MI.shape[0]:
            return super().__call__(x_MI)
        exact_MI = x_MI.float()
        scale, zero_point = self._rounding.scale(exact_MI)
        steps_MI = self._rounding.steps(exact_MI, scale, zero_point).to(torch.int8)
        sums_MO = torch._int_mm(steps_MI, self._weight.values_OI.t()).float()
        out_MO = sums_MO.mul_(scale).mul_(self._weight.scale_PQ.view(1, -1))
        if self._bias is not None:
            out_MO += self._bias.float()
        return out_MO.to(x_MI.dtype)


class ScaledMmLinear(StoredLinear):
    """fp8 rows times fp8 weights through ``torch._scaled_mm``; a scale per row and per output, or
    one each. Sizes are multiples of 16; sums are float32 and become bfloat16.
    """

    @staticmethod
    def can_hold(weight: StoredWeight, rounding: InputRounding | None) -> bool:
        if rounding is None or weight.values_OI.dtype != _FP8 or weight.scale_PQ.shape[1] != 1:
            return False
        return not any(size % _MM_MULTIPLE for size in weight.values_OI.shape)

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        assert self._rounding is not None
        exact_MI = x_MI.float()
        scale, _ = self._rounding.scale(exact_MI)
        scale = scale.expand(x_MI.shape[0], 1).contiguous()
        steps_MI = (exact_MI / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(_FP8)
        out_MO = torch._scaled_mm(
            steps_MI,
            self._weight.values_OI.t(),
            scale_a=scale,
            scale_b=self._weight.scale_PQ.view(1, -1),
            out_dtype=torch.bfloat16,  # the only one that scales per row allow
        ).to(x_MI.dtype)
        return out_MO if self._bias is None else out_MO + self._bias


class SideBySideLinear(Linear):
    """Several linears over the same inputs, outputs one after the other: where they are not stored
    alike, or round their inputs differently.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.out_features = sum(part.out_features for part in parts)
        self.in_features, self.dtype = parts[0].in_features, parts[0].dtype
        self._parts = tuple(parts)

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x_MI) for part in self._parts], dim=1)

    def dense_weight(self) -> torch.Tensor:
        return torch.cat([part.dense_weight() for part in self._parts])

    def num_bytes(self) -> int:
        return sum(part.num_bytes() for part in self._parts)


def stored_linear(
    weight: StoredWeight,
    bias_O: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    rounding: InputRounding | None,
) -> Linear:
    """The form for this weight on its device: products of eight bits where there are any."""
    if IntProductLinear.can_hold(weight, rounding):
        return IntProductLinear(weight, bias_O, dtype=dtype, rounding=rounding)
    is_fp8_product = weight.values_OI.is_cuda and dtype is torch.bfloat16
    if is_fp8_product and ScaledMmLinear.can_hold(weight, rounding):
        return ScaledMmLinear(weight, bias_O, dtype=dtype, rounding=rounding)
    return StoredLinear(weight, bias_O, dtype=dtype, rounding=rounding)
