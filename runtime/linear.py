"""Linear layers of the runtime: one interface, and the form that every device has.

Shape legend: M rows, O output features, I input features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F


class Linear(ABC):
    """``x @ W.T + b`` with ``W`` ``[O, I]``. Not trainable, inference only.

    A form that packs makes a copy and does not keep the plain weight.
    """

    is_packed = False

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.dtype = weight_OI.dtype
        self._bias = bias_O

    @abstractmethod
    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        """``[M, I] -> [M, O]``, same dtype and device."""

    @abstractmethod
    def dense_weight(self) -> torch.Tensor:
        """The plain ``[O, I]`` weight, bit for bit; a copy if packed."""

    def num_bytes(self) -> int:
        return self.out_features * self.in_features * self.dtype.itemsize


LinearMaker = Callable[[torch.Tensor, torch.Tensor | None], Linear]
TensorSource = Callable[[str], torch.Tensor]  # hands over one tensor by name, once


class LinearSource(ABC):
    """A :data:`TensorSource` that can hand over whole linears, where they are stored in a form of
    their own.
    """

    @abstractmethod
    def __call__(self, name: str) -> torch.Tensor:
        """One tensor, plain."""

    @abstractmethod
    def below(self, prefix: str) -> LinearSource:
        """The same for names without ``prefix``."""

    @abstractmethod
    def linear(
        self, names: Sequence[str], bias_O: torch.Tensor | None, make_linear: LinearMaker
    ) -> Linear | None:
        """The linear whose outputs are those of ``names`` (without ``.weight``); ``None`` where it
        is to be made of their plain weights.
        """


class PlainLinear(Linear):
    """Any dtype and device."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        super().__init__(weight_OI, bias_O)
        self._weight = weight_OI.contiguous()

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_MI, self._weight, self._bias)

    def dense_weight(self) -> torch.Tensor:
        return self._weight
