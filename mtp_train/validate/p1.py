"""P1: does a feature depend on who shared its batch?

The same sequences through the feature path alone and under other batch sizes, chunk lengths, page
sizes and orders. In fp32 states may differ by 1e-4 relative; in lower precision by at most twice
the error that the alone-computed states have against fp32 on the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mtp_train.validate.measure import fit_engine
from mtp_train.validate.report import RungResult
from mtp_train.validate.subject import Subject, dtype_name, relative_error, whole_rows
from runtime.config import EngineConfig

FP32_BOUND = 1e-4
ERROR_FACTOR = 2.0


@dataclass(frozen=True)
class Variant:
    """One way to compute the same states."""

    name: str
    max_running: int
    max_batch_tokens: int  # 0: everything at once
    page_size: int
    reverse: bool = False


VARIANTS = (
    Variant("batch", 64, 0, 16),
    Variant("chunks", 1, 7, 16),
    Variant("page_1", 64, 0, 1),
    Variant("reversed_chunks", 64, 33, 16, reverse=True),
)
_ALONE = Variant("alone", 1, 0, 16)


def check(subject: Subject, sequences: Sequence[Sequence[int]]) -> RungResult:
    """``sequences``: token ids of different lengths, at least two."""
    reference = _states(subject, torch.float32, sequences, _ALONE)
    figures: dict[str, float] = {}
    bounds: dict[str, float] = {}
    for variant in VARIANTS:
        states = _states(subject, torch.float32, sequences, variant)
        name = f"float32_{variant.name}"
        figures[name] = max(
            relative_error(got, want) for got, want in zip(states, reference, strict=True)
        )
        bounds[name] = FP32_BOUND
    dtype = subject.runtime_dtype
    if dtype is not torch.float32:
        alone = _states(subject, dtype, sequences, _ALONE)
        own_error = _rms_error(alone, reference)
        figures[f"{dtype_name(dtype)}_against_float32"] = own_error
        for variant in VARIANTS:
            name = f"{dtype_name(dtype)}_{variant.name}"
            figures[name] = _rms_error(_states(subject, dtype, sequences, variant), alone)
            bounds[name] = ERROR_FACTOR * own_error
    passed = all(figures[name] <= bound for name, bound in bounds.items())
    rows = sum(len(sequence) for sequence in sequences)
    note = (
        f"states of {len(sequences)} sequences ({rows} rows) computed alone against other batches, "
        "chunks, page sizes and orders"
    )
    return RungResult("P1", passed, figures, bounds, note=note)


def _states(
    subject: Subject,
    dtype: torch.dtype,
    sequences: Sequence[Sequence[int]],
    variant: Variant,
) -> list[torch.Tensor]:
    """Per sequence ``[T, D]`` as the feature path computes them under ``variant``, and beside
    them whatever else of the target the head reads.
    """
    order = list(range(len(sequences)))
    if variant.reverse:
        order.reverse()
    config = fit_engine(
        _paged(subject.engine_config, variant.page_size),
        [len(sequence) for sequence in sequences],
        max_tokens=1,
        k=0,
        max_running=variant.max_running,
    )
    budget = variant.max_batch_tokens or sum(len(sequence) for sequence in sequences)
    config = replace(config, max_batch_tokens=max(budget, config.max_running))
    engine = subject.engine(dtype, config, with_head=False)
    rows = {
        order[int(states.key)]: states
        for states in engine.forward_hidden(
            [sequences[index] for index in order], max_batch_tokens=budget
        )
    }
    for index, sequence in enumerate(sequences):
        assert rows[index].token_ids == tuple(sequence), "the states are of other tokens"
    return [whole_rows(rows[index]) for index in range(len(sequences))]


def _paged(config: EngineConfig, page_size: int) -> EngineConfig:
    slots = config.num_pages * config.page_size
    return replace(config, page_size=page_size, num_pages=-(-slots // page_size))


def _rms_error(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Root mean square of the difference over that of the reference, all rows pooled."""
    difference = sum(
        float((a.double() - b.double()).square().sum()) for a, b in zip(got, wanted, strict=True)
    )
    scale = sum(float(b.double().square().sum()) for b in wanted)
    return float((difference / max(scale, 1e-30)) ** 0.5)
