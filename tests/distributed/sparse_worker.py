"""Two forked ranks over gloo with a target of latent attention or experts; exits 0 when states,
scores, drafts and tokens are those of one process.

Arguments: a folder for the target, its family.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from mtp_train.distributed import init_process_group
from runtime.engine import Engine
from runtime.models.loader import load_target
from runtime.parallel import ProcessGroup
from tests.distributed.ranks import run_ranks
from tests.unit.runtime.engine_fixtures import VOCAB, make_requests
from tests.unit.runtime.model_fixtures import random_ids, save_model
from tests.unit.runtime.test_tensor_parallel import Case, make_engine, open_case

CPU = torch.device("cpu")
NUM_EXPERTS = 7  # of no number of ranks a multiple
SIZES: dict[str, dict[str, Any]] = {
    "qwen3moe": {"num_experts": NUM_EXPERTS},
    "deepseekv2": {"n_routed_experts": NUM_EXPERTS},
    "deepseekv3": {"n_routed_experts": NUM_EXPERTS, "n_group": 1, "topk_group": 1},
}
LAYOUTS: list[dict[str, Any]] = [{}]


def live(rank: int) -> None:
    path, family = Path(sys.argv[1]), sys.argv[2]
    group = init_process_group(device="cpu", timeout_s=60)
    if group.is_leader:
        save_model(path, family, vocab_size=VOCAB, **SIZES[family])
    group.barrier()
    case = open_case(path)
    for layout in LAYOUTS:
        for num_drafts in (1, 3):
            compare(case, group, layout, {"num_draft_tokens": num_drafts})
    group.barrier()
    group.close()


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
    """Tokens and drafts; scores by chunks and row by row, and states. Prompts are longer than a
    chunk.
    """
    sequences = [random_ids(n, seed=n, vocab_size=VOCAB) for n in (50, 3)]
    requests = make_requests(4, temperature=0.9, ignore_eos=True)
    generations = engine.generate(requests)
    states = {int(rows.key): rows.hidden_TD for rows in engine.forward_hidden(sequences)}
    scores = [engine.score(sequences, decode_path=one_row) for one_row in (False, True)]
    return generations, [*scores[0], *scores[1], states[0], states[1]]


def main() -> None:
    run_ranks(live, 2)


if __name__ == "__main__":
    main()
