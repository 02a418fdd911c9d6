"""FlashInfer on a device: the cases of the emulator's tests, whole engines, graphs, and no waiting.

bfloat16, heads of 128 and four query heads per key head throughout, so that few kernels have to be
compiled; what needs kernels of its own comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.attention.choice import load_flashinfer
from runtime.attention.flashinfer import FlashInferBackend
from runtime.attention.sdpa import SdpaBackend
from runtime.engine import Engine
from runtime.models.heads import build_head
from runtime.models.loader import Target, load_target
from runtime.scheduler import StepPlan
from runtime.spec.base import PendingStep
from tests.unit.runtime.engine_fixtures import (
    VOCAB,
    head_spec,
    make_engine,
    make_requests,
    random_head_tensors,
)
from tests.unit.runtime.flashinfer_cases import CASES, Setting, decode_steps, verify_steps
from tests.unit.runtime.model_fixtures import save_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_key_value_heads": 1}
Case = Callable[..., float]


def make_backend(**settings: Any) -> FlashInferBackend:
    return FlashInferBackend(load_flashinfer(), device=CUDA, new_event=torch.cuda.Event, **settings)


def setting(heads: int = 8, kv_heads: int = 2) -> Setting:
    return Setting(CUDA, torch.bfloat16, heads, kv_heads, 128)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_llama(path, vocab_size=VOCAB, initializer_range=0.05, **WIDE)
    return path


def load(path: Path, attention: str) -> Target:
    target = load_target(path, dtype=torch.bfloat16, device=CUDA, attention=attention)
    wanted = FlashInferBackend if attention == "flashinfer" else SdpaBackend
    assert isinstance(target.model.backend, wanted)
    return target


def engine_over(target: Target, k: int, **overrides: Any) -> Engine:
    spec = head_spec(target)
    draft = build_head(spec, random_head_tensors(spec), target.model) if k else None
    return make_engine(target, draft, num_draft_tokens=k, **overrides)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_equals_sdpa(case: Case) -> None:
    assert case(make_backend(), setting()) < 2e-2


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_an_engine_has_the_same_states(model_path: Path, k: int, graphs: bool) -> None:
    """Rows are compared as long as the texts are the same: they part at near ties in bfloat16."""
    found: list[dict[str, Any]] = []
    for attention in ("sdpa", "flashinfer"):
        rows: dict[str, Any] = {}
        found.append(rows)
        has_graphs = graphs and attention == "flashinfer"
        engine = engine_over(load(model_path, attention), k, cuda_graphs=has_graphs)
        engine.generate(
            make_requests(),
            hidden_sink=lambda item, rows=rows: rows.update({item.key: item}),  # type: ignore[misc]
        )
    num_compared = 0
    for key, wanted in found[0].items():
        got = found[1][key]
        pairs = zip(wanted.token_ids, got.token_ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted.token_ids))
        same = min(same, len(wanted.token_ids), len(got.token_ids))
        error = (got.hidden_TD[:same] - wanted.hidden_TD[:same]).float().norm(dim=-1)
        size = wanted.hidden_TD[:same].float().norm(dim=-1)
        assert (error / size).max() < 5e-2
        num_compared += same
    assert num_compared > 120


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_step_never_synchronises(model_path: Path, k: int, graphs: bool) -> None:
    engine = engine_over(load(model_path, "flashinfer"), k, cuda_graphs=graphs)
    engine.generate(make_requests(4))  # kernels are compiled, graphs recorded
    enqueue = engine.schedule.enqueue

    def guarded(plan: StepPlan) -> PendingStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return enqueue(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.schedule.enqueue = guarded  # type: ignore[method-assign]
    engine.generate(make_requests(4))


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_either_kernel_for_several_rows(kernel: str) -> None:
    if kernel == "fa3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FA3 is Hopper's")
    assert verify_steps(make_backend(kernel=kernel), setting()) < 2e-2


def test_the_plain_decode_kernel_of_small_groups() -> None:
    assert decode_steps(make_backend(), setting(4, 2)) < 2e-2


@pytest.mark.parametrize("case", [decode_steps, verify_steps], ids=lambda case: case.__name__)
def test_xqa_needs_no_plan(case: Case) -> None:
    assert case(make_backend(use_xqa=True), setting()) < 2e-2
