"""MTP heads whose layers are not ours: DeepSeek's own layer, and Qwen3-Next's and 3.5's ``mtp.*``.

They are looked at by name and shape; what they compute is not computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mtp_train.foreign.contract import Contract, Shape
from mtp_train.foreign.files import HeadFiles
from mtp_train.foreign.formats import FORMATS
from mtp_train.foreign.reading import FormatReader, Given, Reading, common_facts, layer_block
from mtp_train.foreign.recognise import in_target
from mtp_train.foreign.sizes import Sizes, read_sizes
from runtime.models.config import parse_config

_QWEN = "mtp."


def is_sparse(names: Iterable[str]) -> str:
    """What a module has that heads here have not, in words; empty for a plain dense layer."""
    there = list(names)
    latent = any(".kv_a_proj_with_mqa." in name for name in there)
    experts = any(".mlp.experts." in name or name.endswith(".mlp.gate.weight") for name in there)
    kinds = ("latent attention" if latent else "", "experts" if experts else "")
    return " and ".join(kind for kind in kinds if kind)


def deepseek_block(config: Mapping[str, Any], number: int) -> dict[str, Shape] | None:
    """The layer's tensors as ``config.json`` says; ``None`` where it is none that is known."""
    try:
        model = parse_config(config, generation={}, source="config.json")
    except ValueError:
        return None
    return model.block_shapes(number)


class QwenMtpReader(FormatReader):
    """``mtp.*``: norms are ``1+w``, attention has output gates, an MLP or experts behind it."""

    def read(self, files: HeadFiles, given: Given) -> Reading:
        block, source = layer_block(files.config)
        sizes, findings = read_sizes(block, source=source)
        why_not = FORMATS["qwen_mtp"].not_read
        if sizes is None:
            return Reading(findings=tuple(findings), why_not=why_not)
        own = [name for name in files.headers if name.startswith(_QWEN)]
        count = len({n.split(".")[2] for n in own if n.startswith(_QWEN + "layers.")}) or 1
        ignored = frozenset(name for name in files.headers if name not in own)
        alone = "" if in_target(files) else "alone, without the target's layers"
        return Reading(
            contract=Contract(_qwen_shapes(files, block, sizes, count), {}, ignored),
            why_not=why_not,
            facts=(
                ("reads", "g of the target, behind its final norm, and the next token's embedding"),
                ("projection", "embedding first, then hidden; norms are 1+w"),
                ("layer", is_sparse(own) or "dense MLP"),
                ("modules", str(count)),
                *common_facts(files, sizes),
                ("lies", alone or "in the target's checkpoint"),
            ),
            findings=tuple(findings),
            reads_width=sizes.hidden_size,
            sizes=sizes,
        )


def _qwen_shapes(
    files: HeadFiles, block: Mapping[str, Any], sizes: Sizes, count: int
) -> dict[str, Shape]:
    width, inner = sizes.hidden_size, sizes.intermediate_size
    q_dim, kv_dim = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    shapes: dict[str, Shape] = {
        "mtp.fc.weight": (width, 2 * width),
        "mtp.pre_fc_norm_embedding.weight": (width,),
        "mtp.pre_fc_norm_hidden.weight": (width,),
        "mtp.norm.weight": (width,),
    }
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (2 * q_dim, width),
        "self_attn.k_proj.weight": (kv_dim, width),
        "self_attn.v_proj.weight": (kv_dim, width),
        "self_attn.o_proj.weight": (width, q_dim),
        "self_attn.q_norm.weight": (sizes.head_dim,),
        "self_attn.k_norm.weight": (sizes.head_dim,),
    }
    experts = block.get("num_experts")
    if type(experts) is int and experts > 0:
        layer |= _qwen_experts(files, block, width, experts)
    else:
        layer |= _mlp("mlp.", width, inner)
    return shapes | {
        f"mtp.layers.{index}.{name}": shape
        for index in range(count)
        for name, shape in layer.items()
    }


def _qwen_experts(
    files: HeadFiles, block: Mapping[str, Any], width: int, experts: int
) -> dict[str, Shape]:
    """Experts are stored one by one, or all in one tensor."""
    inner = int(block.get("moe_intermediate_size") or 0)
    shared = int(block.get("shared_expert_intermediate_size") or 0)
    shapes: dict[str, Shape] = {"mlp.gate.weight": (experts, width)}
    if any(name.endswith(".mlp.experts.gate_up_proj") for name in files.headers):
        shapes["mlp.experts.gate_up_proj"] = (experts, 2 * inner, width)
        shapes["mlp.experts.down_proj"] = (experts, width, inner)
    else:
        for index in range(experts):
            shapes |= _mlp(f"mlp.experts.{index}.", width, inner)
    if shared:
        shapes |= _mlp("mlp.shared_expert.", width, shared)
        shapes["mlp.shared_expert_gate.weight"] = (1, width)
    return shapes


def _mlp(prefix: str, width: int, inner: int) -> dict[str, Shape]:
    return {
        prefix + "gate_proj.weight": (inner, width),
        prefix + "up_proj.weight": (inner, width),
        prefix + "down_proj.weight": (width, inner),
    }
