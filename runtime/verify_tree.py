"""Verification of a draft tree: walk down from the root while the target's draw is a child.

Children are a deterministic top-k without repetition, so the draw ``x ~ p`` of a node picks at most
one of them: descend if it does, else emit ``x`` and stop. Every token is the target's own draw at
its position, with the uniform that plain decoding would use: exact at any temperature, and equal to
plain decoding token for token. Rejection sampling of such (one-hot) drafts accepts alike, so there
is one way to verify a tree.

Shape legend: B requests, N nodes, R = N + 1 rows (row 0 is the root), E = depth + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.sampling import SamplingTensors, Stream, sample


@dataclass(frozen=True)
class VerifiedTree:
    """Of every request: ``tokens_BE`` are the draws along the path (after its end they repeat the
    last one), ``ids_BE`` the same with -1 there (output only), ``num_emitted_B`` in 1..E.

    ``path_BE`` holds the rows of the path, the root first; past the path's end row ``j`` itself, a
    row that nobody will use.
    """

    ids_BE: torch.Tensor
    tokens_BE: torch.Tensor
    path_BE: torch.Tensor
    num_emitted_B: torch.Tensor
    last_ids_B: torch.Tensor


WalkTree = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], VerifiedTree]
"""As :func:`walk_tree`."""


def verify_tree(
    target_logits_BRV: torch.Tensor,
    node_ids_BN: torch.Tensor,
    parents_BN: torch.Tensor,
    sampling: SamplingTensors,
    first_positions_B: torch.Tensor,
    *,
    depth: int,
    walk: WalkTree | None = None,
) -> VerifiedTree:
    """Walk the tree; ``sampling`` has B rows, ``first_positions_B`` is the index of the first token
    emitted, ``parents_BN`` are rows, no node is deeper than ``depth``. Never waits.

    ``walk``: :func:`walk_tree` as the model's processor does it best.
    """
    if sampling.all_greedy:  # no draw depends on how many were accepted before it
        count, num_rows, vocab = target_logits_BRV.shape
        tokens_BR = sampling.argmax(target_logits_BRV.reshape(-1, vocab)).view(count, num_rows)
        return (walk or walk_tree)(tokens_BR, node_ids_BN, parents_BN, depth)
    vocab = target_logits_BRV.shape[-1]
    row_B = torch.zeros_like(first_positions_B)
    num_accepted_B = torch.zeros_like(first_positions_B)
    tokens, path = [], []
    for _ in range(depth + 1):
        path.append(row_B)
        logits_BV = target_logits_BRV.gather(1, row_B[:, None, None].expand(-1, 1, vocab))[:, 0]
        token_B = sample(logits_BV, sampling, first_positions_B + num_accepted_B, Stream.TARGET)
        tokens.append(token_B)
        row_B, num_accepted_B = _descend(row_B, num_accepted_B, token_B, node_ids_BN, parents_BN)
    return _verified(tokens, path, num_accepted_B)


def walk_tree(
    tokens_BR: torch.Tensor, node_ids_BN: torch.Tensor, parents_BN: torch.Tensor, depth: int
) -> VerifiedTree:
    """The walk where every row's token is known: int64, on one device."""
    row_B, num_accepted_B = torch.zeros(
        2, len(tokens_BR), dtype=torch.int64, device=tokens_BR.device
    )
    tokens, path = [], []
    for _ in range(depth + 1):
        path.append(row_B)
        tokens.append(tokens_BR.gather(1, row_B[:, None])[:, 0])
        row_B, num_accepted_B = _descend(row_B, num_accepted_B, tokens[-1], node_ids_BN, parents_BN)
    return _verified(tokens, path, num_accepted_B)


def _descend(
    row_B: torch.Tensor,
    num_accepted_B: torch.Tensor,
    token_B: torch.Tensor,
    node_ids_BN: torch.Tensor,
    parents_BN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """To the child that is the token. Once there is none, row and draw stay what they are: the walk
    stands still.
    """
    is_next_BN = (parents_BN == row_B[:, None]) & (node_ids_BN == token_B[:, None])
    found_B, node_B = is_next_BN.to(torch.uint8).max(-1)
    return torch.where(found_B == 1, node_B + 1, row_B), num_accepted_B + found_B


def _verified(
    tokens: list[torch.Tensor], path: list[torch.Tensor], num_accepted_B: torch.Tensor
) -> VerifiedTree:
    tokens_BE, path_BE = torch.stack(tokens, 1), torch.stack(path, 1)
    step_E = torch.arange(tokens_BE.shape[1], device=tokens_BE.device)
    is_past_BE = step_E > num_accepted_B[:, None]
    return VerifiedTree(
        ids_BE=tokens_BE.masked_fill(is_past_BE, -1),
        tokens_BE=tokens_BE,
        path_BE=torch.where(is_past_BE, step_E, path_BE),
        num_emitted_B=num_accepted_B + 1,
        last_ids_B=tokens_BE[:, -1],
    )
