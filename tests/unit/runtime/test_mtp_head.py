"""The MTP head against a whole-sequence reference built from transformers' decoder layer."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from runtime.batch import BatchMode
from runtime.head_spec import (
    EAGLE_FIELDS,
    DraftVocab,
    HeadSpec,
    NormPlacement,
    RopeSpec,
    hash_vocab_ids,
)
from runtime.layer_parts import LayerParts
from runtime.models.heads import build_head
from runtime.models.heads.mtp import MtpHead
from runtime.models.loader import load_target
from tests.unit.runtime.model_fixtures import (
    kernel_cache,
    make_batch,
    make_table,
    random_ids,
    relative_error,
    save_llama,
)

CPU = torch.device("cpu")
WIDTH, VOCAB = 32, 97
BASE = HeadSpec(
    kind="mtp",
    hidden_size=WIDTH,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    rope=RopeSpec(10000.0),
    norm_eps=1e-5,
    target_fingerprint="0" * 64,
)
VARIANTS = {
    "deepseek": {},
    "mimo": {"concat": "hidden_embedding"},
    "no_first_mask": {"first_embedding_mask": False},
    "position_offset": {"position_offset": 1},
    "pre_norm_recycle": {"recycle": "pre_norm"},
    "pre_norm_logits": {"recycle": "pre_norm", "logits_from": "pre_norm"},
    "one_plus_w": {"norm_form": "1+w"},
    "no_enorm": {"norms": NormPlacement(enorm=False)},
    "no_hnorm": {"norms": NormPlacement(hnorm=False)},
    "no_input_norm": {"norms": NormPlacement(input=False)},
    "no_post_attention_norm": {"norms": NormPlacement(post_attention=False)},
    "no_final_norm": {"norms": NormPlacement(final=False)},
    "bias": {"projection_bias": True},
    "two_layers": {"num_layers": 2},
    "eagle": {"kind": "eagle", **EAGLE_FIELDS},
    "eagle_bias": {"kind": "eagle", "projection_bias": True, **EAGLE_FIELDS},
}


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "fused"])
def target(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "model"
    hf = save_llama(path)
    loaded = load_target(
        path,
        dtype=torch.float32,
        device=CPU,
        use_kernels=request.param,
        cache_dir=kernel_cache() if request.param else path.parent,
    )
    return hf, loaded.model


def random_tensors(spec: HeadSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in spec.tensor_shapes().items():
        if "norm" in name:
            low = -0.5 if spec.norm_form == "1+w" else 0.5
            tensors[name] = low + torch.rand(shape, generator=generator)
        elif name != "draft_vocab_ids":
            tensors[name] = torch.randn(shape, generator=generator) * 0.3
    return tensors


class Reference:
    """One pass over the whole sequence; no cache. Rows with recycled states are simply appended."""

    def __init__(self, spec: HeadSpec, tensors: dict[str, torch.Tensor], hf: torch.nn.Module):
        self.spec, self.tensors, self.hf = spec, tensors, hf
        self.layers = [self.make_layer(f"layers.{index}.") for index in range(spec.num_layers)]
        self.rotary = LlamaRotaryEmbedding(hf.config)

    def make_layer(self, prefix: str) -> torch.nn.Module:
        layer = LlamaDecoderLayer(self.hf.config, layer_idx=0).eval()
        layer.self_attn.config._attn_implementation = "eager"
        plus = 1.0 if self.spec.norm_form == "1+w" else 0.0
        state = {
            name.removeprefix(prefix): t + plus * ("norm" in name)
            for name, t in self.tensors.items()
            if name.startswith(prefix)
        }
        layer.load_state_dict(state, strict=False)
        if not self.spec.norms.input:
            layer.input_layernorm = torch.nn.Identity()
        if not self.spec.norms.post_attention:
            layer.post_attention_layernorm = torch.nn.Identity()
        return layer

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name not in self.tensors:
            return x
        weight = self.tensors[name] + (1.0 if self.spec.norm_form == "1+w" else 0.0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.norm_eps) * weight

    @torch.no_grad()
    def __call__(
        self, ids: list[int], hidden_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(recycled state, logits) of every row; ``ids`` are already shifted."""
        embedding = self.hf.model.embed_tokens.weight[torch.tensor(ids)].clone()
        if self.spec.first_embedding_mask:
            embedding[0] = 0
        parts = [self.norm(embedding, "enorm.weight"), self.norm(hidden_TD, "hnorm.weight")]
        if self.spec.concat == "hidden_embedding":
            parts.reverse()
        bias = self.tensors.get("eh_proj.bias")
        x = F.linear(torch.cat(parts, -1), self.tensors["eh_proj.weight"], bias)
        count = len(ids)
        positions = torch.arange(count)[None] + self.spec.position_offset
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        pre = x
        for layer in self.layers:
            out = layer(
                pre[None],
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=self.rotary(x[None], positions),
            )
            pre = (out[0] if isinstance(out, tuple) else out).reshape(count, -1)
        post = self.norm(pre, "norm.weight")
        recycled = post if self.spec.recycle == "post_norm" else pre
        source = post if self.spec.logits_from == "post_norm" else pre
        return recycled, F.linear(source, self.hf.lm_head.weight)


@pytest.mark.parametrize("field", EAGLE_FIELDS)
def test_eagle_is_eagle_as_published(field):
    others = {
        "position_offset": 1,
        "concat": "hidden_embedding",
        "num_layers": 2,
        "layer_parts": LayerParts(qkv_bias=True),
    }
    other = others.get(field, getattr(BASE, field))
    with pytest.raises(ValueError, match=rf"head {field}=.*kind=eagle is EAGLE-1 as published"):
        dataclasses.replace(BASE, kind="eagle", **{**EAGLE_FIELDS, field: other})


def test_a_contract_of_version_1_has_no_bias():
    spec = dataclasses.replace(BASE, projection_bias=False)
    raw = json.loads(spec.to_json())
    del raw["projection_bias"]
    assert HeadSpec.from_json(json.dumps(raw | {"version": 1})) == spec
    with pytest.raises(ValueError, match=r"missing key\(s\) projection_bias"):
        HeadSpec.from_json(json.dumps(raw))


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_chained_steps_equal_the_reference(variant, target):
    hf, model = target
    spec = dataclasses.replace(BASE, **VARIANTS[variant])
    tensors = random_tensors(spec)
    head = build_head(spec, tensors, model)
    reference = Reference(spec, tensors, hf)
    ids = random_ids(24, seed=1)
    hidden = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(2))
    table = make_table()
    row, pool = table.acquire_row(), head.new_pool(4096)
    outputs = []
    for start, stop in ((0, 13), (13, 20)):  # a chunk start is not a sample start
        batch = make_batch(table, [row], [ids[start:stop]], [start], hidden_ND=hidden[start:stop])
        outputs.append(head.forward(batch, table, pool).clone())
    wanted, wanted_logits = reference(ids[:20], hidden)
    assert relative_error(torch.cat(outputs), wanted) < 1e-4
    assert relative_error(head.logits(torch.cat(outputs)), wanted_logits) < 1e-4
    states, recycled = hidden, outputs[-1][-1:]
    for step in range(20, 24):
        states = torch.cat((states, wanted[-1:]))
        wanted, wanted_logits = reference(ids[: step + 1], states)
        batch = make_batch(
            table, [row], [[ids[step]]], [step], mode=BatchMode.DECODE, hidden_ND=recycled
        )
        recycled = head.forward(batch, table, pool).clone()
        assert relative_error(recycled, wanted[-1:]) < 1e-4
        assert relative_error(head.logits(recycled), wanted_logits[-1:]) < 1e-4


def test_each_choice_of_the_spec_changes_the_result(target):
    """Otherwise the comparison above could not see a choice that is ignored."""
    hf, _ = target
    ids = random_ids(6, seed=3)
    hidden = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(4))
    tensors = random_tensors(BASE)
    base, base_logits = Reference(BASE, tensors, hf)(ids, hidden)
    for name in ("mimo", "no_first_mask", "pre_norm_recycle", "one_plus_w"):
        spec = dataclasses.replace(BASE, **VARIANTS[name])
        state, logits = Reference(spec, tensors, hf)(ids, hidden)
        assert (
            relative_error(torch.cat((state, logits), 1), torch.cat((base, base_logits), 1)) > 0.01
        )


def test_draft_vocabulary_gives_one_column_per_id(target):
    _, model = target
    ids = torch.tensor([3, 5, 20, 40, 96])
    spec = dataclasses.replace(BASE, draft_vocab=DraftVocab(5, 0.9, hash_vocab_ids(ids)))
    tensors = {**random_tensors(spec), "draft_vocab_ids": ids}
    head = build_head(spec, tensors, model)
    full = build_head(BASE, random_tensors(BASE), model)
    rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5))
    assert head.draft_vocab_size == 5
    assert torch.allclose(head.logits(rows), full.logits(rows)[:, ids], atol=1e-5)
    assert torch.equal(head.draft_vocab_ids, ids)
    assert full.draft_vocab_size == VOCAB
    assert full.draft_vocab_ids is None


def test_position_offset_moves_the_rotation_of_every_row(target):
    """Attention sees only differences of positions: the offset shows in the stored keys alone."""
    _, model = target
    tensors = random_tensors(BASE)
    keys = []
    for offset, start in ((1, 4), (0, 5), (0, 4)):
        head = build_head(dataclasses.replace(BASE, position_offset=offset), tensors, model)
        table, pool = make_table(), head.new_pool(4096)
        row = table.acquire_row()
        hidden = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(6))
        batch = make_batch(table, [row], [[1, 2, 3]], [start], hidden_ND=hidden)
        head.forward(batch, table, pool)
        keys.append(pool.k[0][batch.write_slots_N].clone())
    assert torch.equal(keys[0], keys[1])
    assert relative_error(keys[2], keys[0]) > 0.01


def test_embedding_and_head_are_the_targets_own(target):
    _, model = target
    head = build_head(BASE, random_tensors(BASE), model)
    assert head.lm_head is model.lm_head


def test_the_inputs_are_left_as_they_were(target):
    _, model = target
    head = build_head(BASE, random_tensors(BASE), model)
    table = make_table()
    hidden = torch.randn(4, WIDTH)
    batch = make_batch(table, [table.acquire_row()], [[1, 2, 3, 4]], [0], hidden_ND=hidden)
    before = hidden.clone(), model.embedding_VD.clone()
    head.forward(batch, table, head.new_pool(4096))
    assert torch.equal(hidden, before[0])
    assert torch.equal(model.embedding_VD, before[1])


def test_a_head_that_does_not_fit_is_refused(target):
    _, model = target
    tensors = random_tensors(BASE)
    with pytest.raises(ValueError, match=r"eh_proj\.weight .* is missing"):
        MtpHead(BASE, {k: t for k, t in tensors.items() if k != "eh_proj.weight"}, model)
    wide = dataclasses.replace(BASE, vocab_size=98)
    with pytest.raises(ValueError, match="vocab_size=98: the target has 97"):
        build_head(wide, random_tensors(wide), model)
    mixed = dataclasses.replace(BASE, logits_from="pre_norm")
    with pytest.raises(ValueError, match="recycle=post_norm with logits_from=pre_norm"):
        build_head(mixed, tensors, model)
