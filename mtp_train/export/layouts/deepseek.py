"""The DeepSeek layout: an MTP module as DeepSeek-V3 publishes its own, in a directory beside the
target.

The module is decoder layer N behind the target's N layers, for targets with latent attention and
experts. vLLM and SGLang compute it as our MTP head, with the same things fixed by their code: the
embedding comes first in ``eh_proj`` and the post-norm state is recycled. vLLM zeroes the embedding
of position 0 and SGLang does not, which concerns the first row of a sequence alone.

Choices that need a reason:

- ``num_hidden_layers`` is the target's: engines find the module's tensors by it.
- ``architectures`` and ``model_type`` are DeepSeek-V3's for a DeepSeek-V2 target too: vLLM makes an
  MTP head of no other. The router is what its keys say (``scoring_func``, ``topk_method``).
- embedding and ``lm_head`` are written as DeepSeek does, as copies of the target's; engines use the
  target's own.
- ``head_dim`` is left out: configurations of this kind derive it from the parts of a head.

Shape legend: V vocabulary, H width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mtp_train.export.layouts.base import (
    METHODS_IN_PATHS,
    MTP_CARRIED,
    Layout,
    Matches,
    TargetFacts,
    host_tensors,
    refuse_differing,
    sizes_and_rope,
    swap_halves,
)
from mtp_train.native.names import SHARED_COPIES, deepseek_prefix, stored_name
from runtime.head_spec import HeadSpec, RopeSpec
from runtime.layer_parts import PLAIN_LAYER, ExpertSpec, LatentSpec
from runtime.rope import yarn_attention_factor, yarn_mscale

_DIGITS = 6  # of mscale, which configurations state with three or four
_ROUNDING = 1e-6


class DeepseekLayout(Layout):
    """One directory for vLLM and SGLang; ``num_target_layers`` names its tensors."""

    name = "deepseek"
    title = "DeepSeek MTP"
    kind = "mtp"
    holds = (
        "is one decoder layer with latent attention, experts and five norms, and has no place for "
        "residual streams of the target, for an lm_head of the head's own, nor for residual blocks"
    )
    engines = ("vllm", "sglang")
    sglang_algorithm = "NEXTN"
    carries_draft_vocab = False
    reserved_in_paths = METHODS_IN_PATHS

    def __init__(self, num_target_layers: int = 0) -> None:
        self.prefix = deepseek_prefix(num_target_layers)
        self.copies = {self.prefix + name: source for name, source in SHARED_COPIES.items()}

    def at(self, num_target_layers: int) -> DeepseekLayout:
        return DeepseekLayout(num_target_layers)

    def served_spec(self, spec: HeadSpec) -> HeadSpec:
        """Embedding first, the whole vocabulary."""
        return replace(spec, concat="embedding_hidden", draft_vocab=None)

    def tensor_shapes(self, spec: HeadSpec) -> dict[str, tuple[int, ...]]:
        vocab = (spec.vocab_size, spec.hidden_size)
        native = self.served_spec(spec).tensor_shapes()
        shapes = {self._name(name): shape for name, shape in native.items()}
        return shapes | dict.fromkeys(self.copies, vocab)

    def to_layout(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        native = host_tensors({n: t for n, t in tensors.items() if n != "draft_vocab_ids"})
        if spec.concat == "hidden_embedding":
            native["eh_proj.weight"] = swap_halves(native["eh_proj.weight"])
        return {self._name(name): tensor for name, tensor in native.items()}

    def from_layout(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {name: written[self._name(name)] for name in self.served_spec(spec).tensor_shapes()}

    def config(self, spec: HeadSpec, target: TargetFacts) -> dict[str, Any]:
        latent, experts = spec.latent, spec.experts
        assert latent is not None, "refuse_fields comes first"
        assert experts is not None, "refuse_fields comes first"
        config = sizes_and_rope(spec, dtype=target.dtype)
        del config["head_dim"]
        scaling = _yarn(spec.rope, latent)
        if scaling:
            config["rope_scaling"] = scaling
            config["rope_parameters"] = {"rope_theta": spec.rope.theta, **scaling}
        return {
            **config,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_hidden_layers": target.num_layers,
            "num_nextn_predict_layers": 1,
            "attention_bias": False,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
            "n_routed_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_chosen,
            "moe_intermediate_size": experts.inner,
            "n_shared_experts": experts.num_shared or None,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "scoring_func": experts.scores,
            "topk_method": _choice(experts),
            "n_group": experts.num_groups,
            "topk_group": experts.num_kept_groups,
            "norm_topk_prob": experts.normalises,
            "routed_scaling_factor": experts.scaling,
        }

    def refuse_fields(self, spec: HeadSpec) -> None:
        latent, experts = spec.latent, spec.experts
        if latent is None:
            raise ValueError(
                "head latent=null: the layer of the deepseek layout has latent attention. Nearest: "
                "export.format=mimo, or train with head.decoder=target for a DeepSeek target"
            )
        if experts is None:
            raise ValueError(
                "head experts=null: SGLang's module of the deepseek layout has experts, not a "
                "dense MLP. Nearest: head=eagle3, loss=eagle3, export.format=eagle3"
            )
        for name, is_present in vars(spec.norms).items():
            if not is_present:
                raise ValueError(f"head norms.{name}=false: the deepseek layout has all five norms")
        refuse_differing(spec, MTP_CARRIED, layout=self.name)
        if spec.layer_parts != PLAIN_LAYER:
            raise ValueError(
                f"head layer_parts: {spec.layer_parts}: the deepseek layout has no biases and no "
                "norms of query and key heads"
            )
        if not latent.is_interleaved:
            raise ValueError(
                "head latent.is_interleaved=false: engines rotate neighbouring elements of this "
                "layout (rope_interleave)"
            )
        if latent.norm_eps != spec.norm_eps:
            raise ValueError(
                f"head latent.norm_eps={latent.norm_eps}: engines norm latents of the deepseek "
                f"layout with rms_norm_eps, which is {spec.norm_eps}"
            )
        if _choice(experts) is None:
            raise ValueError(
                "head experts: no topk_method of the deepseek layout routes like this (noaux_tc: "
                "sigmoid scores, bias, groups by their two best; group_limited_greedy and greedy: "
                "softmax scores without a bias)"
            )
        _yarn(spec.rope, latent)

    def describe(self, spec: HeadSpec) -> str:
        return (
            f"It is decoder layer {self.prefix.split('.')[2]}, behind the target's last, with "
            "copies of the target's embedding and `lm_head`; engines use the target's own."
        )

    def explain_change(self, name: str, tensor: torch.Tensor, matches: Matches) -> str:
        if name == self._name("eh_proj.weight") and matches(swap_halves(tensor)):
            return "has its column halves exchanged: the embedding comes first in this layout"
        return ""

    def _name(self, name: str) -> str:
        return stored_name(name, layout="deepseek", prefix=self.prefix)


def _choice(experts: ExpertSpec) -> str | None:
    """``topk_method``; ``None`` for a router that has none."""
    is_limited = experts.num_groups > 1
    if experts.scores == "sigmoid":
        fits = experts.has_bias and (experts.group_score == "best_two" or not is_limited)
        return "noaux_tc" if fits else None
    if experts.has_bias or (is_limited and experts.group_score != "best"):
        return None
    return "group_limited_greedy" if is_limited else "greedy"


def _yarn(rope: RopeSpec, latent: LatentSpec) -> dict[str, Any]:
    """``rope_scaling`` in DeepSeek's names, empty without one. Raises ``ValueError`` for a scaling
    that they do not say.

    The contract holds what follows from ``mscale`` and ``mscale_all_dim``: the factor of rotated
    elements and that of scores.
    """
    plain = latent.query_dim**-0.5
    if rope.kind == "default" and math.isclose(latent.scale, plain, rel_tol=_ROUNDING):
        return {}
    if rope.yarn is None or not rope.yarn.truncate or rope.factor <= 1:
        raise ValueError(
            f"head rope.kind={rope.kind!r}: engines scale rotation in the deepseek layout by yarn "
            "(truncated, with a factor above 1) or not at all"
        )
    unit = 0.1 * math.log(rope.factor)
    of_scores = (latent.scale / plain) ** 0.5
    all_dim = round((of_scores - 1) / unit, _DIGITS)
    mscale = round((rope.yarn.attention_factor * of_scores - 1) / unit, _DIGITS)
    said = yarn_attention_factor(rope.factor, mscale=mscale, mscale_all_dim=all_dim)
    if not (
        math.isclose(said, rope.yarn.attention_factor, rel_tol=_ROUNDING)
        and math.isclose(yarn_mscale(rope.factor, all_dim), of_scores, rel_tol=_ROUNDING)
    ):
        raise ValueError(
            f"head rope.yarn.attention_factor={rope.yarn.attention_factor} with latent.scale="
            f"{latent.scale}: no mscale and mscale_all_dim of the deepseek layout say that"
        )
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position,
        "beta_fast": rope.yarn.beta_fast,
        "beta_slow": rope.yarn.beta_slow,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
