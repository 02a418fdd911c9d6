"""P0 of the residual streams beside ``g``: is the dumped ``S_k`` the target's?

``S_k`` has no distribution of its own to compare, so vectors are: the dump, before and after the
codec, against entry ``k`` of Hugging Face's ``hidden_states`` in fp32. Errors are relative to the
row's own length, for rows differ in length by orders of magnitude. In fp32 every row may differ by
1e-4. In lower precision, and after the codec, the mean error must stay below half the distance to
the nearer of the streams one layer before and behind: what is stored is then nearer to ``S_k`` than
to any other, so that a stream one layer off is red at any precision.

Shape legend: M rows of a window, D model width, a layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_train.config import Codec
from mtp_train.features.codecs import decode_layers, encode_layers
from mtp_train.features.manifest import LayerComparison
from mtp_train.features.sources import HuggingFaceSource

FP32_BOUND = 1e-4
NEIGHBOUR_SHARE = 0.5


def compare_layers(
    source: HuggingFaceSource,
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    layers: Sequence[torch.Tensor],
    *,
    layer_ids: Sequence[int],
    codec: Codec,
) -> tuple[LayerComparison, ...]:
    """``layers``: the dumped ``[M, a * D]`` of the last rows of each sequence, from ``starts`` on
    and without the last one, on the host. ``source`` computes in fp32.
    """
    near_ids = sorted({k + step for k in layer_ids for step in (-1, 0, 1)} - {source.num_layers})
    found: dict[int, list[torch.Tensor]] = {k: [] for k in near_ids}
    for sequence, start in zip(sequences, starts, strict=True):
        for k, stream_TD in zip(near_ids, source.residuals(sequence, near_ids), strict=True):
            found[k].append(stream_TD[start:-1].float().cpu())
    theirs = {k: torch.cat(parts) for k, parts in found.items()}
    ours = torch.cat(list(layers)).float()
    width = ours.shape[1] // len(layer_ids)
    stored = decode_layers(
        encode_layers(ours, codec, width=width), width=width, dtype=torch.float32
    )
    figures = []
    for number, k in enumerate(layer_ids):
        columns = slice(number * width, (number + 1) * width)
        error_M = row_errors(ours[:, columns], theirs[k])
        near = [theirs[other] for other in (k - 1, k + 1) if other in theirs]
        figures.append(
            LayerComparison(
                layer_id=k,
                max_error=float(error_M.max()),
                mean_error=float(error_M.mean()),
                codec_error=float(row_errors(stored[:, columns], ours[:, columns]).mean()),
                neighbour=min(float(row_errors(other, theirs[k]).mean()) for other in near),
            )
        )
    return tuple(figures)


def layer_failures(figures: Sequence[LayerComparison], *, dtype: str, codec: Codec) -> list[str]:
    """What is out of bound, in words. ``dtype`` is that of the states before the codec."""
    found = []
    for item in figures:
        bound = NEIGHBOUR_SHARE * item.neighbour
        error, allowed = item.mean_error, bound
        if dtype == "float32":
            error, allowed = item.max_error, FP32_BOUND
        if not error <= allowed:
            found.append(
                f"S_{item.layer_id} differs from huggingface by {error:.3g} of its length, allowed "
                f"{allowed:.3g}"
            )
        if not item.codec_error <= bound:
            found.append(
                f"codec {codec} moves S_{item.layer_id} by {item.codec_error:.3g} of its length, "
                f"allowed {bound:.3g}"
            )
    return found


def row_errors(got_MD: torch.Tensor, wanted_MD: torch.Tensor) -> torch.Tensor:
    """``|got - wanted| / |wanted|`` of each row, fp32 ``[M]``."""
    lengths_M = wanted_MD.float().norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return (got_MD.float() - wanted_MD.float()).norm(dim=1) / lengths_M
