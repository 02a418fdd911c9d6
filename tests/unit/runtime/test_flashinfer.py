"""The FlashInfer backend against SDPA and slow loops, through an emulator of the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.attention.flashinfer import FlashInferBackend
from runtime.attention.flashinfer_tree import pack_mask
from runtime.attention.flashinfer_wrappers import HeadShape
from runtime.attention.flashinfer_xqa import causal_block_mask
from runtime.attention.paged import pad_layout, page_layout
from runtime.batch import BatchMode
from runtime.models.loader import load_target
from runtime.no_wait import no_wait
from tests.unit.runtime.engine_fixtures import (
    VOCAB,
    check_draft_state,
    make_engine,
    make_requests,
    random_head,
    run_stepwise,
    tiny_target,
)
from tests.unit.runtime.flashinfer_cases import (
    CASES,
    Stage,
    decode_steps,
    make_backend,
    verify_steps,
)
from tests.unit.runtime.flashinfer_emulator import EmulatedStream
from tests.unit.runtime.flashinfer_signatures import (
    installed_version,
    read_installed,
    recorded,
    recorded_versions,
)
from tests.unit.runtime.model_fixtures import make_table, save_llama

NEWEST = recorded_versions()[-1]


def test_the_recorded_signatures_are_those_of_the_installed_package() -> None:
    installed = installed_version()
    if installed is None:
        pytest.skip("flashinfer-python is not installed: only the recording is used")
    assert installed in recorded_versions(), "record it: see flashinfer_signatures.py"
    assert read_installed() == recorded(installed)


@pytest.mark.parametrize("version", recorded_versions())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_equals_the_reference(case: Callable[[FlashInferBackend], float], version: str) -> None:
    assert case(make_backend(version)) < 1e-5


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_either_kernel_for_several_rows(kernel: str) -> None:
    assert verify_steps(make_backend(NEWEST, auto="fa2", kernel=kernel)) < 1e-5


@pytest.mark.parametrize("case", [decode_steps, verify_steps], ids=lambda case: case.__name__)
def test_xqa_needs_no_plan(case: Callable[[FlashInferBackend], float]) -> None:
    stream = EmulatedStream()
    assert case(make_backend(NEWEST, stream=stream, use_xqa=True)) < 1e-5
    assert not stream.in_flight, "a wrapper was planned"


def test_planning_never_waits_for_the_device() -> None:
    stage = Stage()
    backend = make_backend(NEWEST)
    visible = torch.ones(5, 3, 3, dtype=torch.bool).tril()
    for tree in (None, visible):
        batch = stage.batch([3] * 5, [20] * 5, BatchMode.VERIFY)
        batch = type(batch)(**{**vars(batch), "visible_BSJ": tree})
        q, k, v = stage.draw(15)
        with no_wait():
            backend.plan(batch, stage.table)
            if tree is not None:
                pack_mask(tree)
        backend.run(backend.plan(batch, stage.table), stage.pools[0], 0, q, k, v)


def test_one_plan_serves_models_of_one_shape_one_after_the_other() -> None:
    stream = EmulatedStream()
    backend = make_backend(NEWEST, stream=stream)
    stage = Stage()
    plan = backend.plan(stage.batch([3] * 5, [20] * 5, BatchMode.VERIFY), stage.table)
    for layer in (0, 1, 0):
        backend.run(plan, stage.pools[0], layer, *stage.draw(15))
    assert len(plan.wrappers) == 1
    later = backend.plan(stage.batch([3] * 5, [20] * 5, BatchMode.VERIFY), stage.table)
    stream.in_flight.clear()
    backend.run(later, stage.pools[0], 0, *stage.draw(15))
    with pytest.raises(AssertionError, match="planned for other rows"):
        backend.run(plan, stage.pools[0], 0, *stage.draw(15))


def test_plans_made_before_the_device_has_begun_use_one_wrapper_each() -> None:
    stream = EmulatedStream()
    stream.runs_by_itself = False
    backend = make_backend(NEWEST, stream=stream)
    stage = Stage()
    for step in range(20):  # more than there are wrappers: then it has to wait
        starts = [start + step for start in (3, 80, 41, 16, 15)]
        assert stage.compare(backend, stage.batch([1] * 5, starts, BatchMode.DECODE)) < 1e-5


def test_masks_are_packed_by_request_lowest_bit_first() -> None:
    visible = torch.zeros(2, 3, 3, dtype=torch.bool)
    visible[0, 0, 0] = visible[0, 2, 2] = visible[1, 1, 0] = True
    assert pack_mask(visible).tolist() == [[1, 1], [8, 0]]
    assert causal_block_mask(1, 3).tolist() == [[[1, 0], [3, 0], [7, 0]]]
    assert causal_block_mask(1, 18)[0, 17].tolist() == [0xFFFF, 3]


def test_page_layouts() -> None:
    table = make_table(page_size=4)
    rows = [table.acquire_row(), table.acquire_row()]
    table.reserve(rows[0], 9)
    table.reserve(rows[1], 4)
    layout = page_layout(table, table_rows=rows, q_lens=[2, 1], kv_lens=[9, 4])
    first, second = (int(table.slots(row, 0, 1)) // 4 for row in rows)
    assert layout.qo_indptr_B1.tolist() == [0, 2, 3]
    assert layout.kv_indptr_B1.tolist() == [0, 3, 4]
    assert layout.page_ids_P.tolist() == [first, first + 1, first + 2, second]
    assert layout.last_page_lens_B.tolist() == [1, 4]
    assert layout.kv_lens_B.tolist() == [9, 4]
    padded = pad_layout(layout, 4, q_len=5, page=99)
    assert padded.qo_indptr_B1.tolist() == [0, 2, 3, 8, 13]
    assert padded.kv_lens_B.tolist() == [9, 4, 5, 5]
    assert padded.page_ids_P.tolist()[4:] == [99] * 4
    with pytest.raises(AssertionError, match="do not fit"):
        pad_layout(layout, 1, q_len=1, page=0)


def test_few_query_heads_per_key_head_decode_without_tensor_cores() -> None:
    def shape(heads: int) -> HeadShape:
        return HeadShape(heads, 2, 64, torch.bfloat16)

    assert [shape(n).uses_tensor_cores for n in (2, 6, 8, 14)] == [False, False, True, True]


@pytest.mark.parametrize("use_xqa", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_an_engine_makes_the_same_tokens(tmp_path: Path, k: int, use_xqa: bool) -> None:
    save_llama(tmp_path, vocab_size=VOCAB)
    outputs = []
    for backend in (None, make_backend(NEWEST, use_xqa=use_xqa)):
        target = load_target(
            tmp_path,
            dtype=torch.float32,
            device=torch.device("cpu"),
            backend=backend,
            use_kernels=False,
        )
        draft = random_head(target) if k else None
        engine = make_engine(target, draft, num_draft_tokens=k)
        after = check_draft_state if k else None
        outputs.append(
            run_stepwise(engine, make_requests(temperature=0.8), late=True, after_step=after)
        )
    assert outputs[0] == outputs[1]


def test_a_preempted_request_comes_back_to_other_pages(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    plain = make_engine(target, num_pages=64)
    wanted = run_stepwise(plain, make_requests())
    target.model.backend = make_backend(NEWEST)
    engine = make_engine(target, num_pages=6, max_model_len=96)
    assert run_stepwise(engine, make_requests()) == wanted
    assert engine.scheduler.num_preemptions > 0
