"""Tree speculation with one shared head: many continuations, one verification pass.

As in ``mtp.py``, L tokens are committed, ``t_L`` is sampled but not processed, and the relay state
predicts ``t_{L+1}``. The tree's row 0 is ``t_L``; row i is node i. Slots count rows, positions
count tokens: row i lies at slot L + i and sits at position L + depth(i).

    propose   levels of the tree, each one forward of the head (``tree_draft.py``)
    target    rows 0..N over [t_L, nodes]; each sees tokens 0..L-1 and its ancestors
    verify    walk down while the target's draw is a child: e = 1..depth+1 tokens
    move      the path's target K/V from slots L + path[j] to L + j
    extend    draft rows L..L+depth over the path's ids and target states; row e-1 is the next relay

The move is a copy on the device, at any page size: the path is known there long before the host
hears of it, so the draft extension needs no wait, and a request's slots stay in one run.
(Permuting the slot table, possible at page size 1, would need both.)

Shape legend: B requests, N nodes, R = N + 1 rows, E = depth + 1, M = B * E rows of all paths,
D model width, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import BatchMode, build_batch, build_tree_batch, upload_ids
from runtime.config import EngineConfig
from runtime.models.base import DraftModel, Model
from runtime.scheduler import StepPlan, Work
from runtime.spec.base import PendingStep, Runner, WorkResult
from runtime.spec.mtp import MtpSchedule
from runtime.spec.tree_draft import (
    DraftTree,
    DynamicGrower,
    FixedGrower,
    Grower,
    LevelRows,
)
from runtime.spec.tree_shape import fixed_tree, visible_rows
from runtime.transfer import HostTransfer
from runtime.verify_tree import verify_tree


def make_grower(config: EngineConfig, depth: int, head: DraftModel) -> Grower:
    """What ``config`` asks for, at most ``depth`` deep."""
    depth = min(depth, config.tree_nodes)
    if config.schedule == "dynamic_tree":
        top_k = min(config.tree_top_k, head.draft_vocab_size)
        return DynamicGrower(config.tree_nodes, depth=depth, top_k=top_k, device=head.device)
    rates = config.tree_rates[: head.draft_vocab_size]
    shape = fixed_tree(config.tree_nodes, depth=depth, rates=rates)
    return FixedGrower(shape, device=head.device)


class TreeSchedule(MtpSchedule):
    """The chain schedule with a tree in the place of its K drafts. K is the tree's depth."""

    def __init__(
        self,
        target: Runner,
        draft: Runner,
        *,
        num_rows: int,
        transfer: HostTransfer,
        config: EngineConfig,
    ) -> None:
        super().__init__(
            target,
            draft,
            num_rows=num_rows,
            transfer=transfer,
            verify=config.verify,
            draft_mode="argmax",
            num_choices=_num_choices(config, draft.model),
        )
        self._config = config
        self._growers: dict[int, Grower] = {}  # by depth: the model's length limit clips it
        self._fixed_visible: dict[int, torch.Tensor] = {}  # bool [1, R, R]

    def grower(self, depth: int) -> Grower:
        if depth not in self._growers:
            self._growers[depth] = make_grower(self._config, depth, self.head)
        return self._growers[depth]

    def collect(self, pending: PendingStep) -> list[WorkResult]:
        if not pending.is_speculative:
            return super().collect(pending)
        ids_BE, num_emitted_B, node_ids_BN, parents_BN = self.transfer.wait(pending.handle)
        return [
            WorkResult(
                work,
                tuple(ids[:count]),
                count,
                count - 1,
                tuple(nodes),
                tree_parents=tuple(parents),
            )
            for work, ids, count, nodes, parents in zip(
                pending.plan.works, ids_BE, num_emitted_B, node_ids_BN, parents_BN, strict=True
            )
        ]

    def _enqueue_speculative(self, plan: StepPlan) -> PendingStep:
        works = plan.works
        table_rows = [work.state.row for work in works]
        starts = [work.start for work in works]
        rows_B = upload_ids(table_rows, self.device)
        starts_B = upload_ids(starts, self.device)
        grower = self.grower(plan.num_draft_tokens)
        depth = min(plan.num_draft_tokens, grower.num_nodes)
        tree = self.propose_tree(works, rows_B, starts_B, grower)
        self.agree(tree.ids_BN, tree.parents_BN, tree.depths_BN)
        self.transfer.mark("propose")

        ids_BR = torch.cat([self.last_ids_R.index_select(0, rows_B)[:, None], tree.ids_BN], 1)
        batch = build_tree_batch(
            table=self.table,
            table_rows=table_rows,
            prefix_lens=starts,
            positions_BS=starts_B[:, None] + _with_root(tree.depths_BN),
            input_ids_BS=ids_BR,
            visible_BSJ=self._visible(tree, depth, grower),
        )
        hidden_ND = self.target.forward(batch)
        logits_NV = self.target.model.logits(hidden_ND)
        self.transfer.mark("target")
        verified = verify_tree(
            logits_NV.view(*ids_BR.shape, -1),
            tree.ids_BN,
            tree.parents_BN,
            self.sampling(works),
            starts_B + 1,
            depth=depth,
            walk=self.target.model.ops.walk_tree,
        )
        # The last ids are a view of the tokens.
        self.agree(verified.tokens_BE, verified.path_BE, verified.num_emitted_B)
        self.last_ids_R.index_copy_(0, rows_B, verified.last_ids_B)
        handle = self.transfer.enqueue(
            verified.ids_BE, verified.num_emitted_B, tree.ids_BN, tree.parents_BN
        )
        self.transfer.mark("copy")

        path_M = _flat_rows(verified.path_BE, ids_BR.shape[1])
        kept_slots_BE = batch.write_slots_N.view(ids_BR.shape)[:, : depth + 1]
        self.target.pool.move(batch.write_slots_N.index_select(0, path_M), kept_slots_BE.flatten())
        path_hidden_MD = hidden_ND.index_select(0, path_M)
        extension = build_batch(
            BatchMode.VERIFY,
            table=self.table,
            table_rows=table_rows,
            starts=starts,
            q_lens=[depth + 1] * len(works),
            input_ids_N=verified.tokens_BE.flatten(),
            device=self.device,
        )
        draft_hidden_MD = self.run_draft(extension, extension.input_ids_N, path_hidden_MD)
        ends_B = _flat_rows(verified.num_emitted_B[:, None] - 1, depth + 1)
        self._set_relay(rows_B, draft_hidden_MD.index_select(0, ends_B))
        self.transfer.mark("extend")
        return PendingStep(plan, handle, path_hidden_MD, draft_hidden_MD, extension.q_lens, True)

    def _visible(self, tree: DraftTree, depth: int, grower: Grower) -> torch.Tensor:
        """As :func:`visible_rows`; a fixed shape's are kept."""
        if not grower.is_fixed:
            return visible_rows(tree.parents_BN, depth)
        if depth not in self._fixed_visible:
            self._fixed_visible[depth] = visible_rows(tree.parents_BN[:1], depth)
        return self._fixed_visible[depth].expand(len(tree.parents_BN), -1, -1)

    def propose_tree(
        self,
        works: Sequence[Work],
        rows_B: torch.Tensor,
        starts_B: torch.Tensor,
        grower: Grower,
    ) -> DraftTree:
        """The tree of every request, in the target's ids."""

        def run_level(depth: int, rows: LevelRows) -> tuple[torch.Tensor, torch.Tensor]:
            count, num_rows = rows.ids_BS.shape
            batch = build_tree_batch(
                table=self.table,
                table_rows=[work.state.row for work in works],
                prefix_lens=[work.start for work in works],
                positions_BS=(starts_B + depth - 1)[:, None].expand(-1, num_rows),
                input_ids_BS=self._to_target_ids(rows.ids_BS),
                visible_BSJ=rows.visible_BSJ,
                hidden_BSD=rows.hidden_BSD,
            )
            hidden_ND = self.draft.forward(batch)
            drawn_from_NX = self.look(hidden_ND)
            return hidden_ND.view(count, num_rows, -1), drawn_from_NX.view(count, num_rows, -1)

        hidden_BD = self.hidden_RD.index_select(0, rows_B)
        drawn_from_BX = self.drawn_from_RX.index_select(0, rows_B)
        tree = grower.grow(hidden_BD, drawn_from_BX, run_level)
        return DraftTree(self._to_target_ids(tree.ids_BN), tree.parents_BN, tree.depths_BN)


def _num_choices(config: EngineConfig, head: Model) -> int:
    """A fixed tree ranks candidates, a dynamic one needs their probabilities."""
    assert isinstance(head, DraftModel)
    if config.schedule == "dynamic_tree":
        return 0
    return min(len(config.tree_rates), head.draft_vocab_size)


def _flat_rows(rows_BX: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows within each request as rows of the batch, ``num_rows`` of each; ``[B * X]``."""
    if len(rows_BX) > 1:
        firsts_B = torch.arange(len(rows_BX), device=rows_BX.device) * num_rows
        rows_BX = rows_BX + firsts_B[:, None]
    return rows_BX.flatten()


def _with_root(depths_BN: torch.Tensor) -> torch.Tensor:
    return torch.cat([depths_BN.new_zeros(depths_BN.shape[0], 1), depths_BN], 1)
