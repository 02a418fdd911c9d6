"""Two forked ranks that exercise every collective of a process group; exits 0 when all hold."""

from __future__ import annotations

import torch

from mtp_train.distributed import TorchProcessGroup, init_process_group, run_on_leader
from runtime.parallel import ProcessGroup, RunningSum
from tests.distributed.ranks import run_ranks

WORLD_SIZE = 2


def exercise(rank: int) -> None:
    group = init_process_group(device="cpu", timeout_s=60)
    assert isinstance(group, TorchProcessGroup)
    assert (group.rank, group.world_size, group.local_world_size) == (rank, 2, 2)
    assert group.is_leader == (rank == 0)
    group.barrier()
    assert group.broadcast_object({"rank": rank}) == {"rank": 0}
    assert group.broadcast_object(rank, source=1) == 1
    assert group.gather_objects(["of", rank]) == [["of", 0], ["of", 1]]
    assert group.broadcast(torch.full((3,), float(rank)), source=1).tolist() == [1.0, 1.0, 1.0]
    assert group.all_reduce(torch.tensor([1.0, rank])).tolist() == [2.0, 1.0]
    assert group.all_reduce_ints([rank, 5, 2**40]) == [1, 10, 2**41]
    assert group.all_reduce_ints([rank, -rank], op="max") == [1, 0]
    assert group.all_reduce_ints([rank, -rank], op="min") == [0, -1]
    assert group.broadcast_host(torch.tensor([rank, 7]), source=1).tolist() == [1, 7]
    gathered = group.all_gather(torch.tensor([[rank, 2], [3, rank]]))
    assert gathered.tolist() == [[[0, 2], [3, 0]], [[1, 2], [3, 1]]]
    pair = group.split(2)
    assert (pair.tensor.world_size, pair.tensor.rank, pair.data.world_size) == (2, rank, 1)
    assert pair.tensor.all_reduce(torch.tensor([1, rank])).tolist() == [2, 1]
    check_started_sums(group, pair.tensor)
    apart = group.split(1)
    assert (apart.tensor.world_size, apart.data.world_size, apart.data.rank) == (1, 2, rank)
    assert apart.tensor.all_gather(torch.tensor([rank])).tolist() == [[rank]]
    assert apart.data.gather_objects(rank) == [0, 1]
    assert run_on_leader(group, lambda: f"from {rank}") == "from 0"

    def refuse() -> None:
        raise ValueError(f"refused by {rank}")

    try:
        run_on_leader(group, refuse)
    except ValueError as error:
        assert str(error) == "refused by 0"  # noqa: PT017
    else:
        raise AssertionError("the leader's error did not reach this rank")
    group.close()


def check_started_sums(group: TorchProcessGroup, messages: ProcessGroup) -> None:
    """Rank 0 goes on while its sum is on the way; rank 1 starts when it has heard of that."""
    if group.rank:
        messages.broadcast(torch.zeros(1))
    first = group.start_all_reduce(torch.tensor([1.0, group.rank]))
    if not group.rank:
        assert isinstance(first, RunningSum)
        assert not first.work.is_completed()
        messages.broadcast(torch.zeros(1))
    second = group.start_all_reduce(torch.tensor([5 + group.rank]))
    assert first.wait().tolist() == [2.0, 1.0]
    assert second.wait().tolist() == [11]


if __name__ == "__main__":
    run_ranks(exercise, WORLD_SIZE)
