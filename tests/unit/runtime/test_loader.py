"""Configuration, strict loading, fingerprints and memory while loading."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.attention.sdpa import SdpaBackend
from runtime.cpu import OneDnnLinear
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import load_config
from runtime.models.llama import LlamaModel
from runtime.models.loader import fingerprint_target, load_target, resolve_target
from runtime.ops import TorchOps
from runtime.parallel import SingleProcessGroup
from tests.unit.runtime.model_fixtures import LLAMA3_ROPE, save_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    save_llama(path)
    return path


@pytest.fixture
def model_dir(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(path: Path, *, drop: tuple[str, ...] = (), **values: object) -> None:
    file = path / "config.json"
    raw = json.loads(file.read_text())
    raw = {key: value for key, value in {**raw, **values}.items() if key not in drop}
    file.write_text(json.dumps(raw))


def edit_weights(path: Path, *, drop: str = "", **tensors: torch.Tensor) -> None:
    file = path / "model.safetensors"
    weights = load_file(file)
    weights = {name: t for name, t in {**weights, **tensors}.items() if name != drop}
    save_file(weights, file, metadata={"format": "pt"})


def load(path: Path):
    return load_target(
        path, dtype=torch.float32, device=CPU, use_kernels=False, cache_dir=path.parent / "cache"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures=.*supported: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple"),
        ({"hidden_size": "32"}, "hidden_size='32'"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type='longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor=None"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor=None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_an_unsupported_config_names_the_field(values, message, model_dir):
    edit_config(model_dir, **values)
    with pytest.raises(ValueError, match=message):
        load_config(model_dir)


def test_both_rope_schemas_mean_the_same(model_dir):
    edit_config(model_dir, rope_parameters=LLAMA3_ROPE)
    new = load_config(model_dir).rope
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    edit_config(model_dir, drop=("rope_parameters",), rope_theta=10000.0, rope_scaling=scaling)
    old = load_config(model_dir).rope
    assert new == old
    assert old.kind == "llama3"
    edit_config(model_dir, drop=("rope_scaling",), rope_theta=12345.0)
    assert load_config(model_dir).rope.theta == 12345.0


def test_eos_ids_come_from_both_files(model_dir):
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_config(model_dir).eos_token_ids == (7, 2)
    edit_config(model_dir, eos_token_id=5)
    assert load_config(model_dir).eos_token_ids == (7, 2, 5)
    (model_dir / "generation_config.json").unlink()
    assert load_config(model_dir).eos_token_ids == (5,)


def test_missing_unexpected_and_misshaped_tensors_are_named(model_dir):
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(model_dir / "model.safetensors")[name]
    edit_weights(model_dir, drop=name)
    with pytest.raises(ValueError, match=f"tensor {name} .* is missing"):
        load(model_dir)
    edit_weights(model_dir, **{name: tensor[:-1].contiguous()})
    with pytest.raises(ValueError, match=f"tensor {name} has shape"):
        load(model_dir)
    edit_weights(
        model_dir, **{name: tensor, "model.layers.0.self_attn.q_norm.weight": tensor[:8].clone()}
    )
    with pytest.raises(ValueError, match=r"unexpected tensor model\.layers\.0\.self_attn\.q_norm"):
        load(model_dir)


def test_a_stored_head_must_agree_with_tying(model_dir):
    edit_config(model_dir, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        load(model_dir)
    embedding = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(model_dir, **{"lm_head.weight": embedding.clone()})
    assert torch.equal(load(model_dir).model.lm_head.dense_weight(), embedding)
    edit_config(model_dir, tie_word_embeddings=False)
    edit_weights(model_dir, drop="lm_head.weight")
    with pytest.raises(ValueError, match=r"tensor lm_head.weight .* is missing"):
        load(model_dir)


def test_a_damaged_or_absent_file_is_named(model_dir, tmp_path):
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
        load(model_dir)
    file.unlink()
    with pytest.raises(ValueError, match="neither model"):
        load(model_dir)
    with pytest.raises(ValueError, match="no such directory"):
        resolve_target(tmp_path / "nowhere", cache_dir=tmp_path)
    (model_dir / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load(model_dir)


def test_sharded_files_load_the_same_weights(tmp_path):
    model = save_llama(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load(tmp_path / "one").model, load(tmp_path / "many").model
    for a, b in zip(one.blocks, many.blocks, strict=True):
        assert torch.equal(a.mlp.gate_up.dense_weight(), b.mlp.gate_up.dense_weight())
    assert torch.equal(one.embedding_VD, many.embedding_VD)
    next((tmp_path / "many").glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"00002.* missing"):
        load(tmp_path / "many")


def test_fingerprint_is_of_content_and_leaves_the_model_directory_alone(model_dir, tmp_path):
    cache = tmp_path / "cache"
    before = sorted(p.name for p in model_dir.iterdir())
    first = fingerprint_target(model_dir, cache_dir=cache)
    copy = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    assert fingerprint_target(copy, cache_dir=cache) == first
    assert fingerprint_target(model_dir, cache_dir=tmp_path / "other") == first
    assert sorted(p.name for p in model_dir.iterdir()) == before
    norm = load_file(copy / "model.safetensors")["model.norm.weight"]
    edit_weights(copy, **{"model.norm.weight": norm + 1})
    assert fingerprint_target(copy, cache_dir=cache) != first
    edit_config(model_dir, rms_norm_eps=1e-4)
    assert fingerprint_target(model_dir, cache_dir=cache) != first


def test_fingerprint_reads_an_unchanged_file_once(model_dir, tmp_path, monkeypatch):
    first = fingerprint_target(model_dir, cache_dir=tmp_path)
    monkeypatch.setattr("runtime.models.loader.sha256_file", lambda _: pytest.fail("hashed again"))
    assert fingerprint_target(model_dir, cache_dir=tmp_path) == first


def test_loading_holds_one_checkpoint_tensor_beside_the_weights(saved):
    """Tensors handed out and still alive, the embedding (kept as it is) left out."""
    config = load_config(saved)
    checkpoint = Checkpoint(saved, config.tensor_shapes(), tied=False)
    alive: dict[str, int] = {}
    peak = 0

    def take(name: str) -> torch.Tensor:
        nonlocal peak
        tensor = checkpoint.read(name, dtype=torch.bfloat16, device=CPU)
        alive[name] = tensor.numel()
        weakref.finalize(tensor, alive.pop, name)
        if name != "model.embed_tokens.weight":
            peak = max(peak, sum(alive.values()) - alive.get("model.embed_tokens.weight", 0))
        return tensor

    model = LlamaModel(
        config,
        take,
        backend=SdpaBackend(),
        ops=TorchOps(),
        dtype=torch.bfloat16,
        device=CPU,
        group=SingleProcessGroup(CPU),
        make_linear=OneDnnLinear,
    )
    largest = max(torch.Size(shape).numel() for shape in config.tensor_shapes().values())
    assert model.lm_head.is_packed
    assert peak <= largest
    assert list(alive) == ["model.embed_tokens.weight"]
