"""The head of Medusa: K drafts from one state of the target, without a cache of its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.batch import BatchMode, ForwardBatch
from runtime.head_spec import (
    MEDUSA_FIELDS,
    DraftVocab,
    HeadSpec,
    hash_vocab_ids,
    load_head,
    save_head,
)
from runtime.kv_cache import SlotTable
from runtime.layer_parts import LayerParts
from runtime.models.heads import build_head
from runtime.models.heads.medusa import MedusaHead
from runtime.models.loader import Target
from tests.unit.runtime.engine_fixtures import (
    MEDUSA,
    VOCAB,
    head_spec,
    make_engine,
    make_requests,
    random_head,
    random_head_tensors,
    tiny_target,
)

DRAFT_IDS = torch.tensor([1, 4, 7, 10])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("model") / "target")


def reference_block(
    tensors: dict[str, torch.Tensor], index: int, g_D: torch.Tensor
) -> torch.Tensor:
    """Element by element, from the formula."""
    weight = tensors[f"blocks.{index}.layers.0.weight"]
    bias = tensors.get(f"blocks.{index}.layers.0.bias", torch.zeros(len(g_D)))
    out = torch.empty_like(g_D)
    for row in range(len(g_D)):
        z = sum(float(w) * float(x) for w, x in zip(weight[row], g_D, strict=True))
        z += float(bias[row])
        out[row] = float(g_D[row]) + z / (1 + 2.718281828459045 ** (-z))
    return out


def batch_of(hidden_ND: torch.Tensor, ids: list[int]) -> ForwardBatch:
    count = len(ids)
    return ForwardBatch(
        mode=BatchMode.PREFILL,
        input_ids_N=torch.tensor(ids),
        positions_N=torch.arange(count),
        write_slots_N=torch.arange(count),
        q_lens=(count,),
        kv_lens=(count,),
        table_rows=(0,),
        hidden_ND=hidden_ND,
    )


def run(head: MedusaHead, hidden_ND: torch.Tensor, ids: list[int]) -> torch.Tensor:
    table = SlotTable(num_rows=1, max_len=64, page_size=16, num_pages=4)
    return head.forward(batch_of(hidden_ND, ids), table, head.new_pool(64))


@pytest.mark.parametrize("lm_head", ["target", "own"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_block_k_drafts_from_the_state_alone(target: Target, has_bias: bool, lm_head: str) -> None:
    spec = head_spec(target, **MEDUSA | {"projection_bias": has_bias, "lm_head": lm_head})
    tensors = random_head_tensors(spec)
    head = build_head(spec, tensors, target.model)
    assert isinstance(head, MedusaHead)
    width = spec.hidden_size
    g_ND = torch.randn(5, width, generator=torch.Generator().manual_seed(3))
    before = g_ND.clone()
    state = run(head, g_ND, [1, 2, 3, 4, 5])
    assert torch.equal(g_ND, before)
    for index in range(spec.num_blocks):
        wanted = torch.stack([reference_block(tensors, index, g) for g in g_ND])
        torch.testing.assert_close(head.state_for_logits(state), wanted, rtol=1e-4, atol=1e-4)
        logits = target.model.logits(wanted)
        if lm_head == "own":
            logits = wanted @ tensors[f"lm_heads.{index}.weight"].t()
        torch.testing.assert_close(head.logits(state), logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(head.best_columns(state, 1)[:, 0], logits.argmax(-1))
        if index + 1 < spec.num_blocks:
            other = run(head, state, [9, 8, 7, 6, 5])
            assert torch.equal(other, run(head, state, [0, 0, 0, 0, 0]))  # ids do not matter
            state = other
    pool = head.new_pool(64)
    assert pool.num_bytes() == 0


def test_blocks_of_zeros_draft_what_the_target_says_itself(target: Target) -> None:
    spec = head_spec(target, **MEDUSA)
    zeros = {name: torch.zeros(shape) for name, shape in spec.tensor_shapes().items()}
    head = build_head(spec, zeros, target.model)
    g_ND = torch.randn(4, spec.hidden_size)
    state = run(head, g_ND, [1, 1, 1, 1])
    for _ in range(spec.num_blocks - 1):
        assert torch.equal(head.logits(state), target.model.logits(g_ND))
        state = run(head, state, [1, 1, 1, 1])
    assert torch.equal(head.logits(state), target.model.logits(g_ND))


@pytest.mark.parametrize(
    "changes", [{}, {"num_blocks": 1, "projection_bias": False}, {"lm_head": "own"}]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"draft_mode": "sampled", "verify": "rejection"},
        {"schedule": "fixed_tree", "tree_nodes": 5},
        {"draft_length": "measured"},
    ],
    ids=["chain", "sampled", "tree", "measured"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_that_of_plain_decoding(
    target: Target, changes: dict[str, Any], settings: dict[str, Any], temperature: float
) -> None:
    head = random_head(target, **MEDUSA | changes)
    k = changes.get("num_blocks", 3)
    engine = make_engine(target, head, num_draft_tokens=k, **settings)
    requests = make_requests(ignore_eos=True, max_tokens=24, temperature=temperature)
    got = engine.generate(requests)
    assert any(step.num_accepted for one in got for step in one.steps)
    if temperature and settings.get("verify") == "rejection":
        return  # another random draw, of the same distribution
    plain = make_engine(target).generate(requests)
    assert [one.output_ids for one in got] == [one.output_ids for one in plain]


@pytest.mark.parametrize("lm_head", ["target", "own"])
def test_drafts_are_those_of_the_blocks_over_the_last_state(target: Target, lm_head: str) -> None:
    """Every drafted token from scratch: block k over g of the row before the last token."""
    spec = head_spec(target, **MEDUSA, lm_head=lm_head)
    head = build_head(spec, random_head_tensors(spec), target.model)
    requests = make_requests(4, ignore_eos=True, max_tokens=15)
    checked = 0
    for request in requests:  # alone, so that every step behind the prompt's drafts
        (one,) = make_engine(target, head, num_draft_tokens=3).generate([request])
        tokens, length = [*one.prompt_ids, *one.output_ids], len(one.prompt_ids)
        (rows,) = make_engine(target).forward_hidden([tokens])
        emitted = length + 1  # the prompt's own step emits one
        for step in one.steps:
            state = run(head, rows.hidden_TD[emitted - 2 : emitted - 1].clone(), [0])
            drafts = []
            for number in range(len(step.draft_ids)):
                if number:
                    state = run(head, state, [0])
                drafts.append(int(head.logits(state).argmax()))
            assert list(step.draft_ids) == drafts
            emitted += step.num_accepted + 1
            checked += 1
    assert checked > 10


def test_more_tokens_than_blocks_are_refused(target: Target) -> None:
    head = random_head(target, **MEDUSA)
    with pytest.raises(ValueError, match=r"num_draft_tokens=4: this head drafts 3 tokens at most"):
        make_engine(target, head, num_draft_tokens=4)


def test_a_reduced_vocabulary_drafts_its_ids_only(target: Target) -> None:
    vocab = DraftVocab(len(DRAFT_IDS), 0.5, hash_vocab_ids(DRAFT_IDS))
    spec = head_spec(target, **MEDUSA, draft_vocab=vocab)
    tensors = random_head_tensors(spec) | {"draft_vocab_ids": DRAFT_IDS}
    head = build_head(spec, tensors, target.model)
    requests = make_requests(3, ignore_eos=True)
    got = make_engine(target, head, num_draft_tokens=3).generate(requests)
    drafted = {token for one in got for step in one.steps for token in step.draft_ids}
    assert drafted
    assert drafted <= set(DRAFT_IDS.tolist())
    plain = make_engine(target).generate(requests)
    assert [one.output_ids for one in got] == [one.output_ids for one in plain]


@pytest.mark.parametrize("field", MEDUSA_FIELDS)
def test_medusa_is_medusa_as_published(target: Target, field: str) -> None:
    mtp = {f.name: f.default for f in dataclasses.fields(HeadSpec)}
    others = {"position_offset": 1, "concat": "hidden_embedding", "norm_form": "1+w"}
    others |= {"layer_parts": LayerParts(qkv_bias=True)}
    other = others.get(field, mtp[field])
    with pytest.raises(ValueError, match=rf"head {field}=.*kind=medusa is Medusa-1 as published"):
        head_spec(target, **MEDUSA | {field: other})


def test_blocks_belong_to_medusa_and_medusa_has_some(target: Target) -> None:
    with pytest.raises(ValueError, match=r"head num_blocks=3: only kind=medusa has that"):
        head_spec(target, num_blocks=3)
    with pytest.raises(ValueError, match=r"head num_blocks=0: kind=medusa has one block per"):
        head_spec(target, **MEDUSA | {"num_blocks": 0})
    with pytest.raises(ValueError, match=r"head lm_head='own': only kind=eagle3 and kind=medusa"):
        head_spec(target, lm_head="own")
    with pytest.raises(ValueError, match=r"head num_layers=0: must be 1 or 2"):
        head_spec(target, num_layers=0)


def test_the_directory_is_strict_and_older_heads_have_no_blocks(
    target: Target, tmp_path: Path
) -> None:
    spec = head_spec(target, **MEDUSA)
    tensors = random_head_tensors(spec)
    assert list(tensors) == [
        f"blocks.{index}.layers.0.{name}" for index in range(3) for name in ("weight", "bias")
    ]
    save_head(tmp_path / "head", spec, tensors)
    found, loaded = load_head(tmp_path / "head")
    assert found == spec
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    for name in tensors:
        with pytest.raises(ValueError, match=rf"tensor {name} .* is missing"):
            save_head(tmp_path / "less", spec, {n: t for n, t in tensors.items() if n != name})
    own = head_spec(target, **MEDUSA, lm_head="own").tensor_shapes()
    assert [name for name in own if name not in tensors] == [
        f"lm_heads.{index}.weight" for index in range(3)
    ]
    more = tensors | {"blocks.3.layers.0.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"unexpected tensor blocks\.3\.layers\.0\.weight"):
        save_head(tmp_path / "more", spec, more)
    raw = json.loads(head_spec(target).to_json())
    del raw["num_blocks"]
    assert HeadSpec.from_json(json.dumps(raw | {"version": 3})) == head_spec(target)
    assert max(DRAFT_IDS) < VOCAB
