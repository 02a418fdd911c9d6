"""Forked ranks that decode with a spread target and head over gloo, chains and trees; exits 0 when
tokens are equal.

Four ranks are two copies of the target over two ranks each; every copy serves its own requests.
Arguments: a folder for the target.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from mtp_train.distributed import init_process_group
from runtime.models.loader import load_target
from runtime.parallel import ProcessMesh
from tests.distributed.precompute_worker import free_port
from tests.unit.runtime.engine_fixtures import make_requests
from tests.unit.runtime.test_tensor_parallel import make_case, make_engine, open_case

WORLD_SIZE, WIDTH = 4, 2
CPU = torch.device("cpu")
SHAPES = ("three_kv_heads", "qwen2", "qwen3_one_kv_head")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"schedule": "fixed_tree", "tree_nodes": 6},
    {"schedule": "dynamic_tree", "tree_nodes": 6},
]


def live(rank: int, path: Path) -> None:
    group = init_process_group(device="cpu", timeout_s=60)
    mesh = group.split(WIDTH)
    for shape in SHAPES:
        if group.is_leader:
            make_case(path / shape, shape)
        group.barrier()
        compare(path / shape, mesh)
    group.barrier()
    group.close()


def compare(path: Path, mesh: ProcessMesh) -> None:
    """Drafts, tokens and scores of a spread copy of a target against those of one process."""
    whole = open_case(path)
    target = load_target(path, dtype=torch.float32, device=CPU, group=mesh.tensor)
    assert target.model.embedding_VD.shape[0] * WIDTH >= target.config.vocab_size
    for settings in SETTINGS:
        engine = make_engine(whole, target, draft=True, **settings)
        if not mesh.tensor.is_leader:
            engine.follow()
            continue
        requests = make_requests(5, seed=mesh.data.rank, temperature=0.9, ignore_eos=True)
        got = engine.generate(requests)
        scores = engine.score([request.prompt_ids for request in requests])
        engine.dismiss()
        alone = make_engine(whole, whole.whole, draft=True, **settings)
        assert got == alone.generate(requests), settings
        assert any(step.num_accepted for one in got for step in one.steps)
        wanted = alone.score([request.prompt_ids for request in requests])
        for score, want in zip(scores, wanted, strict=True):
            torch.testing.assert_close(score, want, rtol=1e-4, atol=1e-5)


def main() -> None:
    port = free_port()
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if not pid:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORLD_SIZE),
                "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            live(rank, Path(sys.argv[1]) / "target")
            sys.exit(0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
