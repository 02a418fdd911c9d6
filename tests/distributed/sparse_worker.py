"""Two forked ranks over gloo with a target of latent attention or experts; exits 0 when states,
scores, drafts and tokens, or dumped features, are those of one process.

Arguments: a folder, the target's family, ``decode`` or ``dump``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mtp_train import precompute
from mtp_train.distributed import init_process_group
from mtp_train.features.reader import FeatureReader
from runtime.engine import Engine
from runtime.models.loader import load_target
from runtime.parallel import ProcessGroup, SingleProcessGroup
from tests.distributed.ranks import run_ranks
from tests.unit.features.targets import make_config, save_target, save_token_set
from tests.unit.runtime.engine_fixtures import VOCAB, make_requests
from tests.unit.runtime.model_fixtures import random_ids
from tests.unit.runtime.test_expert_parallel import SIZES, make_sparse_case
from tests.unit.runtime.test_tensor_parallel import Case, make_engine, open_case

CPU = torch.device("cpu")
RUNS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # how it is loaded, settings of the engine
    ({}, {"num_draft_tokens": 3}),
    ({"expert_parallel": True}, {"num_draft_tokens": 1, "micro_batch_halves": True}),
]


def live(rank: int) -> None:
    path, family, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    group = init_process_group(device="cpu", timeout_s=60)
    if what == "dump":
        dump(path, family, group)
    else:
        decode(path, family, group)
    group.barrier()
    group.close()


def decode(path: Path, family: str, group: ProcessGroup) -> None:
    if group.is_leader:
        make_sparse_case(path, family)
    group.barrier()
    case = open_case(path)
    for layout, settings in RUNS:
        compare(case, group, layout, settings)


def dump(path: Path, family: str, group: ProcessGroup) -> None:
    """`mtp precompute` with its checks against decoding and Hugging Face."""
    target, data = path / "target", path / "data"
    if group.is_leader:
        save_target(target, family=family, **SIZES[family])
        save_token_set(data, train=6, validation=1)
    group.barrier()
    config = make_config(path / "spread", target, data, tensor_parallel=group.world_size)
    runtime = replace(config.runtime, expert_parallel=True)
    precompute.run(replace(config, runtime=runtime), group=group)
    if group.is_leader:
        alone = make_config(path / "alone", target, data)
        precompute.run(alone, group=SingleProcessGroup(CPU))
        stores = [path / name / "test" / "features" / "train" for name in ("spread", "alone")]
        spread, whole = (FeatureReader(store) for store in stores)
        assert spread.sample_ids == whole.sample_ids
        for index in range(len(whole)):
            got, wanted = spread.get(index).hidden, whole.get(index).hidden
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def compare(
    case: Case, group: ProcessGroup, layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    target = load_target(case.path, dtype=torch.float32, device=CPU, group=group, **layout)
    engine = make_engine(case, target, draft=True, **settings)
    if not group.is_leader:
        engine.follow()
        return
    got = exercise(engine)
    engine.dismiss()
    wanted = exercise(make_engine(case, case.whole, draft=True, **settings))
    assert got[0] == wanted[0], (layout, settings)
    assert any(step.num_accepted for one in got[0] for step in one.steps)
    for mine, others in zip(got[1], wanted[1], strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-5)


def exercise(engine: Engine) -> tuple[list[Any], list[torch.Tensor]]:
    """Tokens and drafts; scores by chunks and row by row, and states. A prompt is longer than a
    chunk.
    """
    ids = random_ids(40, seed=1, vocab_size=VOCAB)
    generations = engine.generate(make_requests(3, temperature=0.9, ignore_eos=True, max_tokens=12))
    (states,) = engine.forward_hidden([ids])
    scores = [*engine.score([ids]), *engine.score([ids[:6]], decode_path=True)]
    return generations, [*scores, states.hidden_TD]


def main() -> None:
    run_ranks(live, 2)


if __name__ == "__main__":
    main()
