"""`mtp.*` weights of Qwen3-Next and Qwen3.5: described, and written back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_train.native.qwen import inspect_qwen_mtp, read_qwen_mtp, write_qwen_mtp
from runtime.models.config import load_config

H, A, K, D, INNER, EXPERTS = 12, 4, 2, 6, 10, 3
TEXT = {
    "hidden_size": H,
    "num_attention_heads": A,
    "num_key_value_heads": K,
    "head_dim": D,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
}
MOE = {
    "num_experts": EXPERTS,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": 8,
}
BLOCK = {
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
    "self_attn.q_proj.weight": (2 * A * D, H),
    "self_attn.k_proj.weight": (K * D, H),
    "self_attn.v_proj.weight": (K * D, H),
    "self_attn.o_proj.weight": (H, A * D),
    "self_attn.q_norm.weight": (D,),
    "self_attn.k_norm.weight": (D,),
}
TOP = {
    "mtp.fc.weight": (H, 2 * H),
    "mtp.pre_fc_norm_embedding.weight": (H,),
    "mtp.pre_fc_norm_hidden.weight": (H,),
    "mtp.norm.weight": (H,),
}


def gated(name: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (inner, H),
        f"{name}.up_proj.weight": (inner, H),
        f"{name}.down_proj.weight": (H, inner),
    }


def module_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    block: dict[str, tuple[int, ...]] = dict(BLOCK)
    if kind == "dense":
        block |= gated("mlp", 20)
    else:
        block |= {"mlp.gate.weight": (EXPERTS, H), "mlp.shared_expert_gate.weight": (1, H)}
        block |= gated("mlp.shared_expert", 8)
    if kind == "experts":
        for index in range(EXPERTS):
            block |= gated(f"mlp.experts.{index}", INNER)
    if kind == "fused":
        block["mlp.experts.gate_up_proj"] = (EXPERTS, 2 * INNER, H)
        block["mlp.experts.down_proj"] = (EXPERTS, H, INNER)
    return TOP | {f"mtp.layers.0.{name}": shape for name, shape in block.items()}


def save(path: Path, kind: str, **changes: Any) -> dict[str, torch.Tensor]:
    path.mkdir()
    text = TEXT | (MOE if kind != "dense" else {})
    name = "Qwen3_5MoeForConditionalGeneration" if kind == "fused" else "Qwen3NextForCausalLM"
    nested = {"text_config": text} if kind == "fused" else text
    raw = {"architectures": [name], "model_type": "qwen3_next", **nested, **changes}
    (path / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in module_shapes(kind).items()
    }
    body = {"model.layers.0.linear_attn.in_proj_qkvz.weight": torch.randn(5, H)}
    save_file(body, path / "model-00001-of-00002.safetensors")
    extra = {"lm_head.weight": torch.randn(7, H)}
    save_file(tensors | extra, path / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(body, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(tensors | extra, "model-00002-of-00002.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "tokenizer.json").write_text("{}")
    return tensors


@pytest.mark.parametrize("kind", ["dense", "experts", "fused"])
def test_a_module_is_described_and_written_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    tensors = save(tmp_path / "target", kind)
    found = inspect_qwen_mtp(tmp_path / "target")
    assert found.problems == ()
    assert found.num_values == sum(t.numel() for t in tensors.values())
    text = found.describe()
    assert "gated full attention" in text
    assert ("3 experts and a shared one" in text) == (kind != "dense")
    assert "linear attention is not computed" in text
    read = read_qwen_mtp(tmp_path / "target")
    assert read.keys() == tensors.keys()
    splice = write_qwen_mtp(tmp_path / "target", tmp_path / "copy", read)
    assert splice.linked == ("model-00001-of-00002.safetensors",)
    assert splice.rewritten == ("model-00002-of-00002.safetensors",)
    again = read_qwen_mtp(tmp_path / "copy")
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name].view(torch.int16), tensor.view(torch.int16))
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
    names = [n for f in (tmp_path / "copy").glob("*.safetensors") for n in load_file(f)]
    assert sorted(names) == sorted(index["weight_map"])
    assert (tmp_path / "copy" / "tokenizer.json").is_file()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    tensors = save(tmp_path / "target", "dense", head_dim=D + 2)
    problems = inspect_qwen_mtp(tmp_path / "target").problems
    assert any("self_attn.q_norm.weight has shape [6], expected [8]" in one for one in problems)
    assert "problem: tensor mtp.layers.0" in inspect_qwen_mtp(tmp_path / "target").describe()
    with pytest.raises(ValueError, match="has shape"):
        write_qwen_mtp(tmp_path / "target", tmp_path / "copy", tensors)
    save(tmp_path / "whole", "dense")
    del tensors["mtp.norm.weight"]
    with pytest.raises(ValueError, match=r"mtp\.norm\.weight \[12\] is missing"):
        write_qwen_mtp(tmp_path / "whole", tmp_path / "copy", tensors)
    tensors["model.norm.weight"] = torch.zeros(H)
    with pytest.raises(ValueError, match=r"mtp\.norm\.weight|unexpected"):
        write_qwen_mtp(tmp_path / "whole", tmp_path / "copy", tensors)


def test_its_target_is_refused_with_the_reason_and_what_can_be_done(tmp_path: Path) -> None:
    save(tmp_path / "target", "dense")
    with pytest.raises(ValueError, match=r"linear attention.*mtp\.\* weights can be read"):
        load_config(tmp_path / "target")


def test_a_checkpoint_without_such_weights_says_so(tmp_path: Path) -> None:
    save(tmp_path / "target", "dense")
    file = tmp_path / "target" / "model-00002-of-00002.safetensors"
    save_file({"lm_head.weight": torch.zeros(7, H)}, file)
    with pytest.raises(ValueError, match=r"no tensors mtp\.\*"):
        inspect_qwen_mtp(tmp_path / "target")
