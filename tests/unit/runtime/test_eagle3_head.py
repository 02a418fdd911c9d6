"""Residual streams that a target gives, and the head of EAGLE-3 that reads them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from runtime.batch import BatchMode
from runtime.head_spec import EAGLE3_FIELDS, DraftVocab, HeadSpec, RopeSpec, hash_vocab_ids
from runtime.layer_parts import LayerParts
from runtime.models.heads import build_head
from runtime.models.llama import LlamaModel
from runtime.models.loader import load_target
from tests.unit.runtime.model_fixtures import (
    kernel_cache,
    make_batch,
    make_table,
    random_ids,
    relative_error,
    save_llama,
)
from tests.unit.trainer.reference import StepwiseHead

CPU = torch.device("cpu")
WIDTH, VOCAB, IDS = 32, 97, (1, 3)
DRAFT_IDS = torch.tensor([3, 5, 20, 40, 96])
BASE = HeadSpec(
    **{"kind": "eagle3", **EAGLE3_FIELDS},
    layer_ids=IDS,
    recycle="pre_norm",
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
NARROW = {"hidden_size": 24, "target_hidden_size": WIDTH, "embedding": "own", "head_dim": 12}
VARIANTS = {
    "published": {},
    "one_stream": {"layer_ids": (2,)},
    "normed_residual": {"residual": "normed"},
    "norm_output": {"recycle": "post_norm"},
    "fc_norm": {"fusion_norm": "each"},
    "norm_before_fc": {"fusion_norm": "joined"},
    "draft_vocab": {"draft_vocab": DraftVocab(5, 0.9, hash_vocab_ids(DRAFT_IDS))},
    "own_embedding": {"embedding": "own"},
    "narrow": {**NARROW, "fusion_norm": "each"},
    "narrow_joined": {**NARROW, "fusion_norm": "joined", "recycle": "post_norm"},
}


def load(path, *, use_kernels: bool, dtype: torch.dtype = torch.float32) -> LlamaModel:
    return load_target(
        path,
        dtype=dtype,
        device=CPU,
        use_kernels=use_kernels,
        cache_dir=kernel_cache() if use_kernels else path.parent,
    ).model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("target") / "model"
    return path, save_llama(path, num_hidden_layers=4)


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "fused"])
def target(request, saved):
    path, hf = saved
    return hf, load(path, use_kernels=request.param)


def forward_in_parts(model: LlamaModel, ids: list[int], cuts: list[int]) -> torch.Tensor:
    table = make_table()
    row, pool = table.acquire_row(), model.new_pool(4096)
    rows = []
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        mode = BatchMode.DECODE if stop - start == 1 else BatchMode.PREFILL
        batch = make_batch(table, [row], [ids[start:stop]], [start], mode=mode)
        rows.append(model.forward(batch, table, pool).clone())
    return torch.cat(rows)


@pytest.mark.parametrize("layer_ids", [(1,), (2, 3), (1, 2, 3)])
def test_residual_streams_are_those_of_transformers(target, layer_ids):
    hf, model = target
    ids = random_ids(40, seed=1)
    rows = forward_in_parts(model.tapped(layer_ids), ids, [17, 38, 39])
    assert rows.shape == (40, WIDTH * (1 + len(layer_ids)))
    with torch.no_grad():
        hidden_states = hf(torch.tensor([ids]), output_hidden_states=True).hidden_states
    parts = rows.split(WIDTH, dim=1)
    assert relative_error(parts[0], hidden_states[-1][0]) < 1e-4
    for layer_id, part in zip(layer_ids, parts[1:], strict=True):
        assert relative_error(part, hidden_states[layer_id][0]) < 1e-4
        assert relative_error(part, hidden_states[layer_id - 1][0]) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_kernels", [False, True])
def test_a_tap_changes_no_bit_of_g_and_none_of_the_logits(saved, use_kernels, dtype):
    model = load(saved[0], use_kernels=use_kernels, dtype=dtype)
    ids = random_ids(30, seed=2)
    plain = forward_in_parts(model, ids, [11, 29])
    rows = forward_in_parts(model.tapped(IDS), ids, [11, 29])
    assert torch.equal(rows[:, :WIDTH], plain)
    assert torch.equal(model.tapped(IDS).logits(rows), model.logits(plain))
    assert model.layer_ids == ()


@pytest.mark.parametrize("layer_ids", [(), (0, 2), (2, 2), (3, 1), (1, 4)])
def test_layers_that_the_target_does_not_have_are_refused(target, layer_ids):
    _, model = target
    with pytest.raises(ValueError, match=r"layer_ids=\[.*1 to 3 with this target, ascending"):
        model.tapped(layer_ids)


@pytest.mark.parametrize("layer_ids", [(0, 2), (2, 4)])
def test_a_head_of_such_layers_does_not_fit(target, layer_ids):
    _, model = target
    spec = dataclasses.replace(BASE, layer_ids=layer_ids)
    with pytest.raises(ValueError, match=r"head layer_ids=\[.*1 to 3 with this target"):
        build_head(spec, random_tensors(spec), model)


def random_tensors(spec: HeadSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in spec.tensor_shapes().items():
        if name == "draft_vocab_ids":
            tensors[name] = DRAFT_IDS
        elif "norm" in name:
            tensors[name] = 0.5 + torch.rand(shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * 0.3
    return tensors


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_chained_steps_equal_the_reference(variant, target):
    hf, model = target
    spec = dataclasses.replace(BASE, **VARIANTS[variant])
    tensors = random_tensors(spec)
    head = build_head(spec, tensors, model)
    reference = StepwiseHead(spec, tensors, hf.model.embed_tokens.weight.detach())
    ids, cache = random_ids(24, seed=1), {}
    rows = torch.randn(20, head.row_width, generator=torch.Generator().manual_seed(2))
    wanted = [
        reference.row(rows[i, WIDTH:], ids[i], i, cache) for i in range(20)
    ]  # ids are already shifted
    table = make_table()
    row, pool = table.acquire_row(), head.new_pool(4096)
    outputs = []
    for start, stop in ((0, 13), (13, 20)):
        batch = make_batch(table, [row], [ids[start:stop]], [start], hidden_ND=rows[start:stop])
        outputs.append(head.forward(batch, table, pool).clone())
    got = torch.cat(outputs)

    def compare(got, wanted):
        normed = torch.stack([final for final, _ in wanted])
        assert relative_error(got, torch.stack([recycled for _, recycled in wanted])) < 1e-4
        assert relative_error(head.state_for_logits(got), normed) < 1e-4
        assert relative_error(head.logits(got), normed @ tensors["lm_head.weight"].t()) < 1e-4

    compare(got, wanted)
    recycled, wanted_state = got[-1:], wanted[-1][1]
    for step in range(20, 24):
        expected = reference.row(wanted_state, ids[step], step, cache, is_recycled=True)
        batch = make_batch(
            table, [row], [[ids[step]]], [step], mode=BatchMode.DECODE, hidden_ND=recycled
        )
        recycled, wanted_state = head.forward(batch, table, pool).clone(), expected[1]
        compare(recycled, [expected])


def test_each_choice_of_the_spec_changes_the_result():
    tensors = random_tensors(dataclasses.replace(BASE, fusion_norm="each"))
    tensors["input_norm.weight"] = torch.rand(2 * WIDTH) + 0.5
    embedding, streams = torch.randn(VOCAB, WIDTH), torch.randn(2 * WIDTH)
    results = []
    for name in ("published", "normed_residual", "norm_output", "fc_norm", "norm_before_fc"):
        spec = dataclasses.replace(BASE, **VARIANTS[name])
        state, recycled = StepwiseHead(spec, tensors, embedding).row(streams, 5, 0, {})
        results.append(torch.cat((state, recycled)))
    for index, one in enumerate(results):
        for other in results[index + 1 :]:
            assert relative_error(one, other) > 0.01


def test_the_inputs_are_left_as_they_were(target):
    _, model = target
    for residual in ("standard", "normed"):
        spec = dataclasses.replace(BASE, residual=residual)
        head = build_head(spec, random_tensors(spec), model)
        table = make_table()
        for width in (head.row_width, head.width):
            hidden = torch.randn(4, width)
            rows = [table.acquire_row()]
            batch = make_batch(table, rows, [[1, 2, 3, 4]], [0], hidden_ND=hidden)
            before = hidden.clone(), model.embedding_VD.clone()
            head.forward(batch, table, head.new_pool(4096))
            assert torch.equal(hidden, before[0])
            assert torch.equal(model.embedding_VD, before[1])


def test_rows_without_the_streams_are_refused(target):
    _, model = target
    head = build_head(BASE, random_tensors(BASE), model)
    table = make_table()
    hidden = torch.randn(2, 2 * WIDTH)
    batch = make_batch(table, [table.acquire_row()], [[1, 2]], [0], hidden_ND=hidden)
    with pytest.raises(AssertionError, match=r"rows of 64 columns: .*layer_ids=\(1, 3\) gives 96"):
        head.forward(batch, table, head.new_pool(4096))


@pytest.mark.parametrize("field", EAGLE3_FIELDS)
def test_eagle3_is_eagle3_as_published(field):
    mtp = {f.name: f.default for f in dataclasses.fields(HeadSpec)}
    others = {"position_offset": 1, "concat": "hidden_embedding", "num_layers": 2}
    others |= {"logits_from": "pre_norm", "projection_bias": True, "norm_form": "1+w"}
    others |= {"layer_parts": LayerParts(qk_norm=True)}
    other = others.get(field, mtp[field])
    with pytest.raises(ValueError, match=rf"head {field}=.*kind=eagle3 is the head of EAGLE-3"):
        dataclasses.replace(BASE, **{field: other})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 32}, r"target_hidden_size=32: must be above hidden_size=32"),
        ({"target_hidden_size": 16}, r"target_hidden_size=16: must be above hidden_size=32"),
        ({"target_hidden_size": 64}, r"embedding='target': the target's is 64 wide"),
    ],
)
def test_a_narrower_head_says_so_and_has_its_own_embedding(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **changes)


def test_a_narrow_head_of_another_target_does_not_fit(target):
    _, model = target
    spec = dataclasses.replace(BASE, **NARROW | {"target_hidden_size": 48})
    with pytest.raises(ValueError, match="head target_hidden_size=48: the target has 32"):
        build_head(spec, random_tensors(spec), model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_ids", (1,)),
        ("fusion_norm", "each"),
        ("residual", "normed"),
        ("lm_head", "own"),
        ("target_hidden_size", 64),
        ("embedding", "own"),
    ],
)
def test_other_heads_have_none_of_it(field, value):
    mtp = {f.name: f.default for f in dataclasses.fields(HeadSpec)}
    plain = {name: mtp[name] for name in (*EAGLE3_FIELDS, "layer_ids", "recycle")}
    spec = dataclasses.replace(BASE, **{"kind": "mtp", **plain})
    with pytest.raises(ValueError, match=rf"head {field}=.*: only kind=eagle3"):
        dataclasses.replace(spec, **{field: value})


def test_the_contract_survives_its_json():
    for variant in VARIANTS.values():
        spec = dataclasses.replace(BASE, **variant)
        assert HeadSpec.from_json(spec.to_json()) == spec
    with pytest.raises(ValueError, match=r"layer_ids='1': expected a list"):
        HeadSpec.from_json(BASE.to_json().replace(_array(IDS), '"1"'))
    with pytest.raises(ValueError, match=r"layer_ids\[1\]='x': expected int"):
        HeadSpec.from_json(BASE.to_json().replace(_array(IDS), '[1, "x"]'))


def _array(values: tuple[int, ...]) -> str:
    lines = ",\n".join(f"    {value}" for value in values)
    return f"[\n{lines}\n  ]"
