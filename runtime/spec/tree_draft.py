"""Growing a draft tree with a head, level by level; the structure stays on the device.

A *candidate* is a drafted token; the head is run on those that get children. One level is one
forward: its rows take the parent's state and the candidate's token, sit behind the L final rows of
the draft's cache and see those and the rows of their own ancestors. Row slots of a level follow
those of the level before, whatever the branch; all of them are scratch, overwritten by the
extension.

Two ways to choose: :class:`FixedGrower` fills a shape that is known beforehand (EAGLE),
:class:`DynamicGrower` expands the best candidates of each level by the probability of their path
and keeps the best N of all (EAGLE-2).

Shape legend: B requests, N nodes, S rows of a level, J rows of all levels so far, P candidates per
level, A all candidates, D model width, W draft vocabulary, X what candidates are chosen from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.batch import upload
from runtime.sampling import top_candidates
from runtime.spec.tree_shape import TreeShape, visible_rows


@dataclass(frozen=True)
class DraftTree:
    """N drafted nodes per request in breadth-first order; ``parents_BN`` are rows (0: the root).

    ``depths_BN`` counts from 1.
    """

    ids_BN: torch.Tensor
    parents_BN: torch.Tensor
    depths_BN: torch.Tensor


@dataclass(frozen=True)
class LevelRows:
    """Rows of one level: candidates' ids and parents' states, and which draft rows they see."""

    ids_BS: torch.Tensor
    hidden_BSD: torch.Tensor
    visible_BSJ: torch.Tensor


RunLevel = Callable[[int, LevelRows], tuple[torch.Tensor, torch.Tensor]]
"""(depth of the candidates, rows) -> states ``[B, S, D]`` and what their children are chosen from:
the best columns, best first, for a fixed tree; logits ``[B, S, W]`` for a dynamic one.
"""


class Grower(ABC):
    """How a tree grows. Holds the sizes that the host plans with."""

    num_nodes: int
    num_draft_rows: int  # of all levels together
    max_level_rows: int
    is_fixed = False  # whether every tree has the same shape

    @abstractmethod
    def grow(
        self, hidden_BD: torch.Tensor, drawn_from_BX: torch.Tensor, run_level: RunLevel
    ) -> DraftTree:
        """Grow from the relay state. Ids are those of the draft vocabulary. Never waits."""


class FixedGrower(Grower):
    """Every request gets the same shape, filled with the best columns of each state."""

    is_fixed = True

    def __init__(self, shape: TreeShape, *, device: torch.device) -> None:
        self.shape = shape
        self.num_nodes = shape.num_nodes
        self._device = device
        levels = [shape.expanded_rows(depth) for depth in range(1, shape.depth)]
        self.num_draft_rows = sum(map(len, levels))
        self.max_level_rows = max(map(len, levels), default=0)
        parents_1N = torch.tensor([shape.parents])
        visible_RR = visible_rows(parents_1N, shape.depth)[0]
        self._parents_1N = self._upload(parents_1N)
        self._depths_1N = self._upload(torch.tensor([shape.depths]))
        self._levels = []
        rows_above: tuple[int, ...] = (0,)  # rows whose logits give this level's candidates
        row_slots: list[int] = []
        for depth in range(1, shape.depth + 1):
            members = [i for i, level in enumerate(shape.depths) if level == depth]
            width = max(shape.ranks[i] for i in members) + 1
            picks = [rows_above.index(shape.parents[i]) * width + shape.ranks[i] for i in members]
            expanded = levels[depth - 1] if depth < shape.depth else ()
            row_slots.extend(expanded)
            first = 1 + members[0]  # rows of a level are consecutive
            self._levels.append(
                _FixedLevel(
                    width=width,
                    picks_P=self._upload(torch.tensor(picks)),
                    expanded_S=self._upload(torch.tensor([row - first for row in expanded]).long()),
                    above_S=self._upload(
                        torch.tensor(
                            [rows_above.index(shape.parents[row - 1]) for row in expanded]
                        ).long()
                    ),
                    visible_SJ=self._upload(
                        visible_RR[list(expanded)][:, list(row_slots)] if expanded else visible_RR
                    ),
                )
            )
            rows_above = expanded

    def grow(
        self, hidden_BD: torch.Tensor, drawn_from_BX: torch.Tensor, run_level: RunLevel
    ) -> DraftTree:
        count = hidden_BD.shape[0]
        states_BSD, columns_BSX = hidden_BD[:, None], drawn_from_BX[:, None]
        chosen = []
        for depth, level in enumerate(self._levels, start=1):
            ids_BSP = columns_BSX[..., : level.width]
            ids_BP = ids_BSP.flatten(1).index_select(1, level.picks_P)
            chosen.append(ids_BP)
            if depth == len(self._levels):
                break
            rows = LevelRows(
                ids_BS=ids_BP.index_select(1, level.expanded_S),
                hidden_BSD=states_BSD.index_select(1, level.above_S),
                visible_BSJ=level.visible_SJ.expand(count, -1, -1),
            )
            states_BSD, columns_BSX = run_level(depth, rows)
        return DraftTree(
            ids_BN=torch.cat(chosen, 1),
            parents_BN=self._parents_1N.repeat(count, 1) if count > 1 else self._parents_1N,
            depths_BN=self._depths_1N.repeat(count, 1) if count > 1 else self._depths_1N,
        )

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return upload(tensor, self._device)


@dataclass(frozen=True)
class _FixedLevel:
    """``picks_P`` into (rows above x width); ``expanded_S`` into the level's candidates."""

    width: int
    picks_P: torch.Tensor
    expanded_S: torch.Tensor
    above_S: torch.Tensor
    visible_SJ: torch.Tensor


class DynamicGrower(Grower):
    """EAGLE-2: a candidate's score is the log-probability of its path under the head.

    Every level expands its ``top_k`` best candidates into ``top_k`` children each; of all
    candidates the best ``num_nodes`` are verified. A child never scores above its parent and comes
    after it, so with a stable order the chosen ones are a tree.
    """

    def __init__(self, num_nodes: int, *, depth: int, top_k: int, device: torch.device) -> None:
        self.depth = depth
        self.top_k = top_k
        self.num_candidates = top_k + (depth - 1) * top_k * top_k
        self.num_nodes = min(num_nodes, self.num_candidates)
        self.num_draft_rows = (depth - 1) * top_k
        self.max_level_rows = top_k if depth > 1 else 0
        depths = [1] * top_k
        for level in range(2, depth + 1):
            depths += [level] * (top_k * top_k)
        self._depths_A = upload(torch.tensor(depths), device)

    def grow(
        self, hidden_BD: torch.Tensor, drawn_from_BX: torch.Tensor, run_level: RunLevel
    ) -> DraftTree:
        k, count, device = self.top_k, hidden_BD.shape[0], hidden_BD.device
        ids, scores = top_candidates(drawn_from_BX[:, None], k)
        all_ids, all_scores = [ids.flatten(1)], [scores.flatten(1)]
        all_parents = [torch.full((count, k), -1, device=device)]  # candidate index; -1: root
        # The expanded candidates of the level: all of the first one.
        picks_BK = torch.arange(k, device=device).expand(count, -1)
        states_BKD = hidden_BD[:, None].expand(-1, k, -1)
        own_KK = torch.eye(k, dtype=torch.bool, device=device)
        seen_BKJ = torch.zeros(count, k, 0, dtype=torch.bool, device=device)
        first = 0  # index of the level's first candidate
        for depth in range(1, self.depth):
            visible_BKJ = torch.cat([seen_BKJ, own_KK.expand(count, -1, -1)], 2)
            rows = LevelRows(all_ids[-1].gather(1, picks_BK), states_BKD, visible_BKJ)
            states_BKD, logits_BKW = run_level(depth, rows)
            ids_BKK, scores_BKK = top_candidates(logits_BKW, k)
            scores_BKK = scores_BKK + all_scores[-1].gather(1, picks_BK)[..., None]
            all_parents.append((picks_BK + first)[..., None].expand(-1, -1, k).flatten(1))
            first += all_ids[-1].shape[1]
            all_ids.append(ids_BKK.flatten(1))
            all_scores.append(scores_BKK.flatten(1))
            if depth + 1 < self.depth:
                picks_BK = all_scores[-1].topk(k, dim=1).indices
                above_BK = picks_BK // k
                states_BKD = _take_rows(states_BKD, above_BK)
                seen_BKJ = _take_rows(visible_BKJ, above_BK)
        return self._rerank(torch.cat(all_ids, 1), torch.cat(all_scores, 1), all_parents)

    def _rerank(
        self, ids_BA: torch.Tensor, scores_BA: torch.Tensor, parents: list[torch.Tensor]
    ) -> DraftTree:
        order_BA = scores_BA.sort(dim=1, descending=True, stable=True).indices
        chosen_BN = order_BA[:, : self.num_nodes].sort(dim=1).values
        rows_N = torch.arange(1, self.num_nodes + 1, device=ids_BA.device)
        # Candidate index + 1 -> row; entry 0 is the root's.
        row_of = ids_BA.new_zeros(ids_BA.shape[0], self.num_candidates + 1)
        row_of.scatter_(1, chosen_BN + 1, rows_N.expand_as(chosen_BN))
        parents_BN = torch.cat(parents, 1).gather(1, chosen_BN)
        return DraftTree(
            ids_BN=ids_BA.gather(1, chosen_BN),
            parents_BN=row_of.gather(1, parents_BN + 1),
            depths_BN=self._depths_A.take(chosen_BN),
        )


def _take_rows(values_BSX: torch.Tensor, rows_BK: torch.Tensor) -> torch.Tensor:
    return values_BSX.gather(1, rows_BK[..., None].expand(-1, -1, values_BSX.shape[2]))
