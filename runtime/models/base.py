"""What a schedule may ask of a model. Target and draft head expose the same two calls.

Shape legend: N rows, M selected rows, D model width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from runtime.attention.base import AttentionBackend
from runtime.batch import ForwardBatch
from runtime.kv_cache import KVPool, SlotTable
from runtime.ops import BlockOps, TorchOps
from runtime.parallel import ProcessGroup


class Model(ABC):
    """A causal model over a paged cache.

    On several ranks (``group``) both calls are collectives whose results are whole and the same on
    every rank; the pool holds this rank's heads.
    """

    group: ProcessGroup  # the ranks that share the weights
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    ops: BlockOps = TorchOps()  # small operations, as the model's processor does them best
    width: int  # D of the states that ``logits`` reads and a head recycles
    layer_ids: tuple[int, ...] = ()  # k of the residual streams S_k that it gives or, a head, reads
    max_context: int | None = None  # tokens of a sequence that it is right for; None: no limit
    not_recorded: str | None = None  # why CUDA graphs cannot record it; None: they can
    backend: AttentionBackend | None = None  # what it attends through, where graphs may record it

    @property
    def row_width(self) -> int:
        """Columns of a target's rows: ``g``, and behind it one ``S_k`` per layer id."""
        return self.width * (1 + len(self.layer_ids))

    @abstractmethod
    def new_pool(self, num_slots: int) -> KVPool:
        """A zeroed pool of this model's shape."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, table: SlotTable, pool: KVPool) -> torch.Tensor:
        """Hidden states ``[N, row_width]`` of a target: post-final-norm ``g``, then the un-normed
        ``S_k`` of ``layer_ids``, ascending. Of a head: the recycled state ``[N, D]``.
        """

    @abstractmethod
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Logits ``[M, V]`` (the model's dtype) of rows that ``forward`` returned, or of their
        first ``D`` columns.
        """

    def tapped(self, layer_ids: Sequence[int]) -> Model:
        """This model, giving these residual streams too. Raises ``ValueError`` where it cannot."""
        raise ValueError(f"{type(self).__name__} gives no residual streams (layer_ids)")

    def argmax(self, logits_MV: torch.Tensor) -> torch.Tensor:
        """Best tokens of rows of logits, int64 ``[M]``; the lowest id on a tie."""
        return self.ops.argmax(logits_MV)


class DraftModel(Model):
    """A draft head. ``forward`` reads ``batch.hidden_ND``, rows of a target that gives the head's
    ``layer_ids`` or rows of its own, and returns the state to recycle.
    """

    max_draft_tokens: int | None = None  # most tokens of one chain; None: as many as asked for

    draft_vocab_size: int
    draft_vocab_ids: (
        torch.Tensor | None
    )  # int64 [draft_vocab_size] target ids; None: full vocabulary

    def best_columns(self, hidden_MD: torch.Tensor, count: int) -> torch.Tensor:
        """The ``count`` best columns of :meth:`logits`, int64 ``[M, count]``, best first.

        The best of all is the lowest column on a tie, as :meth:`argmax` has it.
        """
        logits_MW = self.logits(hidden_MD)
        if count == 1:
            return self.argmax(logits_MW)[:, None]
        return logits_MW.topk(count, dim=-1).indices
