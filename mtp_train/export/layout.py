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
- RoPE is written in both notations, so that old and new readers find the same base and scaling.
- ``attention_bias`` is true, because the biases are there.

Shape legend: V vocabulary, H width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from runtime.head_spec import HeadSpec, RopeSpec
from runtime.layer_parts import PLAIN_LAYER

PREFIX = "model.mtp_layers.0."
EMBEDDING_NAME = "model.embed_tokens.weight"
LM_HEAD_NAME = "lm_head.weight"
PROJECTION_NAME = PREFIX + "input_proj.weight"
# vLLM takes the drafting method from these wherever they stand in the path.
RESERVED_IN_PATHS = ("eagle-", "eagle3", "dflash", "dspark")

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


def served_spec(spec: HeadSpec) -> HeadSpec:
    """The head as an engine computes it from this layout: hidden first, the whole vocabulary."""
    return replace(spec, concat="hidden_embedding", draft_vocab=None)


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


def tensor_shapes(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    """The strict tensor list of the directory: name -> shape."""
    vocab = (spec.vocab_size, spec.hidden_size)
    shapes = {layout_name(name): shape for name, shape in served_spec(spec).tensor_shapes().items()}
    return shapes | bias_shapes(spec) | {EMBEDDING_NAME: vocab, LM_HEAD_NAME: vocab}


def to_layout(
    spec: HeadSpec,
    tensors: Mapping[str, torch.Tensor],
    *,
    embedding_VH: torch.Tensor,
    lm_head_VH: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Tensors of the directory from native ones, in their own dtypes, contiguous, on the host.

    A draft vocabulary is left out. Call :func:`refuse_uncarried` first.
    """
    native = {name: t.detach().cpu() for name, t in tensors.items() if name != "draft_vocab_ids"}
    if spec.concat == "embedding_hidden":
        native["eh_proj.weight"] = swap_halves(native["eh_proj.weight"])
    written = {layout_name(name): tensor.contiguous() for name, tensor in native.items()}
    dtype = native["eh_proj.weight"].dtype
    for name, shape in bias_shapes(spec).items():
        written[name] = torch.zeros(shape, dtype=dtype)
    written[EMBEDDING_NAME] = embedding_VH.detach().cpu().contiguous()
    # safetensors refuses two names for one storage.
    written[LM_HEAD_NAME] = lm_head_VH.detach().cpu().contiguous().clone()
    return written


def from_layout(spec: HeadSpec, written: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Native tensors of :func:`served_spec`; nothing is permuted, only renamed."""
    return {name: written[layout_name(name)] for name in served_spec(spec).tensor_shapes()}


def swap_halves(weight: torch.Tensor) -> torch.Tensor:
    """``[H, 2H]`` with its column halves exchanged."""
    left, right = weight.chunk(2, dim=1)
    return torch.cat((right, left), dim=1)


def layout_config(spec: HeadSpec, *, num_target_layers: int, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``: these keys, these values and no others.

    ``dtype`` is the target's, ``num_target_layers`` decides under which layer number the engines
    file the head.
    """
    config: dict[str, Any] = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "num_hidden_layers": num_target_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        "rope_theta": spec.rope.theta,
        "rope_parameters": {"rope_theta": spec.rope.theta, "rope_type": spec.rope.kind},
    }
    scaling = _rope_scaling(spec.rope)
    if scaling:
        config["rope_scaling"] = scaling
        config["rope_parameters"] = {"rope_theta": spec.rope.theta, **scaling}
    return config


def _rope_scaling(rope: RopeSpec) -> dict[str, Any]:
    """The scaling in Hugging Face's names, nothing left to an engine's defaults; {} without one."""
    if rope.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    if rope.yarn is not None:
        return {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
            "attention_factor": rope.yarn.attention_factor,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
            "truncate": rope.yarn.truncate,
        }
    return {}


def check_config(found: Mapping[str, Any], expected: Mapping[str, Any], *, source: str) -> None:
    """Raise ``ValueError`` naming the first key that is missing, wrong or unknown."""
    for key, value in expected.items():
        if key not in found:
            raise ValueError(f"{source}: {key} is missing; expected {json.dumps(value)}")
        if json.dumps(found[key], sort_keys=True) != json.dumps(value, sort_keys=True):
            raise ValueError(
                f"{source}: {key}={json.dumps(found[key])}, expected {json.dumps(value)}"
            )
    for key in found:
        if key not in expected:
            raise ValueError(f"{source}: {key}={json.dumps(found[key])} does not belong here")


def refuse_uncarried(spec: HeadSpec, *, drop_draft_vocab: bool) -> None:
    """Raise ``ValueError`` naming the field of the head that this layout cannot carry."""
    if spec.kind == "eagle3":
        raise ValueError(
            "head kind=eagle3: the mimo layout has no place for residual streams of the target, "
            "nor for an lm_head of the head's own"
        )
    if spec.kind == "medusa":
        raise ValueError(
            "head kind=medusa: the mimo layout is one decoder layer, and a Medusa head is residual "
            "blocks; a layout of vLLM's medusa model is not written. Nearest: train head=mtp over "
            "the same features, or serve this head with mtp generate"
        )
    for name, is_present in vars(spec.norms).items():
        if not is_present:
            raise ValueError(f"head norms.{name}=false: the mimo layout has all five norms")
    fixed: tuple[tuple[str, Any, Any], ...] = (
        ("num_layers", spec.num_layers, 1),
        ("block", spec.block, "llama"),
        ("hidden_source", spec.hidden_source, "g"),
        ("norm_form", spec.norm_form, "w"),
        ("logits_from", spec.logits_from, "post_norm"),
        ("recycle", spec.recycle, "post_norm"),
        ("residual", spec.residual, "standard"),
        ("first_embedding_mask", spec.first_embedding_mask, True),
        ("projection_bias", spec.projection_bias, False),
        ("position_offset", spec.position_offset, 0),
        ("embedding", spec.embedding, "target"),
        ("lm_head", spec.lm_head, "target"),
    )
    for field, value, carried in fixed:
        if value != carried:
            raise ValueError(
                f"head {field}={json.dumps(value)}: engines that read the mimo layout compute "
                f"{field}={json.dumps(carried)}, whatever the files say"
            )
    uncarried = replace(spec.layer_parts, qkv_bias=False)
    if uncarried != PLAIN_LAYER:
        raise ValueError(
            f"head layer_parts: {uncarried}: the block of the mimo layout is Qwen2's, which has "
            "biases of query, key and value and nothing else; head.decoder=llama trains a head "
            "that fits"
        )
    if spec.num_heads * spec.head_dim != spec.hidden_size:
        raise ValueError(
            f"head head_dim={spec.head_dim}: the mimo layout needs hidden_size / num_heads = "
            f"{spec.hidden_size} / {spec.num_heads}"
        )
    if spec.draft_vocab is not None and not drop_draft_vocab:
        raise ValueError(
            f"head draft_vocab.size={spec.draft_vocab.size}: engines that read the mimo layout use "
            "the target's whole lm_head; export.draft_vocab=drop leaves the list out, and then "
            "acceptance has to be measured again"
        )


def refuse_path(directory: Path) -> None:
    """Raise ``ValueError`` for a path in which vLLM would read another drafting method."""
    path = str(directory.absolute()).lower()
    for part in RESERVED_IN_PATHS:
        if part in path:
            raise ValueError(
                f"export directory {directory.absolute()}: vLLM takes a path with {part!r} in it "
                "for a head of another kind; choose another run.name or run.root"
            )
