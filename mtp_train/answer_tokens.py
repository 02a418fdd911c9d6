"""How often each token occurs in what the assistant wrote: the source of every list of hot ids.

Shape legend: T tokens of one row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from data_prep.token_set import TokenSet

_SCAN_ROWS = 1024

TokensAndMask = tuple[np.ndarray, np.ndarray]  # integers [T], bool [T]


def count_answer_tokens(rows: Iterable[TokensAndMask], *, vocab_size: int) -> np.ndarray:
    """Occurrences under the loss mask, int64 ``[V]``."""
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for ids_T, mask_T in rows:
        np.add.at(counts_V, ids_T[mask_T], 1)
    return counts_V


def most_frequent(counts_V: np.ndarray, size: int) -> torch.Tensor:
    """The ``size`` ids that occur most often, int64, ascending. Ties go to the smaller id."""
    order_V = torch.sort(torch.from_numpy(counts_V), descending=True, stable=True).indices
    return order_V[:size].sort().values


def covered_share(counts_V: np.ndarray, ids_W: torch.Tensor) -> float:
    """Share of all occurrences whose id is in the list."""
    return int(counts_V[ids_W.numpy()].sum()) / max(1, int(counts_V.sum()))


def train_rows(token_set: TokenSet) -> Iterator[TokensAndMask]:
    """Ids and loss mask of every row of the train split, without copies of Python integers."""
    columns = token_set.train.select_columns(["input_ids", "loss_mask"])
    for table in columns.with_format("arrow").iter(_SCAN_ROWS):
        ids, masks = (table[name].combine_chunks() for name in ("input_ids", "loss_mask"))
        flat_ids, flat_mask = (x.flatten().to_numpy(zero_copy_only=False) for x in (ids, masks))
        yield flat_ids, flat_mask
