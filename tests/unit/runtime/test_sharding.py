"""Who gets what: heads, columns and rows, and the step's buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.config import EngineConfig
from runtime.kv_cache import SlotTable
from runtime.parallel import SingleProcessGroup
from runtime.request import Phase, Request, RequestState, SamplingParams
from runtime.scheduler import StepPlan, Work
from runtime.sharding import HeadShare, Shard, even_shard, head_shard, share_heads
from runtime.step_buffer import MessageKind, StepBuffer, TokenWindow


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(4, 2), (9, 3), (8, 8), (6, 1), (10, 5), (3, 3), (32, 8)]
)
def test_every_query_head_is_on_one_rank_beside_its_key_head(
    num_heads: int, num_kv_heads: int, world_size: int
) -> None:
    shares = [
        share_heads(num_heads, num_kv_heads, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert len({(len(share.kv), len(share.query)) for share in shares}) == 1, "shapes differ"
    placed = [head for share in shares for head in share.query if head >= 0]
    assert sorted(placed) == list(range(num_heads))
    for share in shares:
        repeat = len(share.query) // len(share.kv)
        assert repeat * len(share.kv) == len(share.query)
        for index, head in enumerate(share.query):
            if head >= 0:
                assert share.kv[index // repeat] == head // (num_heads // num_kv_heads)


def test_a_rank_never_holds_more_than_its_part_rounded_up() -> None:
    assert share_heads(9, 3, rank=1, world_size=3).query == (3, 4, 5)
    assert share_heads(9, 3, rank=0, world_size=2).kv == (0, -1)
    assert share_heads(9, 3, rank=1, world_size=2).kv == (1, 2)
    assert share_heads(9, 3, rank=3, world_size=4) == HeadShare((-1,), (-1, -1, -1))
    assert [share_heads(8, 2, rank=r, world_size=4).kv for r in range(4)] == [
        (0,),
        (0,),
        (1,),
        (1,),
    ]


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_a_tensor_put_together_are_the_tensor(dim: int) -> None:
    whole = torch.arange(77.0).view(7, 11)
    size = whole.shape[dim]
    parts = [even_shard(dim, size, rank=rank, world_size=4).cut(whole) for rank in range(4)]
    assert len({part.shape for part in parts}) == 1
    joined = torch.cat(parts, dim)
    assert torch.equal(joined.narrow(dim, 0, size), whole)
    assert not joined.narrow(dim, size, joined.shape[dim] - size).any()


def test_a_part_that_is_everything_is_not_copied() -> None:
    whole = torch.ones(4, 6)
    assert even_shard(1, 6, rank=0, world_size=1).cut(whole) is whole
    assert head_shard(1, (0, 1, 2), 2).cut(whole) is whole


def test_zero_heads_are_zeros_between_real_ones() -> None:
    whole = torch.arange(1.0, 7.0)
    shard = head_shard(0, (2, -1, 0), 2)
    assert shard.cut(whole).tolist() == [5.0, 6.0, 0.0, 0.0, 1.0, 2.0]
    zeros = Shard(0, ((-1, 3),)).cut(whole)
    assert zeros.tolist() == [0.0, 0.0, 0.0]


def test_a_single_process_cannot_be_cut() -> None:
    group = SingleProcessGroup(torch.device("cpu"))
    assert group.split(1).tensor is group
    with pytest.raises(ValueError, match=r"1 process\(es\) cannot be cut into groups of 2"):
        group.split(2)


CONFIG = EngineConfig(
    page_size=4, num_pages=32, max_running=4, max_model_len=64, max_batch_tokens=16
)


def make_table(num_pages: int = 32) -> SlotTable:
    return SlotTable(num_rows=4, max_len=64, page_size=4, num_pages=num_pages)


def make_state(table: SlotTable, length: int, *, phase: Phase, **sampling: float) -> RequestState:
    row = table.acquire_row()
    table.reserve(row, length + 1)
    state = RequestState(
        Request(f"r{row}", (1,), SamplingParams(**sampling)),  # type: ignore[arg-type]
        tokens=list(range(100, 100 + length)),
        arrival=row,
        phase=phase,
        row=row,
    )
    state.committed = length - 1
    return state


def test_a_step_survives_its_buffer() -> None:
    table = make_table()
    first = make_state(
        table, 9, phase=Phase.DECODE, temperature=0.7, top_p=0.9, top_k=5, seed=2**62 + 1
    )
    other = make_state(table, 30, phase=Phase.PREFILL, min_p=0.1)
    table.reserve(first.row, 21)  # not one run of pages any more
    plan = StepPlan((Work(first, 8, 1, True), Work(other, 4, 7, False)), False, 3)
    sender, receiver, told = StepBuffer(CONFIG), StepBuffer(CONFIG), make_table()
    sender.pack(plan, table)
    receiver.tensor.copy_(sender.tensor)
    assert receiver.kind is MessageKind.STEP
    read = receiver.unpack(told)
    assert (read.is_decode_only, read.num_draft_tokens) == (False, 3)
    for got, want in zip(read.works, plan.works, strict=True):
        assert (got.start, got.num_rows, got.samples) == (want.start, want.num_rows, want.samples)
        assert got.state.row == want.state.row
        assert got.state.phase is want.state.phase
        assert got.state.request.sampling == want.state.request.sampling
        stop = want.start + want.num_rows + 1
        assert got.state.tokens[want.start : stop] == want.state.tokens[want.start : stop]
        length = len(table.page_ids(want.state.row)) * 4
        assert torch.equal(
            told.slots(got.state.row, 0, length), table.slots(want.state.row, 0, length)
        )
        for rows in range(1, length):
            assert told.contiguous_start(got.state.row, rows) == table.contiguous_start(
                want.state.row, rows
            )


def test_a_row_given_to_another_request_gets_its_pages() -> None:
    told = make_table()
    told.adopt(0, np.array([3, 4, 9]))
    assert told.contiguous_start(0, 8) == 12
    assert told.contiguous_start(0, 9) is None
    told.adopt(0, np.array([7]))
    assert told.slots(0, 0, 4).tolist() == [28, 29, 30, 31]
    assert told.contiguous_start(0, 4) == 28
    assert told.contiguous_start(0, 5) is None


def test_a_step_larger_than_the_buffer_is_refused() -> None:
    table = make_table()
    state = make_state(table, 40, phase=Phase.PREFILL)
    with pytest.raises(ValueError, match=r"at most runtime\.max_batch_tokens=16"):
        StepBuffer(CONFIG).pack(StepPlan((Work(state, 0, 17, False),), False, 0), table)


def test_the_fullest_step_fits_into_the_buffer() -> None:
    table = make_table()
    states = [make_state(table, 31, phase=Phase.PREFILL) for _ in range(4)]
    assert table.allocator.num_free == 0
    plan = StepPlan(tuple(Work(state, 0, 4, False) for state in states), False, 0)
    buffer = StepBuffer(CONFIG)
    buffer.pack(plan, table)
    assert [work.num_rows for work in buffer.unpack(make_table()).works] == [4] * 4


def test_a_window_knows_no_earlier_tokens() -> None:
    window = TokenWindow(5, [50, 51, 52])
    assert window[5] == 50
    assert window[6:9] == [51, 52]
    with pytest.raises(AssertionError, match="before 5"):
        window[4:6]
    with pytest.raises(AssertionError, match="token 8"):
        window[8]
