"""What every differentiable head has: a spec, a forward over a packed batch, strict tensors.

Shape legend: N query rows of one step, D model width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from mtp_train.packing import HeadBatch
from runtime.head_spec import HeadSpec, check_head_tensors


class TrainingHead(nn.Module, ABC):
    """Call it with a packed batch and the target's embedding; it returns one state per unroll step.

    The states are those that ``lm_head`` reads (``spec.logits_from``), ``[N_k, D]`` in the
    parameters' dtype. Parameter names are the spec's tensor names.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec

    @abstractmethod
    def forward(
        self,
        batch: HeadBatch,
        embedding_VD: torch.Tensor,
        draft_lm_head_VD: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Unroll ``len(batch.steps)`` steps; gradients flow through all of them.

        With ``draft_lm_head_VD`` step ``k >= 1`` embeds the token that step ``k - 1`` would draft,
        as serving does, in place of the text's. Nothing else changes.
        """

    def export_tensors(self) -> dict[str, torch.Tensor]:
        """Detached tensors under the names and shapes of ``spec.tensor_shapes()``."""
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        check_head_tensors(self.spec, tensors, source="training head")
        return tensors

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Strict inverse of :meth:`export_tensors`; casts to the parameters' dtype."""
        check_head_tensors(self.spec, tensors, source="head tensors")
        with torch.no_grad():
            for name, own in self.state_dict().items():
                own.copy_(tensors[name])
