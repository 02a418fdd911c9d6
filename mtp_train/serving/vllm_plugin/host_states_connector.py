"""Runs inside vLLM: its hidden-state connector, writing from host memory.

vLLM's own one copies through pinned memory and a CUDA stream, which its CPU build has not: 0.32.0
ends with ``pin_memory=True requires a CUDA or other accelerator backend``. Here the rows are copied
in place; everything else is inherited.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as base


class _Copied:
    """Stands for the event of a copy that has ended."""

    def query(self) -> bool:
        return True


class HostStatesConnector(base.ExampleHiddenStatesConnector):
    """Writes a finished request's states at once."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        offsets = torch.arange(self._block_size, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + offsets).flatten()
        states = base.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        save_file(tensors, pending.filename)
        self._req_copy_events[pending.req_id] = _Copied()
