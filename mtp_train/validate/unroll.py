"""K chained steps of a head, twice: in the runtime over a paged cache, and in the training forward.

Start ``i`` of a sequence takes ``g_i`` and ``t_{i+1}``; chained step ``k`` takes the side's own
recycled state and one more token at position ``i + k``.

Shape legend: T tokens of one sequence, S starts of one sequence, N starts of a pack, K steps,
D model width, E columns of residual streams, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mtp_train.attention import cut_queries
from mtp_train.heads.base import TrainingHead
from mtp_train.own_tokens import own_tokens
from mtp_train.packing import HeadBatch, UnrollStep, read_rows
from runtime.batch import BatchMode, build_batch, upload_ids
from runtime.kv_cache import SlotTable
from runtime.models.heads.mtp import MtpHead

_PAGE_SIZE = 16


@dataclass(frozen=True)
class HiddenSequence:
    """Token ids and the target's states ``[T, D]`` of one sequence."""

    input_ids: torch.Tensor  # int64 [T], host
    hidden: torch.Tensor = field(repr=False)
    layers: torch.Tensor | None = field(default=None, repr=False)  # [T, E], where the head reads it

    @property
    def target_rows(self) -> torch.Tensor:
        """As the target gives them: ``g``, and the residual streams behind it."""
        return self.hidden if self.layers is None else torch.cat((self.hidden, self.layers), 1)

    @property
    def loss_mask(self) -> torch.Tensor:
        """Everything may be learnt; packing asks for it."""
        return torch.ones(len(self.input_ids), dtype=torch.bool)


@dataclass(frozen=True)
class ChainStep:
    """One chained step from S starts: the state ``lm_head`` reads, and the draft's logits."""

    states_SD: torch.Tensor = field(repr=False)
    logits_SV: torch.Tensor = field(repr=False)


@torch.inference_mode()
def runtime_chain(
    head: MtpHead, sequence: HiddenSequence, starts: Sequence[int], num_steps: int
) -> list[ChainStep]:
    """Teacher-forced chains in the runtime: step k of start i is fed ``t_{i+1+k}``.

    All rows are prefilled once, then starts are taken from the last to the first: a chain writes
    behind its own start only, and the rows that it overwrites are needed by later starts alone.
    """
    ids, hidden_TD = sequence.input_ids, sequence.target_rows.to(head.device)
    num_rows = len(ids) - 1
    pages = -(-(num_rows + num_steps) // _PAGE_SIZE)
    table = SlotTable(num_rows=1, max_len=pages * _PAGE_SIZE, page_size=_PAGE_SIZE, num_pages=pages)
    row = table.acquire_row()
    table.reserve(row, num_rows + num_steps)
    pool = head.new_pool(pages * _PAGE_SIZE)
    shifted = ids.tolist()[1:]

    def forward(start: int, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        batch = build_batch(
            BatchMode.PREFILL if len(tokens) > 1 else BatchMode.DECODE,
            table=table,
            table_rows=[row],
            starts=[start],
            q_lens=[len(tokens)],
            input_ids_N=upload_ids(tokens, head.device),
            device=head.device,
            hidden_ND=hidden,
        )
        return head.forward(batch, table, pool)

    first_TD = forward(0, shifted, hidden_TD[:num_rows])
    recycled: list[list[torch.Tensor]] = [[] for _ in range(num_steps)]
    for start in sorted(starts, reverse=True):
        state_1D = first_TD[start : start + 1]
        recycled[0].append(state_1D)
        for step in range(1, num_steps):
            state_1D = forward(start + step, shifted[start + step : start + step + 1], state_1D)
            recycled[step].append(state_1D)
    order = torch.tensor(sorted(range(len(starts)), key=lambda n: -starts[n])).argsort()
    steps = []
    for states in recycled:
        state_SD = torch.cat(states)[order]
        steps.append(ChainStep(head.state_for_logits(state_SD), head.logits(state_SD)))
    return steps


@torch.inference_mode()
def training_drafts(
    head: TrainingHead,
    sequences: Sequence[HiddenSequence],
    starts: Sequence[Sequence[int]],
    *,
    num_steps: int,
    embedding_VD: torch.Tensor,
    lm_heads: Sequence[torch.Tensor],
    draft_columns: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Arg-maxed drafts of the training forward, int64 ``[S, K]`` (host) per sequence.

    ``lm_heads`` are what the head drafts with (:meth:`Subject.draft_lm_heads`), their row j token
    ``draft_columns[j]``. Step ``k >= 1`` is fed what step ``k - 1`` drafted. The sequences
    are packed into one forward.
    """
    fed_kN = [
        torch.cat(
            [
                sequence.input_ids[torch.tensor(list(own), dtype=torch.int64) + 1]
                for sequence, own in zip(sequences, starts, strict=True)
            ]
        )
    ]
    for step in range(num_steps):
        batch = chain_batch(sequences, starts, fed_kN)
        states = head(batch.to(embedding_VD.device, embedding_VD.dtype), embedding_VD)
        lm_head_WD = lm_head_of(lm_heads, step)
        fed_kN.append(argmax_tokens(states[step], lm_head_WD, draft_columns).cpu())
    drafts_NK = torch.stack(fed_kN[1:], 1)
    return list(drafts_NK.split([len(own) for own in starts]))


def lm_head_of(lm_heads: Sequence[torch.Tensor], step: int) -> torch.Tensor:
    """The one that reads the states of ``step``: there is one for all steps, or one for each."""
    return lm_heads[step if len(lm_heads) > 1 else 0]


def argmax_tokens(
    states_ND: torch.Tensor, lm_head_WD: torch.Tensor, draft_columns: torch.Tensor | None
) -> torch.Tensor:
    """Target ids, int64 ``[N]``, of the largest logits (in ``lm_head``'s dtype)."""
    best_N = own_tokens(states_ND, lm_head_WD)
    return best_N if draft_columns is None else draft_columns.to(best_N.device)[best_N]


def chain_batch(
    sequences: Sequence[HiddenSequence],
    starts: Sequence[Sequence[int]],
    fed_kN: Sequence[torch.Tensor],
) -> HeadBatch:
    """A packed batch whose chains start at ``starts`` (ascending per sequence) and are fed
    ``fed_kN[k]`` (``fed_kN[0]`` must be ``t_{i+1}``). It carries no loss.
    """
    hidden, next_ids, positions, rows, borders = [], [], [], [], [0]
    for sequence, own in zip(sequences, starts, strict=True):
        num_rows = max(own, default=-1) + 1
        read_TE = read_rows(sequence, of_layers=sequence.layers is not None)
        hidden.append(read_TE[:num_rows])
        next_ids.append(sequence.input_ids[1 : num_rows + 1])
        positions.append(torch.arange(num_rows))
        rows.append(torch.tensor(list(own), dtype=torch.int64) + borders[-1])
        borders.append(borders[-1] + num_rows)
    rows_N = torch.cat(rows)
    none = torch.empty(0, dtype=torch.int64)
    no_target = hidden[0].new_empty(0, sequences[0].hidden.shape[1])
    own_N = torch.arange(len(rows_N))
    blocks = cut_queries(rows_N, tuple(borders))
    steps = tuple(
        UnrollStep(rows_N, own_N if k else rows_N, ids_N, none, none, no_target, blocks)
        for k, ids_N in enumerate(fed_kN)
    )
    return HeadBatch(
        torch.cat(hidden), torch.cat(next_ids), torch.cat(positions), tuple(borders), steps
    )
