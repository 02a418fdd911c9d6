"""Two forked ranks, each with a part of ``lm_head``, against one that has it whole; exits 0 when
every loss and gradient is the same.
"""

from __future__ import annotations

import torch

from mtp_train.config import LossConfig
from mtp_train.distributed import init_process_group
from mtp_train.losses import (
    ChunkSizes,
    distribution_loss_sum,
    head_loss,
    row_formula,
    target_log_normaliser,
)
from mtp_train.packing import pack
from tests.distributed.ranks import run_ranks
from tests.unit.trainer.loss_reference import KINDS
from tests.unit.trainer.reference import random_embedding, random_sample, tiny_spec

WORLD_SIZE = 2
A, D, V, CUT = 21, 24, 211, 90  # unequal shards


def exercise(rank: int) -> None:
    torch.set_num_threads(1)
    group = init_process_group(device="cpu", timeout_s=60)
    torch.manual_seed(0)
    target, lm_head, weight = torch.randn(A, D), torch.randn(V, D), torch.rand(A) + 0.5
    state = (target + 0.5 * torch.randn(A, D)).requires_grad_()
    own = lm_head[:CUT] if rank == 0 else lm_head[CUT:]
    lse = target_log_normaliser(target, lm_head, row_chunk=8)
    for kind in KINDS:
        formula = row_formula(LossConfig(kind=kind))
        whole = distribution_loss_sum(
            state, target, weight, lm_head, formula=formula, chunks=ChunkSizes(8)
        )
        (expected,) = torch.autograd.grad(whole, state)
        for columns, known in ((0, None), (40, lse)):
            loss = distribution_loss_sum(
                state,
                target,
                weight,
                own,
                formula=formula,
                chunks=ChunkSizes(8, columns),
                target_lse_A=known,
                group=group,
            )
            (grad,) = torch.autograd.grad(loss, state)
            torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
            both = group.all_gather(grad)
            assert torch.equal(both[0], both[1]), "gradients of the ranks"
    check_coupled(rank, group)
    group.close()


def check_coupled(rank, group) -> None:
    """The same through the objective, steps multiplied together."""
    spec = tiny_spec()
    batch = pack([random_sample(spec, 13, seed=s) for s in (1, 2)], num_steps=3)
    states = [
        torch.randn(step.rows_N.numel(), spec.hidden_size, requires_grad=True)
        for step in batch.steps
    ]
    lm_head = random_embedding(spec) * 0.2
    own = lm_head[:20] if rank == 0 else lm_head[20:]
    config = LossConfig(kind="expected_length", num_unroll_steps=3)
    whole = head_loss(states, batch, lm_head, config=config)
    shared = head_loss(states, batch, own, config=config, group=group)
    torch.testing.assert_close(shared.total, whole.total)
    expected = torch.autograd.grad(whole.total, states)
    for grad, reference in zip(torch.autograd.grad(shared.total, states), expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    run_ranks(exercise, WORLD_SIZE)
