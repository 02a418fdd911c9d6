"""Heads that draft from a list: the ids that the training set's answers use most.

The list restricts what a head proposes and nothing else: weights are those of the head it is made
of, and the loss it was trained with may have looked at other tokens as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mtp_train.answer_tokens import covered_share, most_frequent
from mtp_train.export.reader import load_any_head
from runtime.draft_vocab import reduce_head
from runtime.head_spec import save_head


@dataclass(frozen=True)
class HotList:
    """``size`` ids with the share of the training set's answer tokens that they are."""

    size: int
    coverage: float
    ids_W: torch.Tensor


def make_lists(counts_V: np.ndarray, sizes: Sequence[int]) -> list[HotList]:
    """One list per size, smallest first; each contains the smaller ones.

    Raises ``ValueError`` for a size that is not below the vocabulary, or when nothing was counted.
    """
    vocab_size = len(counts_V)
    for size in sizes:
        if not 0 < size < vocab_size:
            raise ValueError(
                f"hot_vocab.sizes: {size} must be below the target's vocabulary of {vocab_size}; "
                "the whole vocabulary is measured beside every list"
            )
    if not counts_V.any():
        raise ValueError("hot_vocab: the train split has no answer token to count")
    lists = [most_frequent(counts_V, size) for size in sorted(set(sizes))]
    return [HotList(len(ids_W), covered_share(counts_V, ids_W), ids_W) for ids_W in lists]


def write_heads(head_dir: Path, lists: Sequence[HotList], out_dir: Path) -> dict[int, Path]:
    """A native directory ``out_dir/<size>`` per list. Raises ``ValueError`` where the head drafts
    from a list already.
    """
    spec, tensors = load_any_head(head_dir)
    places = {}
    for hot in lists:
        reduced, with_list = reduce_head(spec, tensors, hot.ids_W, coverage=hot.coverage)
        places[hot.size] = out_dir / str(hot.size)
        save_head(places[hot.size], reduced, with_list)
    return places
