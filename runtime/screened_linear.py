"""The best outputs of a packed linear without computing all of them.

A draft that proposes its best tokens asks for nothing else of ``lm_head``, which is most of what it
reads. An int8 copy of the weights (half of bfloat16) bounds every output from both sides; the few
that can be among the best are then computed as always, so the result is that of choosing among all
outputs, bit for bit.

Shape legend: M rows, O outputs (padded to whole panels), I inputs, P panels, W words per row.
"""

from __future__ import annotations

import torch

from runtime.cpu_kernels import MOST_BEST, MOST_ROWS, Screen
from runtime.linear import Linear
from runtime.panel_linear import PANEL, PanelLinear

_MIN_OUTPUTS = 8192  # below, one pass over the weights costs less than the bookkeeping
_CHUNK = 4096  # outputs that are quantised at once


class ScreenedLinear:
    """Beside ``linear``, whose weights it does not copy; takes one byte per weight of its own."""

    def __init__(self, linear: PanelLinear) -> None:
        self._linear = linear
        self._screen = _quantise(linear.dense_weight())

    @classmethod
    def of(cls, linear: Linear) -> ScreenedLinear | None:
        """``None`` where it does not pay, or there are no kernels for it."""
        if (
            isinstance(linear, PanelLinear)
            and linear.kernels.has_screen(linear.dtype)
            and linear.bias_O is None
            and linear.in_features % 4 == 0
            and linear.out_features >= _MIN_OUTPUTS
        ):
            return cls(linear)
        return None

    @staticmethod
    def pays(num_rows: int, count: int) -> bool:
        """Whether :meth:`best` takes so many; with more rows the product is no longer bound by
        memory.
        """
        return num_rows <= MOST_ROWS and count <= MOST_BEST

    def best(self, x_MI: torch.Tensor, count: int) -> torch.Tensor:
        """int64 ``[M, count]``: best first, the lowest output on a tie."""
        linear = self._linear
        return linear.kernels.best_outputs(
            x_MI.contiguous(), linear.panels, self._screen, count=count
        )


def _quantise(weight_OI: torch.Tensor) -> Screen:
    outputs, inputs = weight_OI.shape
    padded = outputs + -outputs % PANEL
    panels = torch.zeros(padded // PANEL, inputs // 4, PANEL, 4, dtype=torch.int8)
    scale, sums = torch.zeros(padded), torch.zeros(padded)
    slack = torch.full((padded,), float("inf"))
    for start in range(0, padded, _CHUNK):
        part = weight_OI[start : start + _CHUNK].float()
        stop = start + len(part)
        step = part.abs().amax(1) / 127
        int8 = (part / step.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_()
        scale[start:stop], sums[start:stop] = step, int8.sum(1)
        slack[start:stop] = _slack(part, int8 * step[:, None], inputs)
        whole = torch.zeros(-(-len(part) // PANEL) * PANEL, inputs, dtype=torch.int8)
        whole[: len(part)] = int8
        first, last = start // PANEL, (start + len(whole)) // PANEL
        panels[first:last] = whole.view(-1, PANEL, inputs // 4, 4).transpose(1, 2)
    words = panels.view(torch.int32)[..., 0].contiguous()
    return Screen(words, scale, sums, slack, outputs)


def _slack(weight_OI: torch.Tensor, about_OI: torch.Tensor, inputs: int) -> torch.Tensor:
    """By how much ``about`` and a row in sixteen bits can be wrong, per length of the row.

    Cauchy-Schwarz for the weights' rounding; a row's is half a step of ``|row| / 32767`` per input;
    and both sides round their float32 sums.
    """
    length, rounding = weight_OI.norm(dim=1), (weight_OI - about_OI).norm(dim=1)
    return 1.001 * (rounding + length * (inputs**0.5 / 65534 + inputs * 2.0**-22))
