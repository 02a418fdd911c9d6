"""What ranks send to each other during the micro-batches of one step."""

from __future__ import annotations

import pytest

from tests.distributed.trainer_worker import Job, run_jobs
from tests.unit.trainer.reference import random_head, tiny_spec

MICRO_BATCHES = 3
CASES = ((0, "float32"), (1, "float32"), (1, "bfloat16"), (2, "float32"), (3, "float32"))


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    """Bytes per step as :func:`tests.distributed.trainer_worker.meter_traffic` lists them."""
    root = tmp_path_factory.mktemp("traffic")
    settings = {"gradient_accumulation": MICRO_BATCHES, "max_steps": 4}
    jobs = [
        Job(
            str(root),
            f"stage{stage}-{dtype}",
            dtype=dtype,
            zero_stage=stage,
            meters_traffic=True,
            trainer=settings,
        )
        for stage, dtype in CASES
    ]
    outcomes = run_jobs(jobs, world_size=2, scratch=root / "scratch")
    for outcome in outcomes:
        assert "error" not in outcome, outcome.get("trace")
    return dict(zip(CASES, (outcome["traffic"] for outcome in outcomes), strict=True))


@pytest.fixture(scope="module")
def gradient_bytes():
    return 4 * sum(parameter.numel() for parameter in random_head(tiny_spec()).parameters())


@pytest.mark.parametrize("case", CASES[:3])
def test_no_rank_sends_anything_between_the_micro_batches_of_a_step(traffic, gradient_bytes, case):
    for _, *between, last in traffic[case]:
        assert between == [0] * (MICRO_BATCHES - 1)
        assert last >= gradient_bytes  # sent once, in fp32: the meter sees it


@pytest.mark.parametrize("case", CASES[3:])
def test_stages_that_share_out_gradients_send_them_with_every_micro_batch(
    traffic, gradient_bytes, case
):
    for _, *between, last in traffic[case]:
        assert len(between) == MICRO_BATCHES - 1
        assert all(num_bytes >= gradient_bytes for num_bytes in (*between, last))
