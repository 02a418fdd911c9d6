"""Dumps that are killed and resumed, on one process and on two (gloo)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_train.features.manifest import load_manifest
from mtp_train.features.reader import FeatureReader
from tests.unit.features.targets import save_target, save_token_set

NUM_SAMPLES = 30
REPOSITORY = Path(__file__).parents[2]

# Where one process dies, and how many whole shards survive on disk (None: it depends on timing).
KILLS: dict[str, tuple[str, int, int | None]] = {
    "while_computing_the_first_shard": ("add", 2, 0),
    "while_computing_a_later_shard": ("add", 17, None),
    "before_the_first_rename": ("staged", 1, 0),
    "before_a_later_rename": ("staged", 3, 2),
    "between_rename_and_record": ("renamed", 2, 2),
    "inside_the_record": ("torn", 2, 2),
    "after_the_record": ("recorded", 3, 3),
    "before_the_final_manifest": ("merging", 1, None),
    "before_the_parts_are_removed": ("merged", 1, None),
}


def step(
    world_size: int, die_at: list[Any] | None = None, *, tensor_parallel: int = 1
) -> dict[str, Any]:
    return {"world_size": world_size, "die_at": die_at, "tensor_parallel": tensor_parallel}


CASES = {
    "plain": [step(1), step(1)],
    "two_ranks": [step(2), step(2)],
    "two_then_one": [step(2, [1, "renamed", 1]), step(1)],
    "one_then_two": [step(1, [0, "staged", 3]), step(2)],
    "spread": [step(4, tensor_parallel=2), step(2, tensor_parallel=2)],
    "spread_then_one": [step(2, [0, "renamed", 2], tensor_parallel=2), step(1)],
    "twice": [step(1, [0, "staged", 2]), step(1, [0, "renamed", 2]), step(1)],
} | {name: [step(1, [0, point, count]), step(1)] for name, (point, count, _) in KILLS.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("dumps")
    save_target(root / "target")
    save_token_set(root / "data", train=NUM_SAMPLES)
    plan = {"target": str(root / "target"), "data": str(root / "data"), "cases": CASES}
    (root / "plan.json").write_text(json.dumps(plan))
    subprocess.run(
        [sys.executable, "-m", "tests.distributed.precompute_worker", str(root / "plan.json")],
        check=True,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=400,
    )
    return root, json.loads((root / "outcomes.json").read_text())


def store_of(root: Path, name: str) -> Path:
    return root / name / "test" / "features" / "train"


def assert_same_store(path: Path, reference: Path) -> None:
    reader, wanted = FeatureReader(path), FeatureReader(reference)
    reader.verify()
    assert reader.sample_ids == wanted.sample_ids
    assert len(reader) == NUM_SAMPLES
    listed = [sample_id for shard in reader.manifest.shards for sample_id in shard.sample_ids]
    assert len(listed) == NUM_SAMPLES, "a sample is stored twice"
    for index in range(len(reader)):
        got, expected = reader.get(index), wanted.get(index)
        assert torch.equal(got.input_ids, expected.input_ids)
        assert torch.equal(got.loss_mask, expected.loss_mask)
        # Who shares a batch moves fp32 by rounding only.
        torch.testing.assert_close(got.hidden, expected.hidden, rtol=1e-4, atol=1e-4)
    assert not [file for file in path.iterdir() if file.name.startswith((".tmp", "part"))]


@pytest.mark.parametrize("name", CASES)
def test_a_killed_dump_resumes_to_the_same_store(
    outcomes: tuple[Path, dict[str, Any]], name: str
) -> None:
    root, results = outcomes
    *earlier, last = results[name]
    for plan, result in zip(CASES[name], earlier, strict=False):
        if not plan["die_at"]:
            assert set(result["codes"]) == {0}
            continue
        assert result["codes"][plan["die_at"][0]] == -9, "the run was meant to be killed"
        # The others are killed too, unless they notice first that a peer is gone.
        assert 0 not in result["codes"]
    assert set(last["codes"]) == {0}
    assert_same_store(store_of(root, name), store_of(root, "plain"))


@pytest.mark.parametrize("name", KILLS)
def test_a_kill_loses_at_most_the_shard_being_written(
    outcomes: tuple[Path, dict[str, Any]], name: str
) -> None:
    root, results = outcomes
    killed, resumed = results[name]
    survivors = killed["shards"]
    if KILLS[name][2] is not None:
        assert survivors == KILLS[name][2]
    shards = load_manifest(store_of(root, "plain")).shards
    kept = sum(len(shard.sample_ids) for shard in shards[:survivors])
    assert resumed["computed"][0] == NUM_SAMPLES - kept


@pytest.mark.parametrize("name", ["plain", "two_ranks", "spread"])
def test_a_finished_dump_is_not_computed_again(
    outcomes: tuple[Path, dict[str, Any]], name: str
) -> None:
    _, results = outcomes
    first, second = results[name]
    assert first["computed"] == [NUM_SAMPLES, 4]
    assert second["computed"] == [0, 0]
    assert second["shards"] == first["shards"]


def test_both_ranks_write_shards(outcomes: tuple[Path, dict[str, Any]]) -> None:
    root, results = outcomes
    assert results["two_ranks"][0]["shards"] >= 2
    plain = {shard.sample_ids for shard in load_manifest(store_of(root, "plain")).shards}
    shared = {shard.sample_ids for shard in load_manifest(store_of(root, "two_ranks")).shards}
    assert plain == shared, "groups do not depend on the number of ranks"


def test_copies_of_a_spread_target_share_the_work(outcomes: tuple[Path, dict[str, Any]]) -> None:
    """Four ranks that are two copies of the target dump the groups that two ranks would."""
    root, results = outcomes
    assert results["spread"][0]["shards"] == results["two_ranks"][0]["shards"]
    two = {shard.sample_ids for shard in load_manifest(store_of(root, "two_ranks")).shards}
    assert {shard.sample_ids for shard in load_manifest(store_of(root, "spread")).shards} == two


def test_shards_of_a_killed_pair_are_used_by_one_process(
    outcomes: tuple[Path, dict[str, Any]],
) -> None:
    _, results = outcomes
    killed, resumed = results["two_then_one"]
    assert killed["shards"] >= 1
    assert 0 < resumed["computed"][0] < NUM_SAMPLES
