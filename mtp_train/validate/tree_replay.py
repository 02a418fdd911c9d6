"""Draft trees replayed by the training forward: would training have drafted these nodes?

Every parent of a tree is the end of a chain: a start of the output, then the tokens on the way down
to it. The training forward unrolls all of these chains at once, each fed its own tokens; the
parent's children have to be the best of the logits at its end, in order. Which parents get
children, and how many, is the runtime's choice and taken as it is.

Shape legend: C chains of all sequences, D model width, W draft vocabulary, R children.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_train.heads.base import TrainingHead
from mtp_train.validate.unroll import HiddenSequence, chain_batch, lm_head_of
from runtime.request import Generation, SpecStep

TIE = 1e-4  # of the largest logit's size: nearer logits may change places
_ROW_CHUNK = 256


@dataclass(frozen=True)
class TreeReplay:
    """``wrong_nodes``: children that training would not have drafted there. ``wrong_steps``: steps
    whose accepted path is not the one that the output takes through the tree.
    """

    num_steps: int
    num_nodes: int
    wrong_nodes: int
    wrong_steps: int


@dataclass(frozen=True)
class _Chain:
    """From row ``start`` of a sequence over the tokens of ``path`` to the parent of ``children``,
    columns of the draft vocabulary.
    """

    start: int
    path: tuple[int, ...]
    children: tuple[int, ...]


@torch.inference_mode()
def replay_trees(
    head: TrainingHead,
    generations: Sequence[Generation],
    hidden: Sequence[HiddenSequence],
    *,
    embedding_VD: torch.Tensor,
    lm_heads: Sequence[torch.Tensor],
    draft_columns: torch.Tensor | None = None,
) -> TreeReplay:
    """``generations`` were decoded greedily with draft trees; ``hidden``: the target's states over
    prompt + output of each; ``lm_heads`` as for :func:`mtp_train.validate.unroll.training_drafts`.
    All chains are one training forward: for a handful of generations.
    """
    columns = _columns(draft_columns)
    chains = [_chains(generation, columns) for generation in generations]
    flat = [chain for own in chains for chain in own]
    steps = [(generation, step) for generation in generations for step in generation.steps]
    wrong_steps = sum(_path_length(g, s) != _kept(g, s) for g, s in steps)
    if not flat:
        return TreeReplay(len(steps), 0, 0, wrong_steps)
    depth = max(len(chain.path) for chain in flat)
    starts = [[chain.start for chain in own] for own in chains]
    next_ids_C = torch.cat(
        [h.input_ids[torch.tensor(own) + 1] for h, own in zip(hidden, starts, strict=True) if own]
    )
    fed = [next_ids_C]
    for k in range(depth):  # a chain that has ended is fed anything: nobody reads on
        fed.append(torch.tensor([c.path[k] if k < len(c.path) else 0 for c in flat]))
    batch = chain_batch(hidden, starts, fed).to(embedding_VD.device, embedding_VD.dtype)
    states = head(batch, embedding_VD)
    wrong_nodes = 0
    for k in range(depth + 1):
        ending = [index for index, chain in enumerate(flat) if len(chain.path) == k]
        for at in range(0, len(ending), _ROW_CHUNK):
            rows = ending[at : at + _ROW_CHUNK]
            logits_CW = (states[k][torch.tensor(rows)] @ lm_head_of(lm_heads, k).T).float()
            wrong_nodes += sum(
                _count_wrong(logits_W, flat[row].children)
                for row, logits_W in zip(rows, logits_CW, strict=True)
            )
    return TreeReplay(len(steps), sum(len(c.children) for c in flat), wrong_nodes, wrong_steps)


def _count_wrong(logits_W: torch.Tensor, children: Sequence[int]) -> int:
    """Children that are not the best columns in order, but for ties. A column that the draft
    vocabulary lacks (-1) is wrong.
    """
    best_R = logits_W.topk(len(children)).values
    own_R = logits_W[torch.tensor(children, device=logits_W.device)]
    is_right_R = (own_R - best_R).abs() <= TIE * logits_W.abs().max()
    is_known_R = torch.tensor(children, device=logits_W.device) >= 0
    return int((~(is_right_R & is_known_R)).sum())


def _chains(generation: Generation, columns: dict[int, int] | None) -> list[_Chain]:
    """One per parent of every step's tree, starts ascending."""
    chains = []
    for step in generation.steps:
        start = len(generation.prompt_ids) + step.start - 2
        children: dict[int, list[int]] = defaultdict(list)
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for row, (token, parent) in enumerate(
            zip(step.draft_ids, step.tree_parents, strict=True), start=1
        ):
            children[parent].append(token if columns is None else columns.get(token, -1))
            paths[row] = (*paths[parent], token)
        chains += [_Chain(start, paths[row], tuple(ids)) for row, ids in children.items()]
    return chains


def _path_length(generation: Generation, step: SpecStep) -> int:
    """How far down its tree the output goes."""
    row = length = 0
    for token in generation.output_ids[step.start :]:
        child = next(
            (
                index
                for index, (own, parent) in enumerate(
                    zip(step.draft_ids, step.tree_parents, strict=True), start=1
                )
                if parent == row and own == token
            ),
            0,
        )
        if not child:
            break
        row, length = child, length + 1
    return length


def _kept(generation: Generation, step: SpecStep) -> int:
    return min(step.num_accepted, len(generation.output_ids) - step.start)


def _columns(draft_columns: torch.Tensor | None) -> dict[int, int] | None:
    """Column of the draft vocabulary by target id."""
    if draft_columns is None:
        return None
    return {token: column for column, token in enumerate(draft_columns.tolist())}
