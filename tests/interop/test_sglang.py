"""What SGLang's own configuration and loader make of exported directories, without computing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mtp_train.config import HeadConfig
from tests.interop import test_deepseek
from tests.interop.engines import ROOT, Bench, vllm_python
from tests.interop.test_eagle import EAGLE, HEADS
from tests.interop.tiny_heads import REDUCED, TinyHead, make_tiny_bench

SOURCE = Path(os.environ.get("MTP_SGLANG_SOURCE") or ROOT / ".sglang")
WORKER = Path(__file__).with_name("sglang_worker.py")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not (SOURCE / "sglang").is_dir(), reason="make interop fetches SGLang"),
    pytest.mark.skipif(not vllm_python().is_file(), reason="no vLLM here; make interop builds one"),
]
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
TINY = {
    "eagle3": HEADS["full"],
    "eagle3_reduced": HEADS["reduced"],
    "eagle3_norm_output": HEADS["norm_output"],
    "eagle3_narrow": HEADS["narrow"],
    "eagle_sglang": TinyHead("eagle_sglang", replace(EAGLE, projection_bias=True)),
    "mimo": TinyHead("mimo", HeadConfig(concat="hidden_embedding", decoder="llama")),
}
FROM_THE_TARGET = {
    "eagle_sglang": {"lm_head.weight"},
    "deepseek": {"lm_head.weight", "model.embed_tokens.weight"},
}
CLASSES = {
    "eagle3": "LlamaForCausalLMEagle3",
    "eagle_sglang": "LlamaForCausalLMEagle",
    "mimo": "MiMoMTP",
    "deepseek": "DeepseekV3ForCausalLMNextN",
}


def load_in_sglang(bench: Bench, out: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """The class that SGLang takes, and its parameters by its names; NaN where nothing came."""
    packages = next((vllm_python().parent.parent / "lib").glob("python3*/site-packages"))
    code = (
        f"import sys; sys.path[:0] = [{str(SOURCE)!r}]; sys.path.append({str(packages)!r}); "
        f"sys.argv = ['worker', {str(bench.target_dir)!r}, {str(bench.export_dir)!r}, "
        f"{str(out)!r}]; import runpy; runpy.run_path({str(WORKER)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    with safe_open(out, framework="pt") as file:
        found = json.loads(file.metadata()["found"])
    return found["architecture"], load_file(out)


def shipped_name(name: str, format: str) -> str:
    """Ours of a parameter of SGLang's."""
    if format == "mimo":
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            return name
        return name.replace("model.", "model.mtp_layers.0.", 1).replace("mtp_block.", "")
    if format == "deepseek":
        layer = "model.layers.2."  # behind the two of the target
        if name == "lm_head.weight":
            return f"{layer}shared_head.head.weight"
        return name.replace("model.", layer, 1).replace("decoder.", "")
    return name.removeprefix("model.")


def wanted_of(name: str, shipped: dict[str, torch.Tensor], format: str) -> torch.Tensor | None:
    own = shipped_name(name, format)
    for merged, parts in PARTS.items():
        if f".{merged}." in own:
            names = [own.replace(merged, part) for part in parts]
            return torch.cat([shipped[part] for part in names]) if names[0] in shipped else None
    if own.endswith(("experts.w13_weight", "experts.w2_weight")):
        layer, is_first = own.rpartition(".")[0], own.endswith("w13_weight")
        parts = ("gate_proj", "up_proj") if is_first else ("down_proj",)
        return torch.stack(
            [
                torch.cat([shipped[f"{layer}.{index}.{part}.weight"] for part in parts])
                for index in range(sum(layer in n and parts[0] in n for n in shipped))
            ]
        )
    return shipped.get(own)


@pytest.mark.parametrize("name", [*TINY, "deepseek"])
def test_every_parameter_is_what_was_shipped(name: str, tmp_path: Path) -> None:
    is_tiny = name in TINY
    bench = make_tiny_bench(tmp_path, TINY[name]) if is_tiny else test_deepseek.make_bench(tmp_path)
    architecture, loaded = load_in_sglang(bench, tmp_path / "loaded.safetensors")
    assert architecture == CLASSES[bench.format]
    shipped = load_file(bench.export_dir / "model.safetensors")
    ids = loaded.pop("hot_token_id", None)
    if name == "eagle3_reduced":
        assert ids is not None
        assert ids.tolist() == list(REDUCED)
    untouched = set()
    for parameter, tensor in loaded.items():
        wanted = wanted_of(parameter, shipped, bench.format)
        if bool(tensor.isnan().all()):
            untouched.add(parameter)
            continue
        assert wanted is not None, parameter
        assert torch.equal(tensor[: len(wanted)], wanted), parameter
    assert untouched == FROM_THE_TARGET.get(bench.format, set())
