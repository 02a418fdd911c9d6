"""Every way this runtime decodes, as an engine over the tiny target: one entry each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.base import Model
from runtime.models.layer_drop import keep_layers
from runtime.models.loader import Target
from runtime.transfer import ImmediateTransfer
from tests.unit.runtime.engine_fixtures import EOS, ByteTokenizer, random_head

MAX_MODEL_LEN = 96
MAX_RUNNING = 12


class HookedTransfer(ImmediateTransfer):
    """Calls ``in_step`` while the host waits for a step's ids: whatever happens there happens in
    the middle of a step. ``is_async`` as on a device that works by itself.
    """

    def __init__(self, *, is_async: bool) -> None:
        self.is_async = is_async
        self.in_step: Callable[[], None] = lambda: None

    def enqueue(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    def wait(self, handle: tuple[torch.Tensor, ...]) -> tuple[list[Any], ...]:
        self.in_step()
        return super().wait(handle)


@dataclass(frozen=True)
class Way:
    """One schedule with its settings. ``draft`` makes the head or model that drafts."""

    draft: Callable[[Target], Model] | None = None
    is_async: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, target: Target, *, page_size: int) -> Engine:
        """With so few pages that a quarter of the running requests fit at full length."""
        num_slots = MAX_RUNNING * MAX_MODEL_LEN // 4
        config = EngineConfig(
            page_size=page_size,
            num_pages=num_slots // page_size,
            max_running=MAX_RUNNING,
            max_model_len=MAX_MODEL_LEN,
            max_batch_tokens=64,
            check_integrity=True,
            **self.settings,
        )
        return Engine(
            target.model,
            config=config,
            eos_token_ids=(EOS,),
            tokenizer=ByteTokenizer(),
            draft=self.draft(target) if self.draft else None,
            transfer=HookedTransfer(is_async=self.is_async),
        )


def shallow(target: Target) -> Model:
    return keep_layers(target.model, [0])


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "plain": Way(),
        "plain_ahead": Way(is_async=True),
        "mtp_k1": Way(draft=random_head, settings={"num_draft_tokens": 1}),
        "mtp_k3": Way(draft=random_head, is_async=True, settings={"num_draft_tokens": 3}),
        "tree_k3": Way(
            draft=random_head,
            settings={
                "num_draft_tokens": 3,
                "schedule": "dynamic_tree",
                "tree_nodes": 4,
                "tree_top_k": 2,
            },
        ),
        "draft_target_k3": Way(draft=shallow, is_async=True, settings={"num_draft_tokens": 3}),
    }
)
