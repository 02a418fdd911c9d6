"""A draft that proposes from a list of token ids: its columns, and where they lie in the target's
vocabulary.

Column ``j`` of a reduced draft is token ``ids_W[j]``; ids are strictly ascending, so that the order
of columns is the vocabulary's order and a tie goes to the same token with and without the list. A
token outside of the list is never proposed (its q is exactly zero); the target may still emit it,
so that every verification mode stays exact. Nothing here waits for the device.

Shape legend: B requests, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from runtime.head_spec import (
    DRAFT_VOCAB_NAME,
    DraftVocab,
    HeadSpec,
    check_draft_ids,
    hash_vocab_ids,
)


def reduce_head(
    spec: HeadSpec, tensors: Mapping[str, torch.Tensor], ids_W: torch.Tensor, *, coverage: float
) -> tuple[HeadSpec, dict[str, torch.Tensor]]:
    """The same head, drafting from ``ids_W`` (int64, strictly ascending) only.

    ``coverage``: share of the training set's answer tokens whose id is in the list. Weights are
    shared, not copied. Raises ``ValueError`` for a head that has a list, or a list that is none.
    """
    if spec.draft_vocab is not None:
        raise ValueError(
            f"head draft_vocab.size={spec.draft_vocab.size}: the head drafts from a list already; "
            "start from the head with the whole vocabulary"
        )
    if spec.lm_head == "own":
        raise ValueError(
            f"head kind={spec.kind}: its lm_head was trained over the whole vocabulary; train it "
            "over a list of ids with head.draft_vocab_size"
        )
    check_draft_ids(ids_W, vocab_size=spec.vocab_size, source="draft vocabulary")
    vocab = DraftVocab(size=len(ids_W), coverage=coverage, ids_sha256=hash_vocab_ids(ids_W))
    return replace(spec, draft_vocab=vocab), {**tensors, DRAFT_VOCAB_NAME: ids_W}


def to_target_ids(columns_B: torch.Tensor, ids_W: torch.Tensor | None) -> torch.Tensor:
    """Token ids of drafted columns; ``ids_W=None``: the whole vocabulary, columns are ids."""
    return columns_B if ids_W is None else ids_W.take(columns_B)


def spread_probs(
    probs_BW: torch.Tensor, ids_W: torch.Tensor | None, *, vocab_size: int
) -> torch.Tensor:
    """q over the target's vocabulary, ``[B, V]``: zero outside of the list, bit for bit inside."""
    if ids_W is None:
        return probs_BW
    full_BV = probs_BW.new_zeros(probs_BW.shape[0], vocab_size)
    return full_BV.index_copy_(1, ids_W, probs_BW)
