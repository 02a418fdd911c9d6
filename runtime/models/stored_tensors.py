"""How a quantised linear lies in a checkpoint: which tensors, of which shapes, and what they give.

A weight ``x.weight`` of ``[O, I]`` becomes its values, scales and, where they are not zero, zero
points; a linear with static input rounding has its inputs' scale too.

Shape legend: O output features, I input features, P and Q blocks of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from runtime.models.quantisation import LinearScheme, Quantisation
from runtime.stored_weight import StoredWeight, scale_shape, unpack_int8

Shapes = tuple[tuple[int, ...], ...]  # one of which a tensor has
ReadTensor = Callable[[str], torch.Tensor]

_SCALAR: Shapes = ((1,), (), (1, 1))
_DTYPES = {"int8": ("I8",), "fp8": ("F8_E4M3",)}


def stored_shapes(
    name: str, shape: tuple[int, ...], scheme: LinearScheme, quantisation: Quantisation
) -> dict[str, Shapes]:
    """What lies in the checkpoint for the weight ``name`` of ``shape``: name -> shapes that it may
    have.
    """
    weights = scheme.weights
    scales = scale_shape(shape, weights.block_of(shape))
    scale_shapes: Shapes = (scales,)
    if weights.strategy == "tensor":
        scale_shapes = _SCALAR
    elif weights.strategy == "channel":
        scale_shapes = (scales, scales[:1])
    found: dict[str, Shapes] = {name + quantisation.scale_suffix: scale_shapes}
    if weights.is_packed:
        found[name + "_packed"] = ((shape[0], -(-shape[1] // 4)),)
        found[name + "_shape"] = ((2,),)
    else:
        found[name] = (shape,)
    if not weights.is_symmetric:
        packed = (-(-scales[0] // 4), scales[1])
        found[name + "_zero_point"] = (packed,) if weights.is_packed else scale_shapes
    if scheme.inputs is not None and not scheme.inputs.is_dynamic:
        module = name.removesuffix("weight")
        found[module + "input_scale"] = _SCALAR
        if not scheme.inputs.is_symmetric:
            found[module + "input_zero_point"] = _SCALAR
    return found


def check_dtype(name: str, dtype: str, scheme: LinearScheme, *, source: str) -> None:
    """``dtype`` as safetensors names it. Raises ``ValueError`` where it is not the scheme's."""
    allowed = ("I32",) if scheme.weights.is_packed else _DTYPES[scheme.weights.kind]
    if dtype not in allowed:
        raise ValueError(
            f"{source}: tensor {name} is stored as {dtype}, config.json says "
            f"{scheme.label} (quantization_config), which is {allowed[0]}"
        )


def read_weight(
    name: str,
    shape: tuple[int, ...],
    scheme: LinearScheme,
    quantisation: Quantisation,
    read: ReadTensor,
) -> StoredWeight:
    """The weight as it is stored, on the host. ``read`` hands over a tensor as it is stored.

    Raises ``ValueError`` for a packed weight whose own shape is another.
    """
    weights = scheme.weights
    block = weights.block_of(shape)
    scales = scale_shape(shape, block)
    if weights.is_packed:
        own = read(name + "_shape").tolist()
        if own != list(shape):
            raise ValueError(f"tensor {name}_shape is {own}, expected {list(shape)}")
        values_OI = unpack_int8(read(name + "_packed"), shape)
    else:
        values_OI = read(name)
    zero_point_PQ = None
    if not weights.is_symmetric:
        stored = read(name + "_zero_point")
        if weights.is_packed:  # along the outputs
            stored = unpack_int8(stored.t(), (scales[1], scales[0])).t()
        zero_point_PQ = stored.reshape(scales).contiguous()
    scale_PQ = read(name + quantisation.scale_suffix).float().reshape(scales)
    return StoredWeight(values_OI, scale_PQ, block, zero_point_PQ)


def kv_scale_names(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Of the K/V scales that a checkpoint with fp8 K/V has, by layer."""
    suffix = "self_attn.k_proj.weight"
    layers = [name.removesuffix("k_proj.weight") for name in shapes if name.endswith(suffix)]
    return [layer + kind for layer in layers for kind in ("k_scale", "v_scale")]
