"""P2: does the trained head compute the same thing at inference?

The training forward against the runtime forward, both with the weights of the exported directory,
over K chained steps that are fed the same tokens; each side recycles its own states. The training
side runs packed and one sequence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mtp_train.packing import pack
from mtp_train.validate.measure import fit_engine
from mtp_train.validate.report import RungResult
from mtp_train.validate.subject import Subject, dtype_name, relative_error
from mtp_train.validate.unroll import ChainStep, HiddenSequence, lm_head_of, runtime_chain

FP32_BOUND = 1e-4
MAX_ULP = 2.0
_BF16_BITS = 7  # explicit mantissa bits


def check(
    subject: Subject, sequences: Sequence[Sequence[int]], *, k: int, max_starts: int = 16
) -> RungResult:
    """``sequences``: token ids, each longer than ``k + 1``. Row 0 is always among the starts."""
    figures: dict[str, float] = {}
    bounds: dict[str, float] = {}
    num_rows = 0
    for dtype in subject.dtypes:
        hidden = hidden_sequences(subject, sequences, dtype)
        starts = [spread(len(sequence) - 1 - k, max_starts) for sequence in sequences]
        served = [
            runtime_chain(subject.head(dtype), sequence, own, k)
            for sequence, own in zip(hidden, starts, strict=True)
        ]
        num_rows = sum(len(own) for own in starts)
        for name, groups in (("packed", [hidden]), ("alone", [[one] for one in hidden])):
            trained = [
                chain for group in groups for chain in _training_chains(subject, group, dtype, k)
            ]
            picked = [
                [ChainStep(step.states_SD[own], step.logits_SV[own]) for step in chain]
                for chain, own in zip(trained, starts, strict=True)
            ]
            key = f"{dtype_name(dtype)}_{name}"
            if dtype is torch.float32:
                for step in range(k):
                    for part, error in _errors(picked, served, step).items():
                        figures[f"{key}_{part}_{step}"] = error
                        bounds[f"{key}_{part}_{step}"] = FP32_BOUND
            else:
                ulps, share = _argmax_gap(picked, served)
                figures[f"{key}_argmax_ulp"], bounds[f"{key}_argmax_ulp"] = ulps, MAX_ULP
                figures[f"{key}_argmax_differs"] = share
    passed = all(figures[name] <= bound for name, bound in bounds.items())
    note = (
        f"training against inference forward of the head, {num_rows} starts in {len(sequences)} "
        f"sequences, K={k}"
    )
    return RungResult("P2", passed, figures, bounds, note=note)


def hidden_sequences(
    subject: Subject, sequences: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[HiddenSequence]:
    """The target's states of whole sequences, from the feature path."""
    config = fit_engine(
        subject.engine_config,
        [len(sequence) for sequence in sequences],
        max_tokens=1,
        k=0,
        max_running=subject.engine_config.max_running,
    )
    engine = subject.engine(dtype, config, with_head=False)
    states = {int(rows.key): rows for rows in engine.forward_hidden(sequences)}
    # Cloned: the runtime's tensors are inference tensors, which autograd code may not read.
    hidden = []
    for index, sequence in enumerate(sequences):
        rows = states[index]
        layers_TE = None if rows.layers_TE is None else rows.layers_TE.clone()
        ids = torch.tensor(list(sequence))
        hidden.append(HiddenSequence(ids, rows.hidden_TD.clone(), layers_TE))
    return hidden


def spread(count: int, limit: int) -> list[int]:
    """At most ``limit`` of ``0 .. count - 1``, evenly spaced, 0 and the last included."""
    if count <= limit:
        return list(range(count))
    return [round(index * (count - 1) / (limit - 1)) for index in range(limit)]


@torch.inference_mode()
def _training_chains(
    subject: Subject, sequences: Sequence[HiddenSequence], dtype: torch.dtype, k: int
) -> list[list[ChainStep]]:
    """Per sequence, every start's states and logits of the training forward."""
    embedding_VD, lm_heads = subject.embedding(dtype), subject.draft_lm_heads(dtype)
    of_layers = subject.spec.reads_layers
    batch = pack(sequences, num_steps=k, every_row=True, of_layers=of_layers)
    batch = batch.to(subject.device, dtype)
    states = subject.training_head(dtype)(batch, embedding_VD)
    chains: list[list[ChainStep]] = [[] for _ in sequences]
    for step, state_ND in enumerate(states):
        counts = [len(sequence.input_ids) - 1 - step for sequence in sequences]
        for chain, own_SD in zip(chains, state_ND.split(counts), strict=True):
            chain.append(ChainStep(own_SD, own_SD @ lm_head_of(lm_heads, step).t()))
    return chains


def _errors(
    trained: Sequence[Sequence[ChainStep]], served: Sequence[Sequence[ChainStep]], step: int
) -> dict[str, float]:
    pairs = [(a[step], b[step]) for a, b in zip(trained, served, strict=True)]
    return {
        "hidden": max(relative_error(a.states_SD, b.states_SD) for a, b in pairs),
        "logits": max(relative_error(a.logits_SV, b.logits_SV) for a, b in pairs),
    }


def _argmax_gap(
    trained: Sequence[Sequence[ChainStep]], served: Sequence[Sequence[ChainStep]]
) -> tuple[float, float]:
    """Largest gap, in bf16 ulp of the top logit, where the arg-maxes differ; share that differ.

    The gap is the smaller of the two sides' distances between the two candidates: a near tie on
    either side may fall either way.
    """
    worst, different, total = 0.0, 0, 0
    for ours, theirs in zip(trained, served, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            a_SV, b_SV = a.logits_SV.float(), b.logits_SV.float()
            best_a, best_b = a_SV.argmax(-1), b_SV.argmax(-1)
            total += len(best_a)
            for row in (best_a != best_b).nonzero()[:, 0].tolist():
                different += 1
                gap_a = float(a_SV[row, best_a[row]] - a_SV[row, best_b[row]])
                gap_b = float(b_SV[row, best_b[row]] - b_SV[row, best_a[row]])
                top = float(b_SV[row, best_b[row]])
                worst = max(worst, min(gap_a, gap_b) / bf16_ulp(top))
    return worst, different / max(total, 1)


def bf16_ulp(value: float) -> float:
    """Spacing of bfloat16 numbers at ``value``."""
    exponent = math.frexp(value)[1] - 1 if value else -126
    return float(2.0 ** (exponent - _BF16_BITS))
