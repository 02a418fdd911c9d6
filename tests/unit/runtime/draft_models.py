"""Draft models for the draft-target schedule: a tiny random Llama, the target with layers left out,
and a stub that knows the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from runtime.batch import ForwardBatch
from runtime.engine import Engine
from runtime.kv_cache import KVPool, SlotTable
from runtime.models.base import Model
from runtime.models.llama import LlamaModel
from runtime.models.loader import Target, load_target
from tests.unit.runtime.engine_fixtures import VOCAB
from tests.unit.runtime.model_fixtures import save_llama


def tiny_draft(path: Path, *, seed: int = 5, vocab_size: int = VOCAB) -> LlamaModel:
    """One layer, another width and other heads than the tiny target's."""
    save_llama(
        path,
        seed=seed,
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return load_target(str(path), dtype=torch.float32, device=torch.device("cpu")).model


class StubModel(Model):
    """Knows the plain output; predicts right where ``behaviour(position)`` says so, else wrong.

    Its state is (position, table row): the row at position p predicts token p + 1 of whoever holds
    the table row. Has no weights and no K/V.
    """

    def __init__(
        self, target: Target, answers: dict[str, list[int]], behaviour: Callable[[int], bool]
    ) -> None:
        self.device, self.dtype = target.model.device, torch.float32
        self.group, self.width = target.model.group, 2
        self.vocab_size = target.model.vocab_size
        self.answers = answers
        self.behaviour = behaviour
        self.engine: Engine | None = None

    def new_pool(self, num_slots: int) -> KVPool:
        return KVPool(
            num_layers=0,
            num_slots=num_slots,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
            device=self.device,
        )

    def forward(self, batch: ForwardBatch, table: SlotTable, pool: KVPool) -> torch.Tensor:
        rows = torch.repeat_interleave(torch.tensor(batch.table_rows), torch.tensor(batch.q_lens))
        return torch.stack([batch.positions_N, rows], 1).float()

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        assert self.engine is not None
        owners = {state.row: state for state in self.engine.scheduler.running}
        logits = torch.zeros(len(hidden_MD), self.vocab_size)
        for index, (position, row) in enumerate(hidden_MD.long().tolist()):
            answer = self.answers[owners[row].request.request_id]
            token = answer[position + 1] if position + 1 < len(answer) else 0
            if not self.behaviour(position + 1):
                token = (token + 1) % self.vocab_size
            logits[index, token] = 1.0
        return logits
