"""A quantised checkpoint as a source of linears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch

from runtime.config import Int8Grid
from runtime.linear import Linear, LinearMaker, LinearSource, TensorSource
from runtime.models.config import ModelConfig
from runtime.models.quantisation import InputScheme, LinearScheme
from runtime.quantised_linear import (
    InputRounding,
    IntProductLinear,
    RoundedInputLinear,
    SideBySideLinear,
    StaticRange,
    stored_linear,
)
from runtime.stored_weight import StoredWeight, stack_weights

# Which quantised weights stay as they are stored: those whose products are of eight bits here, or
# every one, or none.
KeptWidth = Literal["products", "all", "none"]


class StoredWeights(Protocol):
    """What is needed of a checkpoint."""

    def scheme_of(self, name: str) -> LinearScheme | None:
        """How a weight is quantised."""

    def read_weight(self, name: str) -> StoredWeight:
        """A quantised weight, on the host."""

    def read_input_range(self, name: str, scheme: InputScheme) -> StaticRange | None:
        """The stored range of a linear's inputs."""


class QuantisedSource(LinearSource):
    """``take`` hands over plain tensors. Without ``rounds_inputs`` linears read what they are
    given, as if the checkpoint quantised weights alone.
    """

    def __init__(
        self,
        weights: StoredWeights,
        take: TensorSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kept: KeptWidth,
        grid: Int8Grid,
        rounds_inputs: bool = True,
        prefix: str = "",
    ) -> None:
        self._weights, self._take = weights, take
        self._dtype, self._device = dtype, device
        self._kept, self._grid, self._rounds_inputs = kept, grid, rounds_inputs
        self._prefix = prefix

    def __call__(self, name: str) -> torch.Tensor:
        return self._take(self._prefix + name)

    def below(self, prefix: str) -> QuantisedSource:
        return QuantisedSource(
            self._weights,
            self._take,
            dtype=self._dtype,
            device=self._device,
            kept=self._kept,
            grid=self._grid,
            rounds_inputs=self._rounds_inputs,
            prefix=self._prefix + prefix,
        )

    def linear(
        self, names: Sequence[str], bias_O: torch.Tensor | None, make_linear: LinearMaker
    ) -> Linear | None:
        weights = [f"{self._prefix}{name}.weight" for name in names]
        schemes = [self._scheme_of(weight) for weight in weights]
        inputs = [None if scheme is None else scheme.inputs for scheme in schemes]
        ranges = [
            None if scheme is None else self._weights.read_input_range(weight, scheme)
            for weight, scheme in zip(weights, inputs, strict=True)
        ]
        if not any(inputs) and not (self._kept == "all" and any(schemes)):
            return None
        if len({*zip(schemes, ranges, strict=True)}) == 1:
            return self._merged(weights, schemes[0], ranges[0], bias_O, make_linear)
        whole = SideBySideLinear(
            [
                self._merged([weight], scheme, static, None, make_linear)
                for weight, scheme, static in zip(weights, schemes, ranges, strict=True)
            ]
        )
        return whole if bias_O is None else _BiasedLinear(whole, bias_O)

    def _scheme_of(self, weight: str) -> LinearScheme | None:
        scheme = self._weights.scheme_of(weight)
        if scheme is None or self._rounds_inputs:
            return scheme
        return replace(scheme, inputs=None)

    def _merged(
        self,
        weights: list[str],
        scheme: LinearScheme | None,
        static: StaticRange | None,
        bias_O: torch.Tensor | None,
        make_linear: LinearMaker,
    ) -> Linear:
        rounding = None
        if scheme is not None and scheme.inputs is not None:
            rounding = InputRounding(scheme.inputs, static, grid=self._grid)
        if scheme is not None and self._kept != "none":
            stored = stack_weights([self._weights.read_weight(name) for name in weights])
            if stored is not None:
                stored = stored.to(self._device)
                if self._kept == "all" or IntProductLinear.can_hold(stored, rounding):
                    return stored_linear(stored, bias_O, dtype=self._dtype, rounding=rounding)
        dense = [self._take(name) for name in weights]
        linear = make_linear(torch.cat(dense) if len(dense) > 1 else dense[0], bias_O)
        return linear if rounding is None else RoundedInputLinear(linear, rounding)


class _BiasedLinear(Linear):
    """A bias behind a linear that has none."""

    def __init__(self, linear: Linear, bias_O: torch.Tensor) -> None:
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.dtype = linear.dtype
        self._linear, self._bias = linear, bias_O

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        assert self._bias is not None
        return self._linear(x_MI).add_(self._bias)

    def dense_weight(self) -> torch.Tensor:
        return self._linear.dense_weight()

    def num_bytes(self) -> int:
        return self._linear.num_bytes()


def refuse_rounding(config: ModelConfig, weights: StoredWeights, *, world_size: int) -> None:
    """Raise ``ValueError`` for rounded inputs that would not be computed: in latent attention, of
    routers and ``lm_head``, over ranks.
    """
    quantisation = config.quantisation
    if quantisation is None or not quantisation.rounds_inputs:
        return
    remedy = "take a checkpoint that quantises weights alone (input_activations: null)"
    if config.latent is not None:
        raise ValueError(
            f"quantization_config rounds inputs ({quantisation.label}) with latent attention "
            f"({config.architecture}), whose projections are absorbed: {remedy}"
        )
    if world_size > 1:
        raise ValueError(
            f"quantization_config rounds inputs ({quantisation.label}) over {world_size} ranks: "
            f"rows that are cut over ranks have no common range; use one rank, or {remedy}"
        )
    for name in config.tensor_shapes():
        scheme = weights.scheme_of(name)
        is_elsewhere = name == "lm_head.weight" or name.endswith("mlp.gate.weight")
        if is_elsewhere and scheme is not None and scheme.inputs is not None:
            raise ValueError(
                f"quantization_config rounds the inputs of {name.removesuffix('.weight')}: it is "
                f"computed in the model's dtype; name it in ignore, or {remedy}"
            )
