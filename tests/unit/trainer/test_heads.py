from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mtp_train.config import HeadConfig, HeadNorms
from mtp_train.heads import build_training_head
from mtp_train.heads.init import initialise, make_head_spec
from mtp_train.heads.parts import rotate
from mtp_train.packing import pack
from runtime.head_spec import EAGLE_FIELDS, HeadSpec, NormPlacement, RopeSpec, YarnSpec
from runtime.layer_parts import LayerParts
from runtime.layers import RotaryEmbedding
from runtime.models.checkpoint import Checkpoint
from runtime.models.config import ModelConfig, load_config, parse_config
from tests.unit.runtime.model_fixtures import save_model
from tests.unit.trainer.reference import (
    EXPERTS,
    NARROW,
    StepwiseHead,
    eagle3,
    latent,
    medusa,
    random_embedding,
    random_head,
    random_sample,
    tiny_spec,
)

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SPECS = {
    "default": {},
    "hidden first, pre-norm recycle": {"concat": "hidden_embedding", "recycle": "pre_norm"},
    "pre-norm logits": {"logits_from": "pre_norm"},
    "one plus w": {"norm_form": "1+w"},
    "no first-embedding mask": {"first_embedding_mask": False},
    "norm-free": {
        "norms": NormPlacement(enorm=False, hnorm=False, input=False, final=False),
    },
    "bias": {"projection_bias": True},
    "two layers": {"num_layers": 2},
    "qwen2": {"layer_parts": LayerParts(qkv_bias=True)},
    "qwen3": {"layer_parts": LayerParts(qk_norm=True), "head_dim": 12},
    "qwen3, one plus w": {"layer_parts": LayerParts(qk_norm=True), "norm_form": "1+w"},
    "every bias and norm, two layers": {
        "layer_parts": LayerParts(qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True),
        "num_layers": 2,
    },
    "latent, values wider than queries": latent(value_dim=22),
    "deepseek v2-lite": {**latent(), "experts": EXPERTS["v2-lite"]},
    "deepseek v2": {**latent(18), "experts": EXPERTS["v2"]},
    "deepseek v3": {**latent(18), "experts": EXPERTS["v3"]},
    "latent, halves": latent(18, is_interleaved=False),
    "qwen3 moe": {
        "layer_parts": LayerParts(qk_norm=True),
        "head_dim": 12,
        "experts": EXPERTS["qwen3"],
        "num_layers": 2,
    },
    "eagle3": eagle3(),
    "eagle3, every variant": eagle3(12, fusion_norm="each", residual="normed", recycle="post_norm"),
    "eagle3, norm of all streams": eagle3(fusion_norm="joined"),
    "eagle3, narrower than its target": eagle3(12, fusion_norm="each", **NARROW),
    "eagle3, narrower, norm of all streams": eagle3(fusion_norm="joined", **NARROW),
    "eagle3 with an embedding of its own": eagle3(embedding="own"),
    "eagle": {"kind": "eagle", "projection_bias": True, **EAGLE_FIELDS},
    "medusa": medusa(),
    "medusa without a bias": medusa(4, projection_bias=False),
    "medusa with lm_heads of its own": medusa(lm_head="own"),
}
UNROLLED = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "biases and head norms": {"layer_parts": LayerParts(True, True, True, True), "head_dim": 12},
    "deepseek v2-lite": {**latent(), "experts": EXPERTS["v2-lite"]},
    "deepseek v3": {**latent(18), "experts": EXPERTS["v3"]},
    "qwen3 moe, two layers": {"experts": EXPERTS["qwen3"], "num_layers": 2},
    "medusa": medusa(),
}


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS.keys())
def test_packed_unroll_equals_stepwise_decode_with_a_cache(changes):
    spec = tiny_spec(**changes)
    head, embedding = random_head(spec), random_embedding(spec)
    samples = [random_sample(spec, n, seed=n) for n in (9, 2, 14)]
    batch = pack(samples, num_steps=3, every_row=True, of_layers=spec.reads_layers)
    states = head(batch, embedding)
    reference = StepwiseHead(spec, head.export_tensors(), embedding)
    compared = 0
    borders = batch.cu_seqlens
    for start_row, sample in zip(borders, samples, strict=False):
        for i in range(len(sample.input_ids) - 1):
            num_steps = min(3, len(sample.input_ids) - 1 - i)
            for k, expected in enumerate(reference.unroll(sample, i, num_steps)):
                index = (batch.steps[k].rows_N == start_row + i).nonzero().item()
                scale = max(1.0, float(expected.abs().max()))  # states without a norm grow
                torch.testing.assert_close(states[k][index], expected, rtol=1e-5, atol=1e-5 * scale)
                compared += 1
    assert compared == sum(step.rows_N.numel() for step in batch.steps)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"num_layers": 2}, eagle3()], ids=["mtp", "eagle3"])
def test_compiled_parts_compute_the_same_for_every_number_of_rows(changes):
    spec = tiny_spec(**changes)
    eager, embedding = random_head(spec), random_embedding(spec)
    compiled = build_training_head(spec, dtype=torch.float32, compiled=True)
    compiled.load_tensors(eager.export_tensors())
    assert list(dict(compiled.named_parameters())) == list(dict(eager.named_parameters()))
    for length in (9, 30, 17):
        sample = random_sample(spec, length, seed=length)
        batch = pack([sample], num_steps=2, of_layers=spec.reads_layers)
        outcomes = []
        for head in (eager, compiled):
            head.zero_grad(set_to_none=True)
            states = head(batch, embedding)
            sum(state.square().mean() for state in states).backward()
            grads = [p.grad for p in head.parameters() if p.grad is not None]
            outcomes.append([*states, *grads])
        for ours, theirs in zip(*outcomes, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", UNROLLED.values(), ids=UNROLLED.keys())
def test_only_needed_rows_give_the_same_states_as_all_rows(changes):
    spec = tiny_spec(**changes)
    head, embedding = random_head(spec), random_embedding(spec)
    samples = [random_sample(spec, 40, seed=1, mask="spans"), random_sample(spec, 90, seed=2)]
    sparse, full = (pack(samples, num_steps=3, every_row=every) for every in (False, True))
    sparse_states, full_states = head(sparse, embedding), head(full, embedding)
    for k in range(3):
        s, f = sparse.steps[k], full.steps[k]
        assert s.active_A.numel() == f.active_A.numel() > 0
        torch.testing.assert_close(
            sparse_states[k][s.active_A], full_states[k][f.active_A], rtol=1e-5, atol=1e-5
        )
        assert torch.equal(s.target_AD, f.target_AD)
        assert torch.equal(s.labels_A, f.labels_A)
    assert sparse.steps[0].rows_N.numel() < full.steps[0].rows_N.numel()


@pytest.mark.parametrize("changes", [*UNROLLED.values(), eagle3()], ids=[*UNROLLED, "eagle3"])
def test_gradients_of_the_unroll_equal_those_of_plain_autograd(changes):
    spec = tiny_spec(**changes)
    head, embedding = random_head(spec), random_embedding(spec)
    sample = random_sample(spec, 11, seed=5)
    batch = pack([sample], num_steps=3, every_row=True, of_layers=spec.reads_layers)
    weights = [torch.randn(s.rows_N.numel(), spec.hidden_size) for s in batch.steps]
    loss = sum((s * w).sum() for s, w in zip(head(batch, embedding), weights, strict=True))
    trained = {n: p for n, p in head.named_parameters() if n != "lm_head.weight"}
    names = list(trained)
    ours = torch.autograd.grad(loss, list(trained.values()))
    tensors = {n: p.detach().clone().requires_grad_() for n, p in head.named_parameters()}
    reference = StepwiseHead(spec, {**dict(head.named_buffers()), **tensors}, embedding)
    expected = 0.0
    for i in range(10):
        for k, state in enumerate(reference.unroll(sample, i, min(3, 10 - i))):
            expected = expected + (state * weights[k][i]).sum()
    # an expert that no row chose has no part in the reference
    grads = torch.autograd.grad(expected, [tensors[n] for n in names], materialize_grads=True)
    for name, a, b in zip(names, ours, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item(), msg=name)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_changing_a_token_or_a_state_leaves_earlier_outputs_alone(num_steps):
    spec = tiny_spec()
    head, embedding = random_head(spec), random_embedding(spec)
    samples = [random_sample(spec, n, seed=n) for n in (12, 15)]
    changed_at = 7
    ids, hidden = samples[0].input_ids.clone(), samples[0].hidden.clone()
    ids[changed_at] = (ids[changed_at] + 1) % spec.vocab_size
    hidden[changed_at] += 1.0
    other = [
        dataclasses.replace(samples[0], input_ids=ids),
        dataclasses.replace(samples[0], hidden=hidden),
    ]
    batch = pack(samples, num_steps=num_steps, every_row=True)
    before = head(batch, embedding)
    for variant, first_row_seen in zip(other, (changed_at - 1, changed_at), strict=True):
        after = head(pack([variant, samples[1]], num_steps=num_steps, every_row=True), embedding)
        for k, step in enumerate(batch.steps):
            # A changed token enters row i of step k when i + 1 + k reaches it, a state when i does.
            reach = first_row_seen - (k if variant is other[0] else 0)
            rows = step.rows_N
            is_first = rows < batch.cu_seqlens[1]
            untouched = ~is_first | (rows < reach)
            assert torch.equal(before[k][untouched], after[k][untouched])
            seen = is_first & (rows == reach)
            assert not torch.equal(before[k][seen], after[k][seen])


def test_first_embedding_is_masked_in_every_sample_of_a_pack():
    spec = tiny_spec()
    head, embedding = random_head(spec), random_embedding(spec)
    samples = [random_sample(spec, n, seed=n) for n in (6, 6)]
    changed = []
    for sample in samples:
        ids = sample.input_ids.clone()
        ids[1] = (ids[1] + 1) % spec.vocab_size  # the token whose embedding row 0 takes
        changed.append(dataclasses.replace(sample, input_ids=ids))
    a = head(pack(samples, every_row=True), embedding)[0]
    b = head(pack(changed, every_row=True), embedding)[0]
    assert torch.equal(a, b)


FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], LayerParts]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, LayerParts()),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, LayerParts(qkv_bias=True)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, LayerParts(qk_norm=True)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_step_zero_equals_the_decoder_layer_of_transformers(family):
    config_class, model_class, parts = FAMILIES[family]
    config = config_class(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=1,
        vocab_size=61,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters=LLAMA3,
    )
    model = model_class(config).eval().model
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    rope = RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 128)
    spec = tiny_spec(rope=rope, layer_parts=parts)
    head, embedding = random_head(spec), random_embedding(spec)
    head.layers[0].load_state_dict(model.layers[0].state_dict())
    head.norm.load_state_dict(model.norm.state_dict())
    sample = random_sample(spec, 300, seed=3)
    ours = head(pack([sample], every_row=True), embedding)[0]
    e = embedding[sample.input_ids[1:]].clone()
    e[0] = 0
    joined = torch.cat((head.enorm(e), head.hnorm(sample.hidden[:-1])), dim=-1)
    theirs = model(inputs_embeds=head.eh_proj(joined)[None]).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("parameters", "rope"),
    [
        ({"rope_type": "default", "rope_theta": 100000.0}, RopeSpec(100000.0)),
        (
            LLAMA3 | {"original_max_position_embeddings": 8192},
            RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
            RopeSpec(
                1000000.0,
                "yarn",
                4.0,
                original_max_position=32768,
                yarn=YarnSpec(attention_factor=1.0 + 0.1 * math.log(4.0)),
            ),
        ),
    ],
    ids=["default", "llama3", "yarn"],
)
def test_rotation_is_that_of_transformers_and_of_the_inference_head_at_any_position(
    parameters, rope
):
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    positions = torch.tensor([0, 1, 63, 8191, 8192, 32768, 65537, 131071])
    x = torch.randn(len(positions), 4, 64, generator=torch.Generator().manual_seed(0))
    ours = rotate(x, positions, rope)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=0, atol=1e-6)
    angles = RotaryEmbedding(rope, 64, device=CPU).angles(
        positions, torch.float32, end=int(positions.max()) + 1
    )
    served = x * angles.cos_NC[:, None] + x.roll(32, -1) * angles.sin_NC[:, None]
    torch.testing.assert_close(ours, served, rtol=0, atol=1e-6)


def test_a_yarn_head_goes_through_its_file_and_other_heads_keep_theirs():
    yarn = YarnSpec(attention_factor=1.2)
    spec = tiny_spec(rope=RopeSpec(1e4, "yarn", 4.0, original_max_position=32, yarn=yarn))
    assert HeadSpec.from_json(spec.to_json()) == spec
    assert "yarn" not in tiny_spec().to_json()
    with pytest.raises(ValueError, match="rope kind='yarn'"):
        RopeSpec(1e4, "yarn", 4.0)


def test_the_bias_of_the_choice_stays_float32_whatever_the_head_is_cast_to():
    spec = tiny_spec(**latent(), experts=EXPERTS["v3"])
    head = random_head(spec)
    name = "layers.0.mlp.gate.e_score_correction_bias"
    bias = head.export_tensors()[name].clone()
    head.to(torch.bfloat16)
    cast = head.export_tensors()
    assert torch.equal(cast[name], bias)
    assert cast["layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    states = head(
        pack([random_sample(spec, 9, seed=1)], every_row=True).to(CPU, torch.bfloat16),
        random_embedding(spec).bfloat16(),
    )
    assert states[0].isfinite().all()


@pytest.mark.parametrize("family", ["deepseekv2", "deepseekv3", "qwen3moe"])
def test_step_zero_equals_the_sparse_layer_of_transformers(family, tmp_path):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    hf = save_model(tmp_path / "target", family, rope_parameters=rope)
    config = load_config(tmp_path / "target")
    spec = make_head_spec(HeadConfig(init="last_layer"), config, fingerprint="f" * 64)
    head, embedding = random_head(spec), random_embedding(spec)
    checkpoint = Checkpoint.of(tmp_path / "target", config)
    layer = head.layers[0]
    layer.load_state_dict(
        {
            name: checkpoint.read(f"model.layers.1.{name}", dtype=torch.float32, device=CPU)
            for name in layer.state_dict()
        }
    )
    sample = random_sample(spec, 200, seed=3)
    ours = head(pack([sample], every_row=True), embedding)[0]
    e = embedding[sample.input_ids[1:]].clone()
    e[0] = 0
    x = head.eh_proj(torch.cat((head.enorm(e), head.hnorm(sample.hidden[:-1])), dim=-1))
    model = hf.model
    del model.layers[0]
    model.layers[0].self_attn.layer_idx = 0
    model.config.num_hidden_layers = 1
    model.norm.weight.data.copy_(head.norm.weight)
    theirs = model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, medusa(), medusa(lm_head="own")], ids=["mtp", "medusa", "own lm_heads"]
)
def test_exported_tensors_are_those_of_the_spec_and_load_again(changes):
    spec = tiny_spec(**changes)
    head = random_head(spec)
    tensors = head.export_tensors()
    assert {n: tuple(t.shape) for n, t in tensors.items()} == spec.tensor_shapes()
    other = build_training_head(spec, dtype=torch.float32)
    other.load_tensors(tensors)
    assert all(torch.equal(t, tensors[n]) for n, t in other.export_tensors().items())
    name = "blocks.2.layers.0.bias" if changes else "norm.weight"
    del tensors[name]
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        other.load_tensors(tensors)


def _target(family: str) -> ModelConfig:
    config_class, model_class, _ = FAMILIES[family]
    config = config_class(head_dim=16, num_attention_heads=2, num_key_value_heads=2)
    raw = config.to_dict() | {"architectures": [model_class.__name__]}
    return parse_config(raw, generation={}, source="test")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_has_the_parts_of_its_targets_layers_unless_told_otherwise(family, caplog):
    target, parts = _target(family), FAMILIES[family][2]

    def parts_of(head: HeadConfig) -> LayerParts:
        spec = make_head_spec(head, target, fingerprint="f" * 64)
        assert HeadSpec.from_json(spec.to_json()) == spec
        assert ("layer_parts" in spec.to_json()) == (spec.layer_parts != LayerParts())
        return spec.layer_parts

    assert parts_of(HeadConfig()) == parts
    assert parts_of(HeadConfig(num_layers=2)) == parts
    assert parts_of(HeadConfig(decoder="llama")) == LayerParts()
    norms = HeadNorms(enorm=False, hnorm=False, input=False, final=False)
    eagle = HeadConfig(kind="eagle", recycle="pre_norm", first_embedding_mask=False, norms=norms)
    assert parts_of(eagle) == LayerParts()
    assert not caplog.records
    parts_of(HeadConfig(init="last_layer", decoder="llama"))
    assert [str(parts) in record.getMessage() for record in caplog.records] == [True] * (
        family != "llama"
    )


def _fresh(spec, method, read_target=lambda name: torch.empty(0)):
    return initialise(
        spec,
        method=method,
        seed=3,
        initializer_range=0.05,
        num_target_layers=4,
        read_target=read_target,
    )


def test_random_start_has_the_targets_spread_and_depends_on_the_seed_alone():
    spec = tiny_spec(hidden_size=128, head_dim=32, intermediate_size=256)
    tensors = _fresh(spec, "random")
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            assert tensor.std().item() == pytest.approx(0.05 * 0.9866, rel=0.03), name
            assert tensor.abs().max() <= 0.15
    assert all(torch.equal(t, tensors[n]) for n, t in _fresh(spec, "random").items())


def test_target_norm_start_differs_from_a_random_one_in_the_final_norm_alone():
    spec = tiny_spec()
    final = torch.rand(spec.hidden_size).bfloat16()
    tensors = _fresh(spec, "target_norm", {"model.norm.weight": final}.__getitem__)
    for name, tensor in _fresh(spec, "random").items():
        wanted = final.float() if name == "norm.weight" else tensor
        assert torch.equal(tensors[name], wanted), name
    bare = tiny_spec(norms=NormPlacement(final=False))
    assert "norm.weight" not in _fresh(bare, "target_norm")


def test_a_zero_start_is_the_identity_and_learns():
    spec = tiny_spec(**medusa())
    head = build_training_head(spec, dtype=torch.float32)
    head.load_tensors(_fresh(spec, "zero"))
    sample = random_sample(spec, 12, seed=2)
    batch = pack([sample], num_steps=3, every_row=True)
    states = head(batch, random_embedding(spec))
    for step, state in zip(batch.steps, states, strict=True):
        assert torch.equal(state, batch.hidden_SD[step.rows_N])
    sum(state.square().sum() for state in states).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in head.parameters())
    random = _fresh(spec, "random")
    assert random["blocks.0.layers.0.weight"].std() == pytest.approx(0.05, rel=0.1)
    assert not random["blocks.0.layers.0.bias"].any()


@pytest.mark.parametrize(
    ("concat", "num_layers", "parts"),
    [
        ("embedding_hidden", 1, LayerParts()),
        ("hidden_embedding", 2, LayerParts()),
        ("embedding_hidden", 1, LayerParts(qkv_bias=True)),
        ("embedding_hidden", 2, LayerParts(qk_norm=True)),
    ],
)
def test_last_layer_start_runs_the_targets_last_layers_on_the_hidden_state(
    concat, num_layers, parts
):
    spec = tiny_spec(
        concat=concat,
        num_layers=num_layers,
        norms=NormPlacement(enorm=False, hnorm=False),
        layer_parts=parts,
    )
    source = random_head(spec, seed=9).export_tensors()
    asked = []

    def read_target(name):
        asked.append(name)
        if name == "model.norm.weight":
            return source["norm.weight"].bfloat16()
        own = name.replace("model.layers.3.", f"layers.{num_layers - 1}.")
        return source[own.replace("model.layers.2.", "layers.0.")].bfloat16()

    tensors = _fresh(spec, "last_layer", read_target)
    assert "model.layers.3.mlp.down_proj.weight" in asked
    for name, tensor in tensors.items():
        if name != "eh_proj.weight":
            assert torch.equal(tensor, source[name].bfloat16().float()), name
    head = build_training_head(spec, dtype=torch.float32)
    head.load_tensors(tensors)
    e, h = torch.randn(5, 32), torch.randn(5, 32)
    parts = (e, h) if concat == "embedding_hidden" else (h, e)
    assert torch.equal(head.eh_proj(torch.cat(parts, dim=-1)), h)
