"""P0: is the stored state the state the runtime feeds?

(a) Before the codec: log-probabilities from ``lm_head(g)`` of the feature path against the
runtime's decode path and against Hugging Face, in fp32 and in the run's dtype, by the bounds of
``mtp_train.features.p0``; of a target that rounds its inputs, as ``p0_rounding`` says. (b) After
the codec: the mean KL between recomputed and stored states, and that stored rows are the token
set's rows.

Shape legend: T tokens of one sample, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mtp_train.features.p0 import (
    DecodeReference,
    HuggingFaceReference,
    LogitsReference,
    P0Check,
    spread_by_length,
)
from mtp_train.features.p0_layers import NEIGHBOUR_SHARE, row_errors
from mtp_train.features.reader import FeatureReader
from mtp_train.features.shards import FeatureSample
from mtp_train.features.sources import HuggingFaceSource, RuntimeSource, load_hugging_face
from mtp_train.validate.p0_rounding import MAX_LINEAR_ERROR, compare_linears, stop_rounding
from mtp_train.validate.report import RungResult
from mtp_train.validate.subject import Subject, dtype_name
from runtime.models.llama import LlamaModel
from runtime.team import SoloTeam

_BATCH_TOKENS = 1024
_KL_ROWS = 256  # rows whose logits exist at once
_NUM_CANDIDATES = 64  # stored samples looked at before choosing by length


def check(
    subject: Subject,
    sequences: Sequence[Sequence[int]],
    *,
    stores: Sequence[FeatureReader] = (),
    missing_stores: Sequence[Path] = (),
    token_rows: Mapping[str, Sequence[int]] | None = None,
    max_logprob_gap: float,
    max_kl: float,
    rows_per_sequence: int = 24,
    samples_per_store: int = 4,
) -> RungResult:
    """``sequences``: token ids for (a). ``stores`` are the feature stores for (b); ``token_rows``
    maps a sample id to the tokens it must hold (``None``: there is no token set to compare with).
    ``missing_stores`` should be there and are not, which fails the rung.
    """
    figures: dict[str, Any] = {}
    failures: list[str] = []
    theirs = load_hugging_face(
        subject.target(torch.float32).path, dtype=torch.float32, device=subject.device
    )
    if subject.rounds_inputs:
        more, failed = _check_linears(subject, theirs, sequences)
        figures |= more
        failures += failed
        stop_rounding(theirs)
    hugging_face = HuggingFaceReference(HuggingFaceSource(theirs, max_batch_tokens=_BATCH_TOKENS))
    for dtype in subject.dtypes:
        served = subject.feature_model(dtype)
        ways: list[tuple[LlamaModel, list[LogitsReference]]]
        if subject.rounds_inputs:
            unrounded = subject.unrounded().feature_model(dtype)
            ways = [(served, [DecodeReference(SoloTeam(served))]), (unrounded, [hugging_face])]
        else:
            ways = [(served, [DecodeReference(SoloTeam(served)), hugging_face])]
        for model, references in ways:
            more, failed = _check_paths(
                model,
                sequences,
                references,
                max_logprob_gap=max_logprob_gap,
                max_kl=max_kl,
                num_rows=rows_per_sequence,
            )
            figures |= more
            failures += failed
    store_figures, failed = _check_stores(
        subject,
        stores,
        token_rows,
        max_kl=max_kl,
        num_samples=samples_per_store,
        neighbours={k: figures[f"float32_S_{k}"]["neighbour"] for k in subject.spec.layer_ids},
    )
    figures |= store_figures
    failures += failed
    failures += [f"{path}: no features; run `mtp precompute`" for path in missing_stores]
    compared = f"{len(sequences)} sequences against the decode path and Hugging Face"
    if subject.rounds_inputs:
        how = "are compared linear by linear"
        if not figures["linears"]["count"]:
            how = "were not compared: transformers rounds none here"
        compared += f" (that without rounded inputs; they {how})"
    seen = "no feature store: stored states not looked at"
    if stores:
        seen = f"stored states recomputed ({', '.join(store.path.name for store in stores)})"
    bounds = {"float32_max_gap": max_logprob_gap, "mean_kl": max_kl, "rows_that_differ": 0}
    note = "; ".join([*failures, compared, seen])
    return RungResult("P0", not failures, figures, bounds, note=note)


def _check_linears(
    subject: Subject, hugging_face: Any, sequences: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], list[str]]:
    longest = max((list(ids) for ids in sequences), key=len)
    found = compare_linears(
        subject.target(torch.float32).model,
        hugging_face,
        longest,
        grid=subject.engine_config.int8_grid,
    )
    if found is None:
        return {"linears": {"count": 0}}, []
    figures = {"linears": {"count": found.count, "max_error": found.worst}}
    if found.worst <= MAX_LINEAR_ERROR:
        return figures, []
    return figures, [
        f"{found.name}: its outputs differ from those of transformers for the same inputs by "
        f"{found.worst:.3g} of their length, allowed {MAX_LINEAR_ERROR:g}"
    ]


def _check_paths(
    model: LlamaModel,
    sequences: Sequence[Sequence[int]],
    references: Sequence[LogitsReference],
    *,
    max_logprob_gap: float,
    max_kl: float,
    num_rows: int,
) -> tuple[dict[str, Any], list[str]]:
    dtype = model.dtype
    longest = max(len(sequence) for sequence in sequences)
    source = RuntimeSource(model, max_batch_tokens=_BATCH_TOKENS, max_len=longest)
    samples = [
        FeatureSample(
            states.key,
            torch.tensor(states.token_ids),
            torch.ones(len(states.token_ids), dtype=torch.bool),
            states.hidden_TD,
            states.layers_TE,
        )
        for states in source.hidden(sequences)
    ]
    lost = [s.sample_id for s in samples if len(s.hidden) != len(sequences[int(s.sample_id)])]
    check = P0Check(
        source,
        references,
        codec="fp32",  # the codec is measured on what is stored
        num_samples=len(samples),
        num_rows=num_rows,
        max_logprob_gap=max_logprob_gap,
        max_kl=max_kl,
        layer_ids=model.layer_ids,
    )
    measured = check.measure(samples)
    failures = [f"{dtype_name(dtype)}: {text}" for text in check.failures(measured)]
    if lost:
        failures.append(f"{dtype_name(dtype)}: {len(lost)} sequences have not one row per token")
    figures = {
        f"{dtype_name(dtype)}_{item.name}": {
            "max_gap": item.max_gap,
            "mean_gap": item.mean_gap,
            "mean_kl": item.mean_kl,
        }
        for item in measured.comparisons
    }
    for layer in measured.layers:
        figures[f"{dtype_name(dtype)}_S_{layer.layer_id}"] = {
            "max_error": layer.max_error,
            "mean_error": layer.mean_error,
            "neighbour": layer.neighbour,
        }
    figures[f"{dtype_name(dtype)}_rows"] = {"count": measured.num_rows}
    return figures, failures


def _check_stores(
    subject: Subject,
    stores: Sequence[FeatureReader],
    token_rows: Mapping[str, Sequence[int]] | None,
    *,
    max_kl: float,
    num_samples: int,
    neighbours: Mapping[int, float],
) -> tuple[dict[str, Any], list[str]]:
    figures: dict[str, Any] = {}
    failures: list[str] = []
    for store in stores:
        name = f"store_{store.path.name}"
        step = max(1, len(store) // _NUM_CANDIDATES)
        samples = spread_by_length(
            [store.get(index) for index in range(0, len(store), step)], num_samples
        )
        if not samples:
            failures.append(f"{store.path}: no sample of two tokens or more")
            continue
        kl, layer_errors = _stored_errors(subject, samples)
        for k, error in layer_errors.items():
            figures[f"{name}_S_{k}"] = {"mean_error": error}
            bound = NEIGHBOUR_SHARE * neighbours[k]
            if not error <= bound:
                failures.append(
                    f"{store.path}: stored S_{k} is off by {error:.3g} of its length, allowed "
                    f"{bound:.3g}"
                )
        if subject.spec.layer_ids != store.manifest.fingerprint.layer_ids[: len(layer_errors)]:
            failures.append(
                f"{store.path}: holds residual streams "
                f"{list(store.manifest.fingerprint.layer_ids)}, the head reads "
                f"{list(subject.spec.layer_ids)}"
            )
        wrong = [s.sample_id for s in samples if not _holds_its_tokens(s, token_rows)]
        figures[name] = {
            "samples": len(samples),
            "rows": sum(len(sample.hidden) for sample in samples),
            "mean_kl": kl,
            "rows_that_differ": len(wrong),
        }
        if not kl <= max_kl:
            failures.append(f"{store.path}: stored states cost {kl:.3g} nats, allowed {max_kl:g}")
        if wrong:
            failures.append(f"{store.path}: {len(wrong)} samples are not the token set's rows")
    return figures, failures


def _holds_its_tokens(
    sample: FeatureSample, token_rows: Mapping[str, Sequence[int]] | None
) -> bool:
    """One state per token, and the tokens of the row; a decoded sample lacks the last one."""
    ids = sample.input_ids.tolist()
    if len(sample.hidden) != len(ids):
        return False
    if token_rows is None:
        return True
    row = list(token_rows.get(sample.sample_id, ()))
    return len(row) - len(ids) in (0, 1) and row[: len(ids)] == ids


@torch.inference_mode()
def _stored_errors(
    subject: Subject, samples: Sequence[FeatureSample]
) -> tuple[float, dict[int, float]]:
    """Mean KL(recomputed || stored) over all rows, nats, log-probabilities in fp32; and the mean
    relative error of each residual stream that the head reads.
    """
    model = subject.feature_model(subject.runtime_dtype)
    sequences = [sample.input_ids.tolist() for sample in samples]
    source = RuntimeSource(
        model, max_batch_tokens=_BATCH_TOKENS, max_len=max(len(ids) for ids in sequences)
    )
    total, rows = 0.0, 0
    errors: dict[int, list[torch.Tensor]] = {k: [] for k in model.layer_ids}
    for states in source.hidden(sequences):
        sample = samples[int(states.key)]
        stored_TD = sample.hidden[: len(states.hidden_TD)].to(model.device, model.dtype)
        pairs = zip(
            states.hidden_TD[: len(stored_TD)].split(_KL_ROWS),
            stored_TD.split(_KL_ROWS),
            strict=True,
        )
        for fresh, stored in pairs:
            p_MV = source.logits(fresh).log_softmax(-1)
            q_MV = source.logits(stored).log_softmax(-1)
            total += float((p_MV.exp() * (p_MV - q_MV)).sum())
            rows += len(fresh)
        if sample.layers is None or states.layers_TE is None:
            continue
        fresh_layers = states.layers_TE[: len(sample.layers)].split(model.width, 1)
        stored_layers = sample.layers.to(model.device).split(model.width, 1)
        for k, fresh, stored in zip(model.layer_ids, fresh_layers, stored_layers, strict=False):
            errors[k].append(row_errors(stored, fresh).cpu())
    means = {k: float(torch.cat(parts).mean()) for k, parts in errors.items() if parts}
    return total / max(rows, 1), means
