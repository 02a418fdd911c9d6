"""Shares of a batch: together they are the batch, in any rank's view of where rows lie."""

from __future__ import annotations

import pytest
import torch

from mtp_train.packing import idle_batch, pack
from mtp_train.sequence_parallel import check_divides_heads, share_rows
from tests.unit.trainer.reference import medusa, random_sample, tiny_spec


def gathered(parts, layout):
    """What an all-to-all leaves behind: every rank's rows, filled up, one rank behind the other."""
    width = layout.width
    filled = [torch.cat((p, p.new_zeros(width - len(p), *p.shape[1:]))) for p in parts]
    return torch.cat(filled)[layout.places_N]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("every_row", [False, True])
def test_shares_of_all_ranks_are_the_batch(num_ranks, every_row):
    spec = tiny_spec()
    samples = [random_sample(spec, n, seed=n, mask=m) for n, m in ((11, "spans"), (8, "answer"))]
    lse = [torch.randn(len(s.input_ids)) for s in samples]
    whole = pack(samples, num_steps=4, every_row=every_row, target_lse=lse)
    shares = [share_rows(whole, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
    for name in ("hidden_SD", "next_ids_S", "positions_S"):
        parts = [getattr(share, name) for share in shares]
        assert torch.equal(gathered(parts, shares[0].layout), getattr(whole, name))
    for k, step in enumerate(whole.steps):
        own = [share.steps[k] for share in shares]
        layout = own[0].layout
        assert torch.equal(gathered([s.ids_N for s in own], layout), step.ids_N)
        positions = [share.positions_S[s.rows_N] for share, s in zip(shares, own, strict=True)]
        assert torch.equal(gathered(positions, layout), whole.positions_S[step.rows_N])
        assert torch.equal(own[0].plan.rows_N, step.rows_N)
        assert own[0].plan.blocks == step.blocks
        for s in own:
            assert s.layout.num_rows == len(s.rows_N)
        # a row with loss keeps its label, its target and its normaliser
        pairs = {
            (label.item(), target.sum().item(), value.item())
            for s in own
            for label, target, value in zip(s.labels_A, s.target_AD, s.target_lse_A, strict=True)
        }
        assert pairs == {
            (label.item(), target.sum().item(), value.item())
            for label, target, value in zip(
                step.labels_A, step.target_AD, step.target_lse_A, strict=True
            )
        }
        if k:
            for share, s in zip(shares, own, strict=True):
                before = share.steps[k - 1]
                assert torch.equal(before.rows_N[s.parent_N], s.rows_N)


def test_a_batch_of_one_row_leaves_the_other_ranks_without_any():
    shares = [share_rows(idle_batch(8, num_steps=2), rank=r, num_ranks=2) for r in range(2)]
    assert [len(share.hidden_SD) for share in shares] == [1, 0]
    assert all(share.steps[1].layout.width == 1 for share in shares)


def test_heads_that_do_not_divide_are_refused_by_name():
    check_divides_heads(tiny_spec(), 2)
    check_divides_heads(tiny_spec(**medusa()), 3)  # it has none
    with pytest.raises(ValueError, match=r"trainer\.sequence_parallel=4: .*num_kv_heads=2"):
        check_divides_heads(tiny_spec(), 4)
