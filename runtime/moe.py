"""Mixtures of experts: a router that chooses experts for every row, and the sum of what they make
of it (:mod:`runtime.expert_products`).

Shape legend: N rows, D model width, X experts, E experts chosen per row, Q groups of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from runtime.expert_products import (
    ExpertProducts,
    GroupedExperts,
    LoopedExperts,
    prefers_grouped,
    stack_experts,
)
from runtime.layer_parts import CORRECTION_BIAS, ExpertSpec
from runtime.layers import GatedMlp
from runtime.linear import LinearMaker, LinearSource, TensorSource
from runtime.ops import BlockOps
from runtime.parallel import ProcessGroup

_LEAST_SUM = 1e-20  # added to sums that are divided by, as transformers does


@dataclass(frozen=True)
class Routing:
    """``ids_NE`` int64: the experts of each row, best first; ``weights_NE`` float32: of their
    outputs.
    """

    ids_NE: torch.Tensor
    weights_NE: torch.Tensor


class Router:
    """Scores experts and chooses some, whole on every rank.

    Softmax scores are those of Qwen3-MoE and DeepSeek-V2, with its group-limited choice; sigmoid
    scores with a bias that enters the choice alone are DeepSeek-V3's (arXiv:2412.19437, 2.1.2).
    ``bias_X`` is float32.
    """

    def __init__(
        self, spec: ExpertSpec, weight_XD: torch.Tensor, bias_X: torch.Tensor | None
    ) -> None:
        self.spec = spec
        self._weight = weight_XD.float() if spec.is_float32 else weight_XD
        self._bias = bias_X

    def __call__(self, x_ND: torch.Tensor) -> Routing:
        spec = self.spec
        logits_NX = F.linear(x_ND.to(self._weight.dtype), self._weight).float()
        scores_NX = logits_NX.softmax(-1) if spec.scores == "softmax" else logits_NX.sigmoid()
        ranked_NX = scores_NX if self._bias is None else scores_NX + self._bias
        if spec.num_kept_groups < spec.num_groups:
            ranked_NX = _keep_best_groups(ranked_NX, spec)
        ids_NE = ranked_NX.topk(spec.num_chosen, dim=-1).indices
        weights_NE = scores_NX.gather(1, ids_NE)
        if spec.normalises:
            weights_NE = weights_NE / (weights_NE.sum(-1, keepdim=True) + _LEAST_SUM)
        return Routing(ids_NE, weights_NE * spec.scaling)


class ExpertMlp:
    """Router, experts and shared experts in the place of an MLP.

    ``shapes``, ``take`` and ``group`` as in :func:`runtime.layers.build_block`. ``shapes`` says
    which experts are here: some columns of all of them or, where each expert is on one rank, those
    whole. Either way every rank has all rows, and what the ranks make of them is added up once. The
    bias that ``take`` hands over is float32.
    """

    def __init__(
        self,
        spec: ExpertSpec,
        take: TensorSource,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        ops: BlockOps,
        make_linear: LinearMaker,
        group: ProcessGroup,
    ) -> None:
        def take_mlp(name: str) -> GatedMlp:
            return GatedMlp(
                take, shapes, ops=ops, make_linear=make_linear, group=group, prefix=f"mlp.{name}."
            )

        bias_X = take(CORRECTION_BIAS).float() if spec.has_bias else None
        self.spec = spec
        gate_XD = take("mlp.gate.weight")
        self.router = Router(spec, gate_XD, bias_X)
        own = _experts_in(shapes, spec)
        self.products: ExpertProducts
        if not isinstance(take, LinearSource) and _is_grouped(gate_XD, own, shapes):
            stacked = stack_experts(own, take, shapes)
            self.products = GroupedExperts(own, spec.num_experts, *stacked, ops=ops)
        else:
            mlps = [take_mlp(f"experts.{index}") for index in own]
            self.products = LoopedExperts(own, spec.num_experts, mlps)
        self.shared = take_mlp("shared_experts") if spec.num_shared else None
        self._group = group

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(self.own_part(x_ND))

    def own_part(self, x_ND: torch.Tensor) -> torch.Tensor:
        """What this rank's experts, or columns of experts, add to the result."""
        routing = self.router(x_ND)
        outputs_NED = self.products(x_ND, routing.ids_NE)
        weighted_NED = outputs_NED.float() * routing.weights_NE[..., None]
        sum_ND = weighted_NED.sum(1).to(x_ND.dtype)
        if self.shared is not None:
            sum_ND += self.shared.own_part(x_ND)
        return sum_ND


def _experts_in(shapes: Mapping[str, tuple[int, ...]], spec: ExpertSpec) -> range:
    """The experts whose tensors are listed; they are neighbours."""
    own = [i for i in range(spec.num_experts) if f"mlp.experts.{i}.up_proj.weight" in shapes]
    if not own:
        return range(0)
    assert own[-1] - own[0] == len(own) - 1, f"experts {own} are no neighbours"
    return range(own[0], own[-1] + 1)


def _is_grouped(gate_XD: torch.Tensor, own: range, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    if not own:
        return False
    width, inner = shapes[f"mlp.experts.{own.start}.down_proj.weight"]
    return prefers_grouped(gate_XD.device, gate_XD.dtype, width=width, inner=inner)


def _keep_best_groups(ranked_NX: torch.Tensor, spec: ExpertSpec) -> torch.Tensor:
    """-inf for experts of all but the best groups. A group's score is that of its best expert, or
    the sum of its two best.
    """
    ranked_NQX = ranked_NX.unflatten(1, (spec.num_groups, -1))
    best = ranked_NQX.topk(1 if spec.group_score == "best" else 2, dim=-1).values.sum(-1)
    kept_NK = best.topk(spec.num_kept_groups, dim=-1).indices
    is_left_out_NQ = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept_NK, value=False)
    return ranked_NQX.masked_fill(is_left_out_NQ[..., None], float("-inf")).flatten(1)
