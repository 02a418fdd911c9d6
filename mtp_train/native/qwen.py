"""``mtp.*`` weights of Qwen3-Next and Qwen3.5 checkpoints: read, described, written back unchanged.

Most layers of these targets are linear attention, which the runtime does not compute, so a head of
this layout is neither trained nor measured here. The module itself is one layer of full attention
with gated queries; tensors are listed in ``docs/formats.md``.

Shape legend: H width, A query heads, K key/value heads, D head width, I width of an MLP, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mtp_train.native.splice import Splice, splice_into_copy
from runtime.head_spec import CONFIG_NAME
from runtime.models.checkpoint import weight_files
from runtime.models.fields import positive

PREFIX = "mtp."
_FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


@dataclass(frozen=True)
class QwenMtp:
    """The module of a checkpoint. ``problems``: tensors that are missing, of another shape than the
    configuration says, or not known.
    """

    path: Path
    model_type: str
    hidden_size: int
    num_experts: int  # 0: a dense MLP
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    files: Mapping[str, str] = field(repr=False)
    problems: tuple[str, ...] = ()

    @property
    def num_values(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def describe(self) -> str:
        """Lines for a terminal."""
        mlp = f"{self.num_experts} experts and a shared one" if self.num_experts else "a dense MLP"
        lines = [
            f"{self.path}: MTP module of {self.model_type} (Qwen layout), {len(self.shapes)} "
            f"tensors, {self.num_values:,} values, {', '.join(sorted(set(self.dtypes.values())))}, "
            f"in {', '.join(sorted(set(self.files.values())))}",
            f"one layer of gated full attention with {mlp}, width {self.hidden_size}; norms are "
            "1+w; mtp.fc takes the embedding first; the post-norm state is recycled",
            "neither measured nor trained here: the target's linear attention is not computed",
        ]
        return "\n".join([*lines, *(f"problem: {problem}" for problem in self.problems)])


def inspect_qwen_mtp(directory: Path) -> QwenMtp:
    """What ``mtp.*`` of a Hugging Face directory is. Raises ``ValueError`` where there is none."""
    file = directory / CONFIG_NAME
    raw = json.loads(file.read_text())
    text = raw.get("text_config") or raw
    shapes, dtypes, files = {}, {}, {}
    for weights in weight_files(directory):
        with safe_open(weights, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                if name.startswith(PREFIX):
                    stored = handle.get_slice(name)
                    shapes[name] = tuple(stored.get_shape())
                    dtypes[name] = stored.get_dtype()
                    files[name] = weights.name
    if not shapes:
        raise ValueError(f"target={directory}: no tensors mtp.*: it has no MTP weights of its own")
    return QwenMtp(
        path=directory,
        model_type=str(raw.get("model_type")),
        hidden_size=positive(text, "hidden_size", str(file)),
        num_experts=int(text.get("num_experts") or 0),
        shapes=shapes,
        dtypes=dtypes,
        files=files,
        problems=_problems(shapes, _expected(text, str(file), fused=_is_fused(shapes))),
    )


def read_qwen_mtp(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors ``mtp.*`` as they are stored, on the host."""
    tensors = {}
    for name, file in inspect_qwen_mtp(directory).files.items():
        with safe_open(directory / file, framework="pt") as handle:
            tensors[name] = handle.get_tensor(name).clone()
    return tensors


def write_qwen_mtp(target: Path, out_dir: Path, tensors: Mapping[str, torch.Tensor]) -> Splice:
    """A copy of ``target`` with these ``mtp.*`` tensors as its own, bit for bit.

    Raises ``ValueError`` for tensors that are not those of the target's configuration.
    """
    file = target / CONFIG_NAME
    raw = json.loads(file.read_text())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    text = raw.get("text_config") or raw
    problems = _problems(shapes, _expected(text, str(file), fused=_is_fused(shapes)))
    if problems:
        raise ValueError(f"{target}: {problems[0]}")
    return splice_into_copy(target, out_dir, tensors, replaces=PREFIX, config={})


def _is_fused(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return any(name.endswith(_FUSED) for name in shapes)


def _expected(text: Mapping[str, Any], source: str, *, fused: bool) -> dict[str, tuple[int, ...]]:
    """Tensor list of one module. ``fused``: experts of a layer in two tensors."""
    width = positive(text, "hidden_size", source)
    heads = positive(text, "num_attention_heads", source)
    kv_heads = positive(text, "num_key_value_heads", source)
    dim = positive(text, "head_dim", source)
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (width, 2 * width)}
    shapes |= {f"mtp.{name}.weight": (width,) for name in _NORMS}
    block = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (2 * heads * dim, width),  # queries and their gates
        "self_attn.k_proj.weight": (kv_heads * dim, width),
        "self_attn.v_proj.weight": (kv_heads * dim, width),
        "self_attn.o_proj.weight": (width, heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }
    mlps: dict[str, int] = {}
    if not text.get("num_experts"):
        mlps["mlp"] = positive(text, "intermediate_size", source)
    else:
        count = positive(text, "num_experts", source)
        inner = positive(text, "moe_intermediate_size", source)
        block["mlp.gate.weight"] = (count, width)
        block["mlp.shared_expert_gate.weight"] = (1, width)
        shared = positive(text, "shared_expert_intermediate_size", source)
        mlps["mlp.shared_expert"] = shared
        if fused:
            block[_FUSED[0]] = (count, 2 * inner, width)
            block[_FUSED[1]] = (count, width, inner)
        else:
            mlps |= {f"mlp.experts.{index}": inner for index in range(count)}
    for name, inner in mlps.items():
        block[name + ".gate_proj.weight"] = block[name + ".up_proj.weight"] = (inner, width)
        block[name + ".down_proj.weight"] = (width, inner)
    return shapes | {f"mtp.layers.0.{name}": shape for name, shape in block.items()}


def _problems(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    problems = []
    for name, shape in expected.items():
        if name not in found:
            problems.append(f"tensor {name} {list(shape)} is missing")
        elif found[name] != shape:
            problems.append(f"tensor {name} has shape {list(found[name])}, expected {list(shape)}")
    problems += [f"unexpected tensor {name}" for name in found if name not in expected]
    return tuple(problems)
