"""The engine on a GPU: same tokens as on the CPU, and no wait inside a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.models.heads import build_head
from runtime.models.loader import Target, load_target
from runtime.scheduler import StepPlan
from runtime.spec.base import PendingStep
from tests.unit.runtime.engine_fixtures import (
    VOCAB,
    check_draft_state,
    head_spec,
    make_engine,
    make_requests,
    random_head_tensors,
    run_stepwise,
)
from tests.unit.runtime.model_fixtures import save_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_llama(path, vocab_size=VOCAB)
    return path


def load(path: Path, device: str) -> Target:
    return load_target(path, dtype=torch.float32, device=torch.device(device))


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_gpu_output_equals_cpu_output(model_path: Path, k: int, temperature: float) -> None:
    outputs = []
    for device in ("cpu", "cuda"):
        target = load(model_path, device)
        spec = head_spec(target)
        draft = build_head(spec, random_head_tensors(spec), target.model) if k else None
        engine = make_engine(target, draft, num_draft_tokens=k)
        outputs.append(
            [g.output_ids for g in engine.generate(make_requests(temperature=temperature))]
        )
    assert outputs[0] == outputs[1]


def test_draft_state_on_the_gpu_equals_a_recompute(model_path: Path) -> None:
    target = load(model_path, "cuda")
    spec = head_spec(target)
    draft = build_head(spec, random_head_tensors(spec), target.model)
    engine = make_engine(target, draft, num_draft_tokens=3)
    run_stepwise(engine, make_requests(), after_step=lambda engine: check_draft_state(engine))


@pytest.mark.parametrize("k", [0, 2])
def test_a_gpu_step_never_synchronises(model_path: Path, k: int) -> None:
    target = load(model_path, "cuda")
    spec = head_spec(target)
    draft = build_head(spec, random_head_tensors(spec), target.model) if k else None
    engine = make_engine(target, draft, num_draft_tokens=k)
    engine.generate(make_requests(2))  # lazy initialisation may synchronise
    enqueue = engine.schedule.enqueue

    def guarded(plan: StepPlan) -> PendingStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return enqueue(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.schedule.enqueue = guarded  # type: ignore[method-assign]
    engine.generate(make_requests(temperature=0.8))
