"""The MiMo layout: which tensors, under which names and shapes, and which ``config.json``.

vLLM and SGLang both have a head class for it whose arithmetic is that of our MTP head, with four
things fixed by the code of the engines and therefore not in any file: the hidden state comes
*first* in ``input_proj``, the embedding of position 0 is zeroed, the post-norm state is recycled,
and rotary positions have no offset. A head that differs in one of these cannot be carried and is
refused.

Choices that need a reason:

- ``tie_word_embeddings`` is false, also where the target ties: the directory holds both tensors,
  vLLM loads both and then shares the target's, and SGLang leaves ``lm_head`` unloaded when told
  that it is tied.
- query, key and value biases are zeros where the head has none: the block is a Qwen2 block, in
  which they are always parameters, and a parameter that no file fills is uninitialised memory.
  There is no place in it for other biases, nor for norms of query and key heads.
- ``attention_bias`` is true, because the biases are there.

Shape legend: V vocabulary, H width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from mtp_train.export.layouts.base import (
    METHODS_IN_PATHS,
    MTP_CARRIED,
    TARGET_EMBEDDING,
    TARGET_LM_HEAD,
    Layout,
    Matches,
    TargetFacts,
    host_tensors,
    refuse_differing,
    sizes_and_rope,
    swap_halves,
)
from runtime.head_spec import HeadSpec
from runtime.layer_parts import PLAIN_LAYER

PREFIX = "model.mtp_layers.0."
PROJECTION_NAME = PREFIX + "input_proj.weight"

_BLOCK = "layers.0."
_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "norm.weight": "final_layernorm.weight",
    }
)


def layout_name(name: str) -> str:
    """The layout's name of a native tensor."""
    return PREFIX + _RENAMED.get(name, name.removeprefix(_BLOCK))


def bias_shapes(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    """The biases that the layout has and the native head has not; all zero."""
    if spec.layer_parts.qkv_bias:
        return {}
    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = PREFIX + "self_attn."
    return {
        attention + "q_proj.bias": (q_dim,),
        attention + "k_proj.bias": (kv_dim,),
        attention + "v_proj.bias": (kv_dim,),
    }


class MimoLayout(Layout):
    """One directory for vLLM and SGLang."""

    name = "mimo"
    title = "MiMo"
    kind = "mtp"
    holds = (
        "is one decoder layer with five norms, and has no place for residual streams of the "
        "target, for an lm_head of the head's own, nor for residual blocks"
    )
    engines = ("vllm", "sglang")
    sglang_algorithm = "NEXTN"
    carries_draft_vocab = False
    reserved_in_paths = METHODS_IN_PATHS
    copies = MappingProxyType({TARGET_EMBEDDING: TARGET_EMBEDDING, TARGET_LM_HEAD: TARGET_LM_HEAD})

    def served_spec(self, spec: HeadSpec) -> HeadSpec:
        """Hidden first, the whole vocabulary."""
        return replace(spec, concat="hidden_embedding", draft_vocab=None)

    def tensor_shapes(self, spec: HeadSpec) -> dict[str, tuple[int, ...]]:
        vocab = (spec.vocab_size, spec.hidden_size)
        native = self.served_spec(spec).tensor_shapes()
        shapes = {layout_name(name): shape for name, shape in native.items()}
        return shapes | bias_shapes(spec) | dict.fromkeys(self.copies, vocab)

    def to_layout(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        native = host_tensors({n: t for n, t in tensors.items() if n != "draft_vocab_ids"})
        if spec.concat == "embedding_hidden":
            native["eh_proj.weight"] = swap_halves(native["eh_proj.weight"])
        written = {layout_name(name): tensor for name, tensor in native.items()}
        dtype = native["eh_proj.weight"].dtype
        for name, shape in bias_shapes(spec).items():
            written[name] = torch.zeros(shape, dtype=dtype)
        return written

    def from_layout(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {name: written[layout_name(name)] for name in self.served_spec(spec).tensor_shapes()}

    def config(self, spec: HeadSpec, target: TargetFacts) -> dict[str, Any]:
        """Engines file the head under the layer number behind the target's last."""
        return {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_nextn_predict_layers": 1,
            "num_hidden_layers": target.num_layers,
            "attention_bias": True,
            "use_sliding_window": False,
            **sizes_and_rope(spec, dtype=target.dtype),
        }

    def refuse_fields(self, spec: HeadSpec) -> None:
        for name, is_present in vars(spec.norms).items():
            if not is_present:
                raise ValueError(f"head norms.{name}=false: the mimo layout has all five norms")
        refuse_differing(spec, MTP_CARRIED, layout=self.name)
        uncarried = replace(spec.layer_parts, qkv_bias=False)
        if uncarried != PLAIN_LAYER:
            raise ValueError(
                f"head layer_parts: {uncarried}: the block of the mimo layout is Qwen2's, which "
                "has biases of query, key and value and nothing else; head.decoder=llama trains a "
                "head that fits"
            )
        if spec.num_heads * spec.head_dim != spec.hidden_size:
            raise ValueError(
                f"head head_dim={spec.head_dim}: the mimo layout needs hidden_size / num_heads = "
                f"{spec.hidden_size} / {spec.num_heads}"
            )

    def describe(self, spec: HeadSpec) -> str:
        return "Embedding and `lm_head` are copies of the target's; engines use the target's own."

    def check_values(
        self, spec: HeadSpec, written: Mapping[str, torch.Tensor], *, source: str
    ) -> None:
        for name in bias_shapes(spec):
            if bool(written[name].any()):
                raise ValueError(f"{source}: tensor {name} is not zero; the head has no biases")

    def explain_change(self, name: str, tensor: torch.Tensor, matches: Matches) -> str:
        if name == PROJECTION_NAME and matches(swap_halves(tensor)):
            return "has its column halves exchanged: the hidden state comes first in this layout"
        return ""
