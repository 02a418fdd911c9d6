"""The table of ZeRO's states against the tensors that DeepSpeed really keeps."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mtp_train.plan.zero_states import BUCKET_ELEMENTS, Offload, head_states

# Living bytes after the second backward, in a process of its own, head and batch left out.
WORKER = """
import gc, json, sys, torch
from mtp_train.config import DeepSpeedConfig, TrainerConfig
from mtp_train.distributed import init_process_group
from mtp_train.heads import build_training_head
from mtp_train.packing import pack
from mtp_train.zero import HeadEngine, ensure_process_group
from tests.unit.trainer.reference import TinySample, tiny_spec

torch.set_num_threads(1)
stage, dtype, offload = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3]
group = init_process_group(device="cpu")
ensure_process_group(group)

def live():
    gc.collect()
    found = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            storage = item.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())

before = live()
head = build_training_head(tiny_spec(hidden_size=128, intermediate_size=256), dtype=dtype)
count = sum(p.numel() for p in head.parameters())
engine = HeadEngine(
    head,
    config=TrainerConfig(optimizer=sys.argv[4]),
    sharding=DeepSpeedConfig(zero_stage=stage, offload=offload),
    dtype=dtype,
    group=group,
)
sample = TinySample(
    torch.arange(8), torch.ones(8, dtype=torch.bool), torch.randn(8, 128)
)
for number in range(2):
    batch = pack([sample]).to(torch.device("cpu"), dtype)
    states = engine(batch, torch.ones(61, 128, dtype=dtype))
    engine.backward(states[0].float().square().sum())
    del states, batch
    if number == 0:
        engine.step(learning_rate=1e-3, is_finite=True)
print(json.dumps([count, live() - before]))
"""


def _measure(stage: int, dtype: str, offload: str, optimizer: str = "adamw") -> tuple[int, int]:
    """Weights of the head and living bytes of its states."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WORKER, str(stage), dtype, offload, optimizer],
        capture_output=True,
        text=True,
        check=True,
    )
    count, measured = json.loads(done.stdout.splitlines()[-1])
    return int(count), int(measured)


@pytest.mark.slow
def test_muon_keeps_one_moment() -> None:
    count, measured = _measure(1, "bfloat16", "none", "muon")
    states = head_states(count, zero_stage=1, ranks=1, width=2, is_cpu=False, optimizer="muon")
    assert 0.95 * states.total <= measured <= 1.05 * states.total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")],
)
def test_states_are_those_that_deepspeed_keeps(stage: int, dtype: str) -> None:
    count, measured = _measure(stage, dtype, "none")
    width = 4 if dtype == "float32" else 2
    states = head_states(count, zero_stage=stage, ranks=1, width=width, is_cpu=False)
    # Between steps the bucket of stage 2 and stage 3's gathered copy are gone, and gradients in
    # bf16 may be: they pass.
    gone = {0: 0.0, 1: 0.0, 2: states.bucket, 3: 2.0 * count}[stage]
    passing = 2.0 * count if stage > 1 else 0.0
    assert 0.95 * (states.total - gone - passing) <= measured <= 1.05 * (states.total - gone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "offload"), [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "all")]
)
def test_offloaded_states_are_those_that_deepspeed_keeps(stage: int, offload: Offload) -> None:
    count, measured = _measure(stage, "bfloat16", offload)
    states = head_states(count, zero_stage=stage, ranks=1, width=2, is_cpu=False, offload=offload)
    # Between steps bf16 gradients and stage 3's gathered copy are gone; stages 1 and 2 have no
    # bucket then, but staging buffers of the largest weight, a quarter of this tiny head.
    kept = states.offloaded + (states.weights + states.bucket if stage == 3 else 2.0 * count)
    passing = 2.0 * count if stage == 3 else 0.0
    staging = 3.0 * count if stage < 3 else 0.0
    assert 0.95 * (kept - passing) <= measured <= 1.05 * (kept + staging)
    if stage == 3:  # the bucket would hide the rest
        assert measured - states.bucket == pytest.approx(kept - passing - states.bucket, rel=0.05)


def test_what_is_offloaded_is_not_on_the_device() -> None:
    on_device, partly, wholly = (
        head_states(10**9, zero_stage=3, ranks=8, width=2, is_cpu=False, offload=offload)
        for offload in ("none", "optimizer", "all")
    )
    assert on_device.offloaded == 0
    assert partly.offloaded == 20e9 / 8
    assert wholly.offloaded == 22e9 / 8
    assert on_device.weights == partly.weights == 2e9 + 2e9 / 8
    assert wholly.weights == 2e9
    assert on_device.total - partly.total == pytest.approx(16e9 / 8)
    assert partly.total - wholly.total == pytest.approx(2e9 / 8)


def test_only_what_a_stage_shares_out_shrinks_with_the_ranks() -> None:
    one, eight = (
        [head_states(10**9, zero_stage=s, ranks=n, width=2, is_cpu=False) for s in (1, 2, 3)]
        for n in (1, 8)
    )
    for alone, shared in zip(one, eight, strict=True):
        assert (shared.master, shared.moments) == (alone.master / 8, alone.moments / 8)
    assert [s.weights for s in eight] == [2e9, 2e9, 2e9 + 2e9 / 8]
    assert eight[0].gradients == 6e9
    assert eight[1].gradients == 2e9 + 4e9 / 8
    assert eight[2].bucket == 4 * BUCKET_ELEMENTS
